"""What layers and functions do to the channels of a value."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx, nn

from nmrun.permutation import tracing

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


class Flow(NamedTuple):
    """A value with known channels, in a forward pass.

    Attributes:
        key: the side of a module whose channels the value has.
        spatial: the number of dimensions after the channels, which are dimension 1. 0: the
            channels are the last dimension.
        flat: whether the last dimension has some positions of the first channel, as many of the
            second, and so on.
    """

    key: Key
    spatial: int = 0
    flat: bool = False

    def flattened(self) -> Flow:
        """Return the value with all dimensions after the batch as one."""
        return self._replace(spatial=0, flat=self.flat or self.spatial > 0)


def reshaped(node: fx.Node, name: str, flow: Flow) -> Flow | None:
    """Follow a value through flattening after the batch, or a mean over all positions.

    Args:
        node: the call.
        name: the name of the function or method.
        flow: the value that goes in.

    Returns:
        The value that comes out; None for any other call.
    """
    x, *rest = node.args or (node.kwargs.get("input"),)
    if name == "flatten":
        start = rest[0] if rest else node.kwargs.get("start_dim", 0)
        end = rest[1] if len(rest) > 1 else node.kwargs.get("end_dim", -1)
        return flow.flattened() if (start, end) == (1, -1) else None
    if name in ("view", "reshape"):
        sizes = rest[0] if rest and isinstance(rest[0], list | tuple) else rest
        flat = len(sizes) == 2 and sizes[1] == -1 and tracing.is_batch_size(sizes[0], x)
        return flow.flattened() if flat else None
    if name == "mean" and flow.spatial:
        dims: Any = rest[0] if rest else node.kwargs.get("dim")
        kept = rest[1] if len(rest) > 1 else node.kwargs.get("keepdim", False)
        if isinstance(dims, list | tuple) and {d % (flow.spatial + 2) for d in dims} == set(
            range(2, flow.spatial + 2)
        ):
            return flow if kept else flow._replace(spatial=0)
    return None


def normalised(module: Any, spatial: int) -> int:
    """Count the entries of a norm layer's parameters, if it treats all channels alike.

    Args:
        module: any module.
        spatial: the number of spatial dimensions of the value that goes in.

    Returns:
        The number of entries; 0 for other layers, and where groups of channels are normalised
        together.
    """
    kind = type(module)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        last = spatial == 0 and len(module.normalized_shape) == 1
        return module.normalized_shape[0] if last else 0
    if kind is nn.GroupNorm:
        alike = spatial and module.num_groups in (1, module.num_channels)
        return module.num_channels if alike else 0
    if kind is nn.BatchNorm1d or (kind in NORMS and spatial):
        return module.num_features
    return 0
