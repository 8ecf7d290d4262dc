"""A network in the order of its layers, block by block where it repeats one.

The calibration inputs of a block are kept, so a pass goes through this block alone, and only one
block's inputs are in memory. The result has the bits of passes through the whole network, which are
what is done for layers outside of such blocks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, first_line
from nmrun.oneshot.inputs import LayerMatrix

Pass = Callable[[], None]  # lets all calibration batches through
Arguments = dict[Any, Any]  # of a call, by position or name


def stages(
    model: nn.Module, layers: Sequence[LayerMatrix], passes: Sequence[Pass]
) -> Iterator[tuple[nn.Module, list[LayerMatrix], Pass]]:
    """Split the layers into blocks and single layers, in the order in which the network calls them.
    Earlier stages may be changed before the next is asked for. Yields a stage: the block, or the
    network where the layer is in none; its layers; and what lets all calibration batches through
    them."""

    def through_all() -> None:
        for run in passes:
            run()

    order = _call_order(layers, passes[0])
    chains = _lists(model, layers)
    places: dict[int, set[Any]] = {}  # of a module: the blocks that it is in
    for number, blocks in enumerate(chains):
        for index, block in enumerate(blocks):
            for part in block.modules():
                places.setdefault(id(part), set()).add((number, index))
    together: dict[Any, list[LayerMatrix]] = {}
    for layer in order:
        inside = {place for m in layer.modules for place in places.get(id(m), {layer.name})}
        key = inside.pop() if len(inside) == 1 else layer.name  # several blocks share it
        together.setdefault(key, []).append(layer)
    chain_of: dict[int, Chain | None] = {}
    for key, stage in together.items():
        root, chain, index = model, None, 0
        if isinstance(key, tuple):
            number, index = key
            root = chains[number][index]
            if number not in chain_of:
                made = Chain(chains[number])
                whole = all(map(made.add, passes)) and made.repeats()
                chain_of = {number: made if whole else None}  # the others are done
            chain = chain_of[number]
        else:
            chain_of = {}  # this layer may be pruned, and make what later blocks take
        if chain is None or index < chain.position:
            yield root, stage, through_all
        else:
            yield root, stage, functools.partial(chain.through, index)


def _call_order(layers: Sequence[LayerMatrix], run: Pass) -> list[LayerMatrix]:
    """The layers in the order in which a pass calls them first; those that it does not call last."""
    order: dict[str, LayerMatrix] = {}
    with contextlib.ExitStack() as hooks:
        for layer in layers:

            def note(module: nn.Module, args: Any, layer: LayerMatrix = layer) -> None:
                order.setdefault(layer.name, layer)

            for module in layer.modules:
                hooks.callback(module.register_forward_pre_hook(note).remove)
        try:
            run()
        except Exception as error:  # the model's own code may raise anything
            raise ConfigError(f"the model does not take this batch: {first_line(error)}") from error
    return [*order.values(), *(layer for layer in layers if layer.name not in order)]


def _lists(model: nn.Module, layers: Sequence[LayerMatrix]) -> list[list[nn.Module]]:
    """The outermost lists of modules of one class that have layers inside."""
    ids = {id(module) for layer in layers for module in layer.modules}
    lists: list[list[nn.Module]] = []
    seen: set[int] = set()  # a module may have several names

    def look(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = list(module.children())
        one_class = len(children) > 1 and len({type(child) for child in children}) == 1
        inside = any(id(part) in ids for child in children for part in child.modules())
        themselves = any(id(child) in ids for child in children)
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and one_class and inside and not themselves:
            lists.append(children)
            return
        for child in children:
            look(child)

    look(model)
    return lists


class Chain:
    """Blocks that hand one value on, as one argument: what each takes of every batch, beside that
    value."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self.slots: set[int | str] = set()  # the arguments that were the value, at best one
        self.position = 0  # the block whose inputs the values are
        self.values: list[Tensor] = []  # of each batch
        self.others: list[list[Arguments]] = []  # of each batch, of each block
        self._last = torch.empty(0)  # the value that the last block got of the last batch

    def add(self, run: Pass) -> bool:
        """Let a batch pass, and keep what the blocks were called with. Returns whether they are a
        chain, also with the attributes that the network has set for this batch: called once each
        in their order, with the value that the one before gave as the same argument, and with
        nothing else of theirs."""
        calls: list[Arguments] = []
        outputs: list[list[weakref.ref[Tensor]]] = []
        fits: list[bool] = []
        value: Tensor | None = None

        def before(module: nn.Module, args: Any, kwargs: Arguments, index: int) -> None:
            nonlocal value
            call: Arguments = {**dict(enumerate(args)), **kwargs}
            fits.append(len(calls) == index)
            if index:
                given = outputs[-1][0]() if outputs and outputs[-1] else None
                slots = {k for k, v in call.items() if isinstance(v, Tensor) and v is given}
                call = {key: each for key, each in call.items() if key not in slots}
                others = [each for each in call.values() if isinstance(each, Tensor)]
                tensors = [ref() for refs in outputs for ref in refs]
                fits.append(len(slots) == 1 and not any(v is k for v in others for k in tensors))
                self.slots |= slots
                value = None if given is None else given.clone()  # the block may add to it in place
            else:  # the value that comes in, likewise
                call = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()}
            calls.append(call)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            tensors = [part for part in _outputs(out) if isinstance(part, Tensor)]
            outputs.append([weakref.ref(part) for part in tensors])

        with contextlib.ExitStack() as hooks:
            for index, block in enumerate(self.blocks):
                noting = functools.partial(before, index=index)
                handle = block.register_forward_pre_hook(noting, with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(after).remove)
            run()
        whole = all(fits) and len(calls) == len(self.blocks) and len(self.slots) == 1
        if not whole or value is None or (self.values and not self.repeats()):
            return False
        (slot,) = self.slots
        first = calls[0].pop(slot, None)
        if not isinstance(first, Tensor):
            return False
        self.values.append(first)
        pairs = zip(self.others[-1] if self.others else calls, calls, strict=True)
        self.others.append(
            [{k: _same(former.get(k), v) for k, v in call.items()} for former, call in pairs]
        )
        self._last = value
        return True

    def through(self, index: int) -> None:
        """Let all batches through a block; those before it are passed for the last time."""
        while self.position < index:
            for number, value in enumerate(self.values):
                self.values[number] = self._call(number, self.position, value)
            self.position += 1
        for number, value in enumerate(self.values):
            self._call(number, index, value)

    def repeats(self) -> bool:
        """Whether the last block gets from the last batch by itself what it got in the network.
        It does not where blocks depend on more than their arguments: on autocast in the network's
        ``forward``, or on an attribute that it sets for every batch."""
        value, number = self.values[-1], len(self.values) - 1
        try:
            for index in range(len(self.blocks) - 1):
                value = self._call(number, index, value)
        except Exception:  # what they depend on may be anything
            return False
        return value.dtype == self._last.dtype and torch.equal(value, self._last)

    def _call(self, number: int, index: int, value: Tensor) -> Tensor:
        (slot,) = self.slots
        # a copy, as blocks may add to it in place
        arguments = {**self.others[number][index], slot: value.clone()}
        args = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
        kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
        return _outputs(self.blocks[index](*args, **kwargs))[0]


def _same(previous: Any, value: Any) -> Any:
    """The argument of the batch before where this one is equal, as masks and positions are."""
    if isinstance(value, tuple) and isinstance(previous, tuple) and len(previous) == len(value):
        return tuple(_same(*pair) for pair in zip(previous, value, strict=True))
    if not (isinstance(value, Tensor) and isinstance(previous, Tensor)):
        return value
    layout, former = ((t.shape, t.dtype, t.device) for t in (value, previous))
    return previous if layout == former and torch.equal(previous, value) else value


def _outputs(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)
