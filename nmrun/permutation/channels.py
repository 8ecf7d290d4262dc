"""Which channels of a model can be reordered, and everything that has to follow.

A layer's outputs are in one order wherever they go: in its own rows and bias, in the norm layers
that they pass, in what they are added to, and in the columns of every layer that reads them (Pool &
Yu, "Channel permutations for N:M sparsity", NeurIPS 2021). ``torch.fx`` shows where they go.
Channels that go anywhere that is not known here are held in place, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, fx, nn

from nmrun.permutation import tracing

CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}  # with their spatial dimensions
NORMS = {
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
}
# what has an entry for every output of a layer
PARAMETERS = (
    "weight",
    "bias",
    "running_mean",
    "running_var",
)

# Modules, functions and methods that treat every entry alike, and those that treat every channel's
# map by itself.
ELEMENTWISE = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Softplus, nn.Identity, nn.Dropout, nn.AlphaDropout,
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardtanh", "hardswish",
    "hardsigmoid", "softplus", "dropout", "alpha_dropout",
    "add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv", "maximum", "minimum", "neg", "abs", "square", "sqrt", "exp",
    "pow", "clamp", "clone", "contiguous", "detach", "float", "half", "bfloat16",
}  # fmt: skip
PER_CHANNEL = {
    nn.Upsample, "interpolate",
    *(getattr(nn, f"{kind}{d}d") for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Dropout") for d in (1, 2, 3)),
    *(f"{kind}{d}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "dropout") for d in (1, 2, 3)),
}  # fmt: skip
# asking a tensor for these moves no values
FACTS = {
    "size",
    "dim",
    "shape",
    "dtype",
    "device",
    "ndim",
}


@dataclass(frozen=True)
class Site:
    """A dimension of ``module.<attribute>`` that runs over channels, each of them ``block``
    consecutive entries (flattened positions).
    """

    module_name: str
    module: nn.Module
    attribute: str
    dim: int
    block: int

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


@dataclass
class Channels:
    """``size`` channels, which can be reordered at all ``sites`` together. ``held``: why not, as a
    clause on them ("they go into cat").
    """

    size: int
    held: str = ""
    sites: list[Site] = field(default_factory=list)


def tied(model: nn.Module) -> dict[str, Channels]:
    """The channels that every linear layer and convolution reads, by module name; layers that share
    them share the object.

    What counts is what ``forward`` does, in training and in evaluation. Dimension 0 of all values
    is taken as the batch, and a ``BatchNorm1d`` after a linear layer as over its outputs. A part of
    the model that cannot be traced is a place that nothing is known of. Raises ValueError, one
    line, where its own ``forward`` cannot be traced, and for a model that several processes train.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("several processes train the model")
    ties = _Ties(model)
    for graph, hidden in tracing.graphs(model):
        ties.read(graph, hidden)
    return ties.inputs()


Key = tuple[str, str]  # one side of a module: its name, and "in" or "out"


class _Flow(NamedTuple):
    """A value whose channels are those of ``key``: in dimension 1, before ``spatial`` others, or if
    there are none in the last one.

    ``flat``: the last dimension holds some positions of the first channel, as many of the second,
    and so on.
    """

    key: Key
    spatial: int = 0
    flat: bool = False

    def flattened(self) -> _Flow:
        """All dimensions after the batch as one."""
        return self._replace(spatial=0, flat=self.flat or self.spatial > 0)


class _Ties:
    """Sides of modules, joined where a value goes from one to another: ``root`` is a forest,
    ``size`` and ``held`` count at its roots.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.root: dict[Key, Key] = {}
        self.size: dict[Key, int] = {}  # in channels
        self.block: dict[Key, int] = {}  # entries of a channel, of each side
        self.held: dict[Key, str] = {}
        # parameters read outside their layers, modules called out of sight
        self.elsewhere: set[str] = set()
        self.users: dict[int, int] = {}  # of every parameter and buffer
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.users[id(tensor)] = self.users.get(id(tensor), 0) + 1

    def inputs(self) -> dict[str, Channels]:
        """What :func:`tied` returns, once all graphs are read."""
        found = {
            root: Channels(self.size[root], self.held.get(root, ""))
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
                    if self.users.get(id(tensor)) != 1:
                        channels.held = (
                            channels.held or f"they are in {site.name}, which is tied to another"
                        )
                    elif {name, site.name} & self.elsewhere:
                        channels.held = (
                            channels.held
                            or f"they are in {site.name}, which is used elsewhere as well"
                        )
        return {name: found[self._find((name, side))] for name, side in self.root if side == "in"}

    def read(self, graph: fx.Graph, hidden: set[str]) -> None:
        """Follow the channels through a graph; ``hidden`` modules are called out of sight."""
        self.elsewhere |= hidden
        flows: dict[fx.Node, _Flow | None] = {}
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
                after = _reshaped(node, name, first)
            if after is None and not (
                node.op in ("call_method", "call_function") and name in FACTS
            ):
                into = f"they go into {tracing.said(node)}"
                self._hold(
                    before, "they are an output of the model" if node.op == "output" else into
                )
            flows[node] = after

    def _through(self, name: str, flow: _Flow | None, source: str) -> _Flow | None:
        """What comes out of a module. None if nothing is known of that, and then what goes in has
        to be held.
        """
        module: Any = self.modules[name]
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
        if kind is nn.Linear or kind in CONVOLUTIONS:
            outputs, inputs, *_ = module.weight.shape
            spatial = CONVOLUTIONS.get(kind, 0)
            if flow is not None and flow.spatial != spatial:
                return None
            # known is only one input and one output to a group
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
        entries = _normalised(module, flow.spatial)
        return self._enter((name, "out"), entries, flow, source) if entries else None

    def _together(self, flows: Sequence[_Flow | None]) -> _Flow | None:
        """Of several values, entry by entry: their channels are the same ones. None if that is not
        certain.
        """
        known = [flow for flow in flows if flow is not None]
        if not known or len(known) < len(flows) or len({flow.spatial for flow in known}) > 1:
            return None
        self._join(known)
        return known[0]._replace(flat=any(flow.flat for flow in known))

    def _enter(self, key: Key, entries: int, flow: _Flow | None, source: str) -> _Flow | None:
        """A value goes into a side of a module that has ``entries`` for it; returns the value."""
        channels = entries if flow is None else self.size[self._find(flow.key)]
        if flow is None:
            self._hold([self._side(key, entries)], f"they come from {source}")
        elif entries % channels or (entries != channels and not flow.flat):
            self._hold([flow, self._side(key, entries)], f"{key[0]} does not take them as they are")
        else:
            self._join([flow, self._side(key, channels, entries // channels)])
        return flow

    def _side(self, key: Key, size: int, block: int = 1) -> _Flow:
        """A side of a module, with ``size`` channels of ``block`` entries at every call, or else
        held.
        """
        if key not in self.root:
            self.root[key], self.size[key], self.block[key] = key, size, block
        elif (self.size[self._find(key)], self.block[key]) != (size, block):
            self._hold([_Flow(key)], f"{key[0]} does not take them in the same form at every call")
        return _Flow(key)

    def _find(self, key: Key) -> Key:
        while self.root[key] != key:
            key = self.root[key]
        return key

    def _join(self, flows: Sequence[_Flow]) -> None:
        root = self._find(flows[0].key)
        for other in (self._find(flow.key) for flow in flows[1:]):
            if self.size[other] != self.size[root]:
                self._hold(flows, "they meet others in a different number")
            elif other != root:
                self.root[other] = root
                if other in self.held:
                    self.held.setdefault(root, self.held[other])

    def _hold(self, flows: Sequence[_Flow | None], reason: str) -> None:
        for flow in flows:
            if flow is not None:
                self.held.setdefault(self._find(flow.key), reason)


def _reshaped(node: fx.Node, name: str, flow: _Flow) -> _Flow | None:
    """What flattening all after the batch, or the mean over all positions, makes of a value. None
    for anything else.
    """
    x, *rest = node.args or (node.kwargs.get("input"),)
    if name == "flatten":
        start = rest[0] if rest else node.kwargs.get("start_dim", 0)
        end = rest[1] if len(rest) > 1 else node.kwargs.get("end_dim", -1)
        return flow.flattened() if (start, end) == (1, -1) else None
    if name in ("view", "reshape"):
        sizes = rest[0] if rest and isinstance(rest[0], list | tuple) else rest
        return (
            flow.flattened()
            if len(sizes) == 2 and sizes[1] == -1 and tracing.is_batch_size(sizes[0], x)
            else None
        )
    if name == "mean" and flow.spatial:
        dims: Any = rest[0] if rest else node.kwargs.get("dim")
        kept = rest[1] if len(rest) > 1 else node.kwargs.get("keepdim", False)
        if isinstance(dims, list | tuple) and {d % (flow.spatial + 2) for d in dims} == set(
            range(2, flow.spatial + 2)
        ):
            return flow if kept else flow._replace(spatial=0)
    return None


def _normalised(module: Any, spatial: int) -> int:
    """The entries that a norm layer has for a value whose channels it does not tell apart but by
    them; else 0.
    """
    kind = type(module)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return (
            module.normalized_shape[0] if spatial == 0 and len(module.normalized_shape) == 1 else 0
        )
    if kind is nn.GroupNorm:
        return (
            module.num_channels if spatial and module.num_groups in (1, module.num_channels) else 0
        )
    if kind is nn.BatchNorm1d or (kind in NORMS and spatial):
        return module.num_features
    return 0
