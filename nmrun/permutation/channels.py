"""Which channels of a model can be reordered, and everything that has to follow.

A layer's outputs have one order wherever they go (Pool & Yu, "Channel permutations for N:M
sparsity", NeurIPS 2021). It is that of its rows and bias, of norm layers, and of what they are
added to. The columns of every layer that reads them have it too. ``torch.fx`` shows where they go.
Channels that go into anything unknown keep their order, with the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, fx, nn

from nmrun.sparsity.layers import is_touched, own_forward

# modules whose functions are known by name
HOMES = {"torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator"}


def graphs(model: nn.Module) -> list[tuple[fx.Graph, set[str]]]:
    """Trace a copy of a model in training and in evaluation. A submodule that cannot be traced is
    one node of the graph. Returns both graphs, each with the names of these modules and of all
    modules inside them. Raises ValueError in one line, where the model's own ``forward`` cannot
    be traced, or was set on the model itself: its class's would be traced."""
    try:
        own = inspect.unwrap(own_forward(model) or model.forward)  # accelerate wraps it
        if getattr(own, "__func__", own) is not inspect.unwrap(type(model).forward):
            raise ValueError("its forward is not its class's")
        empty: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
        }
        # tracing runs the model's code, which may change its attributes
        twin = copy.deepcopy(model, empty)
        return [_trace(twin.train(training)) for training in (True, False)]
    except Exception as error:  # the model's code may do anything with a symbol for a tensor
        first = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise ValueError(f"the model cannot be traced ({first})") from error


class _Tracer(fx.Tracer):
    """Makes modules of the classes ``opaque`` nodes; ``failed`` is the innermost class that failed."""

    def __init__(self, opaque: set[type]) -> None:
        super().__init__()
        self.opaque = opaque
        self.failed: type | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or type(m)
            raise


def _trace(model: nn.Module) -> tuple[fx.Graph, set[str]]:
    opaque: set[type] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            graph = tracer.trace(model)
        except Exception:
            if tracer.failed is None or tracer.failed in opaque:
                raise
            opaque.add(tracer.failed)
            continue
        hidden = {
            id(part)
            for module in model.modules()
            if type(module) in opaque
            for part in module.modules()
        }
        return graph, {name for name, module in model.named_modules() if id(module) in hidden}


def name_of(node: fx.Node) -> str:
    """The name of a node's module, attribute, method or function, without underscores at its ends:
    "relu" for ``relu_``; empty for a function outside torch."""
    if node.target is getattr:
        return str(node.args[1])
    if node.op == "call_function":
        has_name = getattr(node.target, "__module__", "") in HOMES
        return str(getattr(node.target, "__name__", "")).strip("_") if has_name else ""
    return str(node.target).strip("_") if node.op == "call_method" else str(node.target)


def description(node: fx.Node) -> str:
    """Name a node in a sentence of a log."""
    return (
        "the model's input"
        if node.op == "placeholder"
        else name_of(node) or getattr(node.target, "__name__", str(node.target))
    )


def is_batch_size(size: Any, x: Any) -> bool:
    """Whether ``size``, a node or a number, is ``x.size(0)`` or ``x.shape[0]``."""
    if not isinstance(size, fx.Node):
        return False
    shape: Any = size.args[0]
    indexed = (
        name_of(size) == "getitem"
        and isinstance(shape, fx.Node)
        and shape.target is getattr
        and size.args[1] == 0
    )
    return (
        shape.args == (x, "shape") if indexed else name_of(size) == "size" and size.args == (x, 0)
    )


CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}  # with the number of spatial dimensions
NORMS = {
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
}
# modules, functions and methods that treat every entry alike
ELEMENTWISE = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Softplus, nn.Identity, nn.Dropout, nn.AlphaDropout,
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardtanh", "hardswish",
    "hardsigmoid", "softplus", "dropout", "alpha_dropout",
    "add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv", "maximum", "minimum", "neg", "abs", "square", "sqrt", "exp",
    "pow", "clamp", "clone", "contiguous", "detach", "float", "half", "bfloat16",
}  # fmt: skip
# and those that treat every channel by itself
PER_CHANNEL = {
    nn.Upsample, "interpolate",
    *(getattr(nn, f"{kind}{d}d") for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Dropout") for d in (1, 2, 3)),
    *(f"{kind}{d}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "dropout") for d in (1, 2, 3)),
}  # fmt: skip
FACTS = {"size", "dim", "shape", "dtype", "device", "ndim"}  # what reads no values of a tensor

Key = tuple[str, str]  # a side of a module: the module's name, and "in" or "out"


class ChannelFlow(NamedTuple):
    """A value with known channels, in a forward pass.

    Attributes:
        key: the side of a module whose channels the value has.
        spatial: the number of dimensions after the channels, which are dimension 1. 0: the channels
            are the last dimension.
        flat: whether the last dimension has some positions of the first channel, as many of the
            second, and so on.
    """

    key: Key
    spatial: int = 0
    flat: bool = False

    def flattened(self) -> ChannelFlow:
        """The value with all dimensions after the batch as one."""
        return self._replace(spatial=0, flat=self.flat or self.spatial > 0)


def reshaped(node: fx.Node, name: str, flow: ChannelFlow) -> ChannelFlow | None:
    """Follow a value through flattening after the batch, or a mean over all positions; None for any
    other call."""
    x, *rest = node.args or (node.kwargs.get("input"),)
    if name == "flatten":
        start = rest[0] if rest else node.kwargs.get("start_dim", 0)
        end = rest[1] if len(rest) > 1 else node.kwargs.get("end_dim", -1)
        return flow.flattened() if (start, end) == (1, -1) else None
    if name in ("view", "reshape"):
        sizes = rest[0] if rest and isinstance(rest[0], list | tuple) else rest
        flat = len(sizes) == 2 and sizes[1] == -1 and is_batch_size(sizes[0], x)
        return flow.flattened() if flat else None
    if name == "mean" and flow.spatial:
        dims: Any = rest[0] if rest else node.kwargs.get("dim")
        keepdim = rest[1] if len(rest) > 1 else node.kwargs.get("keepdim", False)
        if isinstance(dims, list | tuple) and {d % (flow.spatial + 2) for d in dims} == set(
            range(2, flow.spatial + 2)
        ):
            return flow if keepdim else flow._replace(spatial=0)
    return None


def is_per_channel(name: str, spatial: int) -> bool:
    """Whether a module or function of ``PER_CHANNEL`` takes a value's channels one by one. One for more
    dimensions (``AvgPool2d`` after ``Conv1d``) takes the channels for positions."""
    return spatial > 0 and (not name.endswith("d") or int(name[-2]) == spatial)


def normalised(module: Any, spatial: int) -> int:
    """The number of entries of a norm layer's parameters; 0 for other layers, and where groups of
    channels are normalised together."""
    kind = type(module)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        last = spatial == 0 and len(module.normalized_shape) == 1
        return module.normalized_shape[0] if last else 0
    if kind is nn.GroupNorm:
        symmetric = spatial and module.num_groups in (1, module.num_channels)
        return module.num_channels if symmetric else 0
    if kind is nn.BatchNorm1d or (kind in NORMS and spatial):
        return module.num_features
    return 0


# the tensors of a layer that have an entry for every output
PARAMETERS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class ChannelDim:
    """A dimension of a parameter or buffer that runs over channels. ``block``: the number of
    consecutive entries of a channel; above 1 after flattened positions."""

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
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


@dataclass
class Channels:
    """Channels that are reordered at all their sites together. ``fixed``: why they cannot be, as a
    clause ("they go into cat"); empty if they can."""

    size: int
    fixed: str = ""
    sites: list[ChannelDim] = field(default_factory=list)

    def fix(self, reason: str) -> None:
        self.fixed = self.fixed or reason


def input_channels(model: nn.Module) -> dict[str, Channels]:
    """The channels that every linear layer and convolution reads, by module name; those that read
    the same share the object. Both ``forward`` in training and in evaluation are traced.
    Dimension 0 of all values is assumed to be the batch, and a ``BatchNorm1d`` after a linear
    layer to normalise its outputs. Channels that go into a submodule that cannot be traced are
    fixed. Raises ValueError in one line, where the model's own ``forward`` cannot be traced, and
    for a model that several processes train."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("several processes train the model")
    ties = _Ties(model)
    for graph, hidden in graphs(model):
        ties.read(graph, hidden)
    return ties.inputs()


def holders(model: nn.Module) -> Counter[int]:
    """How many modules of a model have each parameter and buffer, by its id."""
    return Counter(
        id(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
    )


class _Ties:
    """The channels of every side of a module; sides share them where a value goes from one to
    another."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.channels: dict[Key, Channels] = {}
        self.block: dict[Key, int] = {}  # entries of a channel, of each side
        # parameters read outside their layers, and modules inside parts that cannot be traced
        self.elsewhere: set[str] = set()
        self.holders = holders(model)

    def inputs(self) -> dict[str, Channels]:
        """The result of :func:`input_channels`, once all graphs are read."""
        for (name, side), channels in self.channels.items():
            module = self.modules[name]
            for attribute in ("weight",) if side == "in" else PARAMETERS:
                if getattr(module, attribute, None) is None:
                    continue
                block = self.block[name, side]
                site = ChannelDim(name, module, attribute, int(side == "in"), block)
                channels.sites.append(site)
                if self.holders[id(site.tensor)] != 1:
                    channels.fix(f"they are in {site.name}, which is tied to another")
                elif {name, site.name} & self.elsewhere:
                    channels.fix(f"they are in {site.name}, which is used elsewhere as well")
        return {name: found for (name, side), found in self.channels.items() if side == "in"}

    def read(self, graph: fx.Graph, hidden: set[str]) -> None:
        """Follow the channels through a graph. Calls of ``hidden`` modules are not in it."""
        self.elsewhere |= hidden
        flows: dict[fx.Node, ChannelFlow | None] = {}
        origin: dict[fx.Node, str] = {}  # of values whose channels are not known
        for node in graph.nodes:
            before, name = [flows[n] for n in node.all_input_nodes], name_of(node)
            first, after = before[0] if before else None, None
            before_it = next(iter(node.all_input_nodes), node)
            origin[node] = (
                origin[before_it] if len(before) == 1 and first is None else description(node)
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
                and is_per_channel(name, first.spatial)
                and not node.kwargs.get("return_indices")
            ):
                after = first
            elif first is not None:
                after = reshaped(node, name, first)
            if after is None and not (
                node.op in ("call_method", "call_function") and name in FACTS
            ):
                into = f"they go into {description(node)}"
                self._fix(
                    before, "they are an output of the model" if node.op == "output" else into
                )
            flows[node] = after

    def _through(self, name: str, flow: ChannelFlow | None, source: str) -> ChannelFlow | None:
        """Follow a value through a module; None where the channels that go in must be fixed."""
        module: Any = self.modules[name]
        kind = type(module)
        if is_touched(module):
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
            by_channel = is_per_channel(kind.__name__, flow.spatial)
            return flow if by_channel and not getattr(module, "return_indices", False) else None
        if kind is nn.Flatten:
            return flow.flattened() if (module.start_dim, module.end_dim) == (1, -1) else None
        entries = normalised(module, flow.spatial)
        return self._enter((name, "out"), entries, flow, source) if entries else None

    def _together(self, flows: Sequence[ChannelFlow | None]) -> ChannelFlow | None:
        """Join the channels of values that meet entry by entry; None if one is not known."""
        sources = [flow for flow in flows if flow is not None]
        if not sources or len(sources) < len(flows) or len({flow.spatial for flow in sources}) > 1:
            return None
        self._join(sources)
        return sources[0]._replace(flat=any(flow.flat for flow in sources))

    def _enter(
        self, key: Key, entries: int, flow: ChannelFlow | None, source: str
    ) -> ChannelFlow | None:
        """Join a value with a side of a module that has ``entries``; returns the value."""
        channels = entries if flow is None else self.channels[flow.key].size
        if flow is None:
            self._fix([self._side(key, entries)], f"they come from {source}")
        elif entries % channels or (entries != channels and not flow.flat):
            self._fix([flow, self._side(key, entries)], f"{key[0]} does not take them as they are")
        else:
            self._join([flow, self._side(key, channels, entries // channels)])
        return flow

    def _side(self, key: Key, size: int, block: int = 1) -> ChannelFlow:
        """A side of a module; it is fixed if its size or block differs between calls."""
        if key not in self.channels:
            self.channels[key], self.block[key] = Channels(size), block
        elif (self.channels[key].size, self.block[key]) != (size, block):
            self._fix(
                [ChannelFlow(key)], f"{key[0]} does not take them in the same form at every call"
            )
        return ChannelFlow(key)

    def _join(self, flows: Sequence[ChannelFlow]) -> None:
        joined = self.channels[flows[0].key]
        for other in (self.channels[flow.key] for flow in flows[1:]):
            if other.size != joined.size:
                self._fix(flows, "they meet others in a different number")
            elif other is not joined:
                joined.fix(other.fixed)
                same = [key for key, channels in self.channels.items() if channels is other]
                self.channels |= dict.fromkeys(same, joined)

    def _fix(self, flows: Sequence[ChannelFlow | None], reason: str) -> None:
        for flow in flows:
            if flow is not None:
                self.channels[flow.key].fix(reason)
