"""Which channels of a model can be reordered, and everything that has to follow.

A layer's outputs have one order wherever they go: in the layer's rows and bias, in the norm layers
that they pass, in the values that they are added to, and in the columns of every layer that reads
them (Pool & Yu, "Channel permutations for N:M sparsity", NeurIPS 2021). ``torch.fx`` shows where
they go. Channels that go into anything unknown keep their order, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx, nn

from nmrun.permutation import tracing
from nmrun.permutation.operations import (
    CONVOLUTIONS,
    ELEMENTWISE,
    FACTS,
    PER_CHANNEL,
    Flow,
    Key,
    normalised,
    reshaped,
)

# the tensors of a layer that have an entry for every output
PARAMETERS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Site:
    """A dimension of a parameter or buffer that runs over channels.

    Attributes:
        module_name, module, attribute: the module that has the tensor, and its name there.
        dim: the dimension.
        block: the number of consecutive entries of a channel; above 1 after flattened positions.
    """

    module_name: str
    module: nn.Module
    attribute: str
    dim: int
    block: int

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


@dataclass
class Channels:
    """Channels that are reordered at all their sites together.

    Attributes:
        size: the number of channels.
        fixed: why they cannot be reordered, as a clause ("they go into cat"); empty if they can.
        sites: all dimensions that run over them.
    """

    size: int
    fixed: str = ""
    sites: list[Site] = field(default_factory=list)


def input_channels(model: nn.Module) -> dict[str, Channels]:
    """Find the channels that every linear layer and convolution reads.

    Both ``forward`` in training and in evaluation are traced. Dimension 0 of all values is assumed
    to be the batch, and a ``BatchNorm1d`` after a linear layer to normalise its outputs. Channels
    that go into a submodule that cannot be traced are fixed.

    Args:
        model: the model.

    Returns:
        The channels by module name. Layers that read the same channels share the object.

    Raises:
        ValueError: in one line, where the model's own ``forward`` cannot be traced, and for a model
            that several processes train.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("several processes train the model")
    ties = _Ties(model)
    for graph, hidden in tracing.graphs(model):
        ties.read(graph, hidden)
    return ties.inputs()


class _Ties:
    """Sides of modules, joined where a value goes from one to another.

    ``root`` is a forest of sides; ``size`` and ``fixed`` are valid at its roots.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.root: dict[Key, Key] = {}
        self.size: dict[Key, int] = {}  # in channels
        self.block: dict[Key, int] = {}  # entries of a channel, of each side
        self.fixed: dict[Key, str] = {}
        # parameters read outside their layers, and modules inside parts that cannot be traced
        self.elsewhere: set[str] = set()
        self.users: dict[int, int] = {}  # of every parameter and buffer
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.users[id(tensor)] = self.users.get(id(tensor), 0) + 1

    def inputs(self) -> dict[str, Channels]:
        """Return the result of :func:`input_channels`, once all graphs are read."""
        found = {
            root: Channels(self.size[root], self.fixed.get(root, ""))
            for root in map(self._find, self.root)
        }
        for key in self.root:
            (name, side), channels = key, found[self._find(key)]
            for attribute in ("weight",) if side == "in" else PARAMETERS:
                tensor = getattr(self.modules[name], attribute, None)
                if tensor is not None:
                    site = Site(
                        name, self.modules[name], attribute, int(side == "in"), self.block[key]
                    )
                    channels.sites.append(site)
                    reason = ""
                    if self.users.get(id(tensor)) != 1:
                        reason = f"they are in {site.name}, which is tied to another"
                    elif {name, site.name} & self.elsewhere:
                        reason = f"they are in {site.name}, which is used elsewhere as well"
                    channels.fixed = channels.fixed or reason
        return {name: found[self._find((name, side))] for name, side in self.root if side == "in"}

    def read(self, graph: fx.Graph, hidden: set[str]) -> None:
        """Follow the channels through a graph. Calls of ``hidden`` modules are not in it."""
        self.elsewhere |= hidden
        flows: dict[fx.Node, Flow | None] = {}
        origin: dict[fx.Node, str] = {}  # of values whose channels are not known
        for node in graph.nodes:
            before, name = [flows[n] for n in node.all_input_nodes], tracing.name_of(node)
            first, after = before[0] if before else None, None
            before_it = next(iter(node.all_input_nodes), node)
            origin[node] = (
                origin[before_it] if len(before) == 1 and first is None else tracing.said(node)
            )
            if node.op == "get_attr":
                self.elsewhere.add(name)
            elif node.op == "call_module":
                after = self._through(name, first, origin[before_it]) if len(before) == 1 else None
            elif name in ELEMENTWISE:
                after = self._together(before)
            elif (
                first is not None
                and name in PER_CHANNEL
                and first.spatial
                and not node.kwargs.get("return_indices")
            ):
                after = first
            elif first is not None:
                after = reshaped(node, name, first)
            if after is None and not (
                node.op in ("call_method", "call_function") and name in FACTS
            ):
                into = f"they go into {tracing.said(node)}"
                self._fix(
                    before, "they are an output of the model" if node.op == "output" else into
                )
            flows[node] = after

    def _through(self, name: str, flow: Flow | None, source: str) -> Flow | None:
        """Follow a value through a module; None where the channels that go in must be fixed."""
        module: Any = self.modules[name]
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
        if kind is nn.Linear or kind in CONVOLUTIONS:
            outputs, inputs, *_ = module.weight.shape
            spatial = CONVOLUTIONS.get(kind, 0)
            if flow is not None and flow.spatial != spatial:
                return None
            # only depthwise convolutions keep the order: one input and one output to a group
            if getattr(module, "groups", 1) > 1:
                depthwise = flow is not None and inputs == 1 and module.groups == outputs
                return self._enter((name, "out"), outputs, flow, source) if depthwise else None
            self._enter((name, "in"), inputs, flow, source)
            return self._side((name, "out"), outputs)._replace(spatial=spatial)
        if flow is None:
            return None
        if kind in ELEMENTWISE:
            return flow
        if kind in PER_CHANNEL:
            return flow if flow.spatial and not getattr(module, "return_indices", False) else None
        if kind is nn.Flatten:
            return flow.flattened() if (module.start_dim, module.end_dim) == (1, -1) else None
        entries = normalised(module, flow.spatial)
        return self._enter((name, "out"), entries, flow, source) if entries else None

    def _together(self, flows: Sequence[Flow | None]) -> Flow | None:
        """Join the channels of values that meet entry by entry; None if one is not known."""
        known = [flow for flow in flows if flow is not None]
        if not known or len(known) < len(flows) or len({flow.spatial for flow in known}) > 1:
            return None
        self._join(known)
        return known[0]._replace(flat=any(flow.flat for flow in known))

    def _enter(self, key: Key, entries: int, flow: Flow | None, source: str) -> Flow | None:
        """Join a value with a side of a module that has ``entries``; returns the value."""
        channels = entries if flow is None else self.size[self._find(flow.key)]
        if flow is None:
            self._fix([self._side(key, entries)], f"they come from {source}")
        elif entries % channels or (entries != channels and not flow.flat):
            self._fix([flow, self._side(key, entries)], f"{key[0]} does not take them as they are")
        else:
            self._join([flow, self._side(key, channels, entries // channels)])
        return flow

    def _side(self, key: Key, size: int, block: int = 1) -> Flow:
        """Return a side of a module; it is fixed if its size or block differs between calls."""
        if key not in self.root:
            self.root[key], self.size[key], self.block[key] = key, size, block
        elif (self.size[self._find(key)], self.block[key]) != (size, block):
            self._fix([Flow(key)], f"{key[0]} does not take them in the same form at every call")
        return Flow(key)

    def _find(self, key: Key) -> Key:
        while self.root[key] != key:
            key = self.root[key]
        return key

    def _join(self, flows: Sequence[Flow]) -> None:
        root = self._find(flows[0].key)
        for other in (self._find(flow.key) for flow in flows[1:]):
            if self.size[other] != self.size[root]:
                self._fix(flows, "they meet others in a different number")
            elif other != root:
                self.root[other] = root
                if other in self.fixed:
                    self.fixed.setdefault(root, self.fixed[other])

    def _fix(self, flows: Sequence[Flow | None], reason: str) -> None:
        for flow in flows:
            if flow is not None:
                self.fixed.setdefault(self._find(flow.key), reason)
