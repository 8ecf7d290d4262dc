"""Which dimension of a layer's weight is summed over, and which weights are none of that kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

EMBEDDING = "an embedding"
COMPUTED = "its weight is computed (weight_norm, spectral_norm or another parametrization)"
UNKNOWN = "not a weight of a known layer (dims={...} names its input dimension)"
UNTOLD = "which dimension is summed over cannot be told; say so by dims={...}"
ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
PLACED = ("DTensor", "FakeTensor")  # kinds of tensors that hold ordinary numbers


@dataclass(frozen=True)
class Axes:
    """What the dimensions of a weight mean.

    Attributes:
        dim: the dimension that a product sums over. Groups run along it.
        outputs: the dimension of the outputs.
        parts: how many equal parts of ``dim`` have sums of their own.
    """

    dim: int
    outputs: int
    parts: int = 1


def axes(module: nn.Module) -> dict[str, Axes]:
    """Find the weights of a known layer, by attribute, with the meaning of their dimensions.

    Args:
        module: any module; its submodules do not count.

    Returns:
        The attributes that the layer multiplies its input with. Empty for any other module.
    """
    if isinstance(module, nn.MultiheadAttention):
        return dict.fromkeys(ATTENTION, Axes(1, 0))
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, kernel...)
        return {"weight": Axes(0, 1, module.groups)}
    if isinstance(module, nn.Linear | _ConvNd):  # (out, in), (out, in / groups, kernel...)
        return {"weight": Axes(1, 0)}
    if isinstance(module, nn.Bilinear):  # (out, in1, in2)
        return {"weight": Axes(2, 0)}
    if isinstance(module, nn.RNNBase):
        return {n: Axes(1, 0) for n in module._flat_weights_names if n.startswith("weight")}
    if isinstance(module, nn.RNNCellBase):
        return dict.fromkeys(("weight_ih", "weight_hh"), Axes(1, 0))
    if hasattr(module, "nf") and any(c.__name__ == "Conv1D" for c in type(module).__mro__):
        return {"weight": Axes(0, 1)}  # Hugging Face's, (in, out)
    return _experts(module)


def given(dim: int, ndim: int) -> Axes:
    """Return the axes of a weight whose input dimension somebody named.

    The outputs are the other dimension of a matrix, or of each matrix in a stack (E, ., .). Of any
    other weight they are the first one.

    Args:
        dim: the dimension that groups run along, from 0.
        ndim: the number of dimensions.
    """
    if ndim == 3 and dim > 0:
        return Axes(dim, 3 - dim)
    return Axes(dim, 0 if dim else 1)


def obstacle(module: nn.Module, attribute: str, named: bool = False) -> str:
    """Say why a parameter cannot be sparse, whatever its size.

    Args:
        module: the module that holds it.
        attribute: its name there.
        named: whether somebody named its input dimension.

    Returns:
        The reason, or an empty string.
    """
    parameter = module._parameters[attribute]
    assert parameter is not None
    known = axes(module)
    lost = any(name not in module._parameters for name in known)
    if isinstance(parameter, UninitializedParameter):
        return "not initialised yet (run the model once first)"
    if is_embedding(module):
        return EMBEDDING
    if isinstance(module, ParametrizationList) or (attribute not in known and lost):
        return COMPUTED
    if kind := _foreign(parameter):
        return f"quantised or of another kind ({kind})"
    if named or attribute in known:
        return ""
    if attribute.endswith("bias") or attribute in ("bias_k", "bias_v"):
        return "a bias"
    return UNTOLD if parameter.dim() == 3 and _mixture(module) else UNKNOWN


def is_embedding(module: nn.Module) -> bool:
    """Say whether a module looks rows up in a table."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _foreign(parameter: nn.Parameter) -> str:
    """Name the kind of a tensor that holds no ordinary floating-point numbers."""
    if not parameter.is_floating_point() or parameter.element_size() == 1:
        return str(parameter.dtype)
    kind = type(parameter)
    if hasattr(parameter, "quant_state"):  # of bitsandbytes, whatever its numbers are packed as
        return kind.__name__
    return "" if issubclass(kind, nn.Parameter) or kind.__name__ in PLACED else kind.__name__


# --- the experts of a mixture: one parameter (experts, ., .) holds a matrix for each --------------


def _experts(module: nn.Module) -> dict[str, Axes]:
    """Find stacked matrices by the module's own flag, by its sizes, or by how two fit together."""
    stacks = {
        name: p
        for name, p in module._parameters.items()
        if p is not None and not isinstance(p, UninitializedParameter) and p.dim() == 3
    }
    transposed = getattr(module, "is_transposed", None)
    if isinstance(transposed, bool):  # transformers says it so
        dim = 1 if transposed else 2
        return {name: Axes(dim, 3 - dim) for name in stacks}
    if len(stacks) == 1:
        return _by_attributes(module, stacks)
    return _gated_pair(stacks) if len(stacks) == 2 else {}


def _by_attributes(module: nn.Module, stacks: Mapping[str, Tensor]) -> dict[str, Axes]:
    """Tell the input dimension by ``input_size`` and ``output_size`` of the module."""
    ((name, stack),) = stacks.items()
    for ends in (("input_size", "output_size"), ("in_features", "out_features")):
        inputs, outputs = (getattr(module, end, None) for end in ends)
        if inputs != outputs and {inputs, outputs} == set(stack.shape[1:]):
            dim = 1 if stack.shape[1] == inputs else 2
            return {name: Axes(dim, 3 - dim)}
    return {}


def _gated_pair(stacks: Mapping[str, Tensor]) -> dict[str, Axes]:
    """Tell the input dimension of gate and up in one, H to 2I, with down, I to H.

    The sizes fit in one way at most: only what writes 2I is twice as wide as what reads I.
    """
    for (up, wide), (down, narrow) in itertools.permutations(stacks.items(), 2):
        for dim in (1, 2):
            inner = narrow.shape[dim]
            fits = wide.shape[3 - dim] == 2 * inner and wide.shape[dim] == narrow.shape[3 - dim]
            if fits and min(wide.shape[0], narrow.shape[0]) > 1:
                return {name: Axes(dim, 3 - dim) for name in (up, down)}
    return {}


def _mixture(module: nn.Module) -> bool:
    """Say whether a module's class or one of its attributes speaks of experts."""
    return any("expert" in name.lower() for name in (type(module).__name__, *vars(module)))
