"""What one-shot methods see of a layer: its weight as a matrix, and its inputs beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nmrun.sparsity.layers import Candidate, is_conv1d


def input_obstacle(module: nn.Module) -> str:
    """Why a layer's inputs cannot be seen, as a clause, or nothing."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "a convolution in groups, each with inputs of its own" if module.groups > 1 else ""
    if isinstance(module, nn.Linear) or is_conv1d(module) or is_mixture(module):
        return ""
    return f"the inputs of {type(module).__name__} cannot be seen (of linear layers, Conv1d and Conv2d they can)"


class LayerMatrix:
    """A linear layer or convolution as the product of a matrix (outputs, columns) with its inputs.

    The columns of a convolution are its input channels, once for every kernel position: groups of M
    consecutive columns are the groups of its weight. The experts of a mixture are a stack of such
    matrices, (experts, outputs, columns), with as many sums ``X^T X``. ``pattern`` is over the runs
    of columns, as methods take it. ``modules``: all that multiply their inputs with this weight,
    ``module`` first.
    """

    def __init__(self, candidate: Candidate, modules: Sequence[nn.Module]) -> None:
        assert candidate.pattern is not None
        self._candidate, self.modules = candidate, modules
        self.name, self.module, self.dim = candidate.name, candidate.module, candidate.dim
        self.outputs, self.pattern = candidate.outputs, candidate.pattern
        if isinstance(self.module, nn.Conv1d | nn.Conv2d):
            self.pattern = self.pattern.over(self.module.in_channels)

    @property
    def stacked(self) -> bool:
        """Whether it is the experts of a mixture."""
        return is_mixture(self.module)

    @property
    def weight(self) -> Tensor:
        return self._candidate.parameter.detach()

    def matrix(self) -> Tensor:
        """The weight as (outputs, columns), in float32, or in float64 if it is so."""
        matrix = self._apart if self.stacked else self._apart.flatten(1)
        return matrix.to(torch.promote_types(matrix.dtype, torch.float32))

    def write(self, matrix: Tensor) -> None:
        """Write a matrix (outputs, columns) into the weight, in place."""
        self._apart.copy_(matrix.reshape(self._apart.shape))

    @property
    def _apart(self) -> Tensor:
        """A view of the weight with the outputs first (after the experts) and the inputs last."""
        first = 1 if self.stacked else 0
        return self.weight.movedim((self.outputs, self.dim), (first, -1))

    def columns(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input of one of the modules as (tokens, columns); a convolution's tokens are its output
        positions."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not isinstance(module, nn.Conv1d | nn.Conv2d):
            return x.reshape(-1, x.shape[-1])
        conv: Any = module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = functional.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
        kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
        if isinstance(conv, nn.Conv1d):
            x, kernel, stride, dilation = (
                x.unsqueeze(-2),
                (1, *kernel),
                (1, *stride),
                (1, *dilation),
            )
        windows = functional.unfold(x, kernel, dilation=dilation, stride=stride)
        by_channel = windows.unflatten(
            -2, (conv.in_channels, -1)
        )  # (batch, channels, places, tokens)
        return by_channel.movedim((-1, -2, -3), (-3, -2, -1)).flatten(0, -3).flatten(1)


@contextlib.contextmanager
def watched(layers: Sequence[LayerMatrix]) -> Iterator[dict[str, Tensor]]:
    """Sum up ``X^T X`` of each layer's inputs X (tokens, columns), while the context is entered.
    Yields the sums by the layer's name, over all its calls, without those of layers that were
    not called."""
    grams: dict[str, Tensor] = {}

    def watch(layer: LayerMatrix) -> list[Any]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = args[0] if args else next(iter(kwargs.values()))
            with torch.autocast(inputs.device.type, enabled=False):
                x = layer.columns(module, inputs.detach())
                if len(x):
                    gram = grams.setdefault(layer.name, x.new_zeros(x.shape[1], x.shape[1]))
                    gram.addmm_(x.T, x)

        return [m.register_forward_pre_hook(add, with_kwargs=True) for m in layer.modules]

    def add_expert(name: str, expert: int, x: Tensor) -> None:
        x, stack = x.to(torch.promote_types(x.dtype, torch.float32)), stacks[name]
        size = (len(stack), x.shape[1], x.shape[1])
        grams.setdefault(name, x.new_zeros(size))[expert].addmm_(x.T, x)

    stacks = {layer.name: layer.weight for layer in layers if layer.stacked}
    handles = [handle for layer in layers if not layer.stacked for handle in watch(layer)]
    try:
        with ExpertInputs(stacks, add_expert) if stacks else contextlib.nullcontext():
            yield grams
    finally:
        for handle in handles:
            handle.remove()


def output_error(matrix: Tensor, pruned: Tensor, gram: Tensor) -> float:
    """``||X V^T - X W^T||^2 / ||X W^T||^2``; 0 where the layer's output is. ``matrix``: W,
    (outputs, columns); ``pruned``: V; ``gram``: ``X^T X``. Of stacks, the squares of all are
    added up."""
    change = pruned - matrix
    error = float(((change @ gram) * change).sum())
    output = float(((matrix @ gram) * matrix).sum())
    return max(error, 0.0) / output if output > 0 else 0.0


PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
Hook = Callable[[str, int, Tensor], None]


def is_mixture(module: nn.Module) -> bool:
    """Whether a module's experts are multiplied one by one, so that what each sees can be seen."""
    config = getattr(module, "config", None)
    stacked = isinstance(getattr(module, "is_transposed", None), bool)  # set by transformers
    return stacked and hasattr(config, "_experts_implementation")


class ExpertInputs(TorchFunctionMode):
    """Hands on the inputs of each expert, while the context is entered: ``hook(name, expert, x)``
    is called with each product's input x (tokens, inputs)."""

    def __init__(self, stacks: Mapping[str, Tensor], hook: Hook) -> None:
        super().__init__()
        self.hook = hook
        self.stacks = {
            stack.untyped_storage().data_ptr(): (name, stack) for name, stack in stacks.items()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and len(args) > 1:
            entry = self.stacks.get(args[1].untyped_storage().data_ptr())
            if entry is not None:
                name, stack = entry
                place = args[1].storage_offset() - stack.storage_offset()
                self.hook(name, place // stack.stride(0), args[0].detach())
        return func(*args, **(kwargs or {}))


def for_each(prune: Callable[[Tensor, Tensor], Tensor], stack: Tensor, grams: Tensor) -> Tensor:
    """Prune the matrices (experts, outputs, inputs) of all experts, by ``X^T X`` of each. An expert
    that no token has reached is pruned as if its inputs were alike and independent, so by its
    weights alone."""
    identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    pruned = [
        prune(matrix, gram if bool(gram.any()) else identity)
        for matrix, gram in zip(stack, grams, strict=True)
    ]
    return torch.stack(pruned)
