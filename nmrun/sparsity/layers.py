"""Which dimension of a layer's weight is summed over, why some weights cannot be sparse, and the
parameters of a model under all their names."""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern

EMBEDDING = "an embedding"
COMPUTED = "its weight is computed (weight_norm, spectral_norm or another parametrization)"
STANDARDIZED = "its forward standardizes the weight, which makes zeros other numbers"
UNKNOWN_LAYER = "not a weight of a known layer (dims={...} names its input dimension)"
UNKNOWN_DIM = "which dimension is summed over cannot be told; say so by dims={...}"
ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
ORDINARY = ("DTensor", "FakeTensor")  # tensor classes that hold ordinary numbers


@dataclass(frozen=True)
class Axes:
    """What the dimensions of a weight mean: a product sums over ``dim``, and groups run along it.
    ``parts``: how many equal parts of ``dim`` have sums of their own."""

    dim: int
    outputs: int
    parts: int = 1


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D: a linear layer whose weight is (inputs, outputs)."""
    return hasattr(module, "nf") and any(c.__name__ == "Conv1D" for c in type(module).__mro__)


def forward_class(module: nn.Module) -> type:
    """The class whose ``forward`` a module has; a subclass may compute something else."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module has the ``forward`` of ``nn.Linear`` or of Hugging Face's Conv1D."""
    kind = forward_class(module)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and is_conv1d(module))


def of_one_input(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A ``forward(module, input)`` in the place of a layer's own, by whatever name callers know the
    input: ``input`` of ``nn.Linear``, ``x`` of Conv1D."""

    @functools.wraps(forward)
    def call(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (input,) = (*args, *kwargs.values())
        return forward(module, input)

    return call


def own_forward(module: nn.Module) -> Any:
    """The ``forward`` that was set on a module itself, or None. One that pickle has brought back is
    its class's again, bound to it."""
    own = vars(module).get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return None if own.__func__ is type(module).forward else own
    return own


def is_touched(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class: it has hooks or a ``forward`` of its own."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return bool(hooked) or own_forward(module) is not None


def axes(module: nn.Module) -> dict[str, Axes]:
    """The axes of the weights that a known layer multiplies its input with, by attribute,
    submodules apart."""
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
    if is_conv1d(module):
        return {"weight": Axes(0, 1)}
    return _experts(module)


def parts_of(module: nn.Module, attribute: str, dim: int) -> int:
    """How many equal parts of a weight's input dimension have sums of their own."""
    meaning = axes(module).get(attribute)
    return 1 if meaning is None or meaning.dim != dim else meaning.parts


def axes_along(dim: int, ndim: int) -> Axes:
    """The axes of a weight whose input dimension the user named. In a matrix or a stack of matrices
    (E, ., .) the outputs are the matrix's other dimension, else the first dimension besides
    ``dim``."""
    if ndim == 3 and dim > 0:
        return Axes(dim, 3 - dim)
    return Axes(dim, 0 if dim else 1)


def obstacle(module: nn.Module, attribute: str, named: bool = False) -> str:
    """Why a parameter cannot be sparse, whatever its size, or an empty string. ``named``: the user
    named the input dimension."""
    parameter = module._parameters[attribute]
    assert parameter is not None
    weight_axes = axes(module)
    computed = any(name not in module._parameters for name in weight_axes)
    if isinstance(parameter, UninitializedParameter):
        return "not initialised yet (run the model once first)"
    if is_embedding(module):
        return _of_embedding(module) if named else EMBEDDING
    if isinstance(module, ParametrizationList) or (attribute not in weight_axes and computed):
        return COMPUTED
    # timm's and transformers' classes: the mean is subtracted
    if any(re.search("StdConv|WeightStandardized", kind.__name__) for kind in type(module).__mro__):
        return STANDARDIZED
    if kind := _foreign_kind(parameter):
        return f"quantised or of another kind ({kind})"
    if named or attribute in weight_axes:
        return ""
    if attribute.endswith("bias") or attribute in ("bias_k", "bias_v"):
        return "a bias"
    return UNKNOWN_DIM if parameter.dim() == 3 and _mixture(module) else UNKNOWN_LAYER


def _of_embedding(module: nn.Module) -> str:
    """Why an embedding that the user named cannot be sparse, or an empty string."""
    if getattr(module, "sparse", False):
        return "an embedding whose gradients are sparse tensors (sparse=True)"
    if getattr(module, "max_norm", None) is not None:
        return "an embedding that writes its weight in the forward pass (max_norm)"
    return ""


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _foreign_kind(parameter: nn.Parameter) -> str:
    """The dtype or class of a tensor that holds no ordinary numbers; empty for any other."""
    if not parameter.is_floating_point() or parameter.element_size() == 1:
        return str(parameter.dtype)
    kind = type(parameter)
    if hasattr(parameter, "quant_state"):  # bitsandbytes packs its numbers in any dtype
        return kind.__name__
    return "" if issubclass(kind, nn.Parameter) or kind.__name__ in ORDINARY else kind.__name__


# --- the experts of a mixture: one parameter (experts, ., .) holds a matrix for each --------------


def _experts(module: nn.Module) -> dict[str, Axes]:
    """Stacked matrices, by the flag that transformers sets on the module, or by how two fit together:
    a fused gate-and-up stack, H to 2I, and a down stack, I to H. Sizes fit in one way at most: only
    the stack that writes 2I is twice as wide as the one that reads I."""
    stacks = {
        name: p
        for name, p in module._parameters.items()
        if p is not None and not isinstance(p, UninitializedParameter) and p.dim() == 3
    }
    transposed = getattr(module, "is_transposed", None)
    if isinstance(transposed, bool):
        return dict.fromkeys(stacks, Axes(1, 2) if transposed else Axes(2, 1))
    for wide, narrow in itertools.permutations(stacks.values()) if len(stacks) == 2 else ():
        for dim in (1, 2):
            inner = narrow.shape[dim]
            fits = wide.shape[3 - dim] == 2 * inner and wide.shape[dim] == narrow.shape[3 - dim]
            if fits and min(wide.shape[0], narrow.shape[0]) > 1:
                return dict.fromkeys(stacks, Axes(dim, 3 - dim))
    return {}


def _mixture(module: nn.Module) -> bool:
    return any("expert" in name.lower() for name in (type(module).__name__, *vars(module)))


ADAPTER = re.compile(r"lora_.*|ia3_.*", re.IGNORECASE)


# --- parameters under all their names -------------------------------------------------------------

# the parts of a parameter's name that wrappers add
WRAPPED = r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_forward_module|_original_module)\."


def check_module(model: Any, verb: str) -> None:
    """Raise ConfigError for what is no module; ``verb`` is the function that was given it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(model).__name__} is no module: give {verb} the model")


def plain_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP, ``torch.compile`` and Fabric add to it."""
    return re.sub(WRAPPED, "", name)


@dataclass
class Candidate:
    """A parameter of two dimensions or more under one of its names, which may become sparse.

    Attributes:
        module_name: the whole name of the module that has the parameter.
        axes: what its dimensions mean; None where nobody knows.
        obstacle: why it cannot be sparse, whatever the options; empty if it can.
        adapter: whether it belongs to an adapter (LoRA, IA3).
        names: all names of the parameter, this one among them, also without those of wrappers.
        pattern: what it is to hold, where it was selected.
    """

    module_name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    axes: Axes | None = None
    obstacle: str = ""
    adapter: bool = False
    names: tuple[str, ...] = ()
    pattern: Pattern | None = None

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def module_names(self) -> list[str]:
        return [name.rpartition(".")[0] for name in self.names]

    @property
    def shape(self) -> tuple[int, ...]:
        """Empty before a lazy module knows it."""
        lazy = isinstance(self.parameter, UninitializedParameter)
        return () if lazy else tuple(self.parameter.shape)

    @property
    def dim(self) -> int:
        assert self.axes is not None
        return self.axes.dim

    @property
    def outputs(self) -> int:
        assert self.axes is not None
        return self.axes.outputs

    @property
    def may_be_sparse(self) -> bool:
        return self.axes is not None and not self.obstacle


def named_parameters(model: nn.Module) -> list[Candidate]:
    """All parameters with two dimensions or more: an entry for each name, in the order of the
    modules, without axes and obstacles."""
    found = [
        Candidate(module_name, module, attribute, parameter)
        for module_name, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and _is_matrix(parameter)
    ]
    names: dict[int, list[str]] = defaultdict(list)
    for each in found:
        names[id(each.parameter)] += [each.name, plain_name(each.name)]
    for each in found:
        each.names = tuple(dict.fromkeys(names[id(each.parameter)]))
    return found


def _is_matrix(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, UninitializedParameter) or parameter.dim() >= 2


def complete(
    model: nn.Module,
    parameters: Sequence[Candidate],
    named_dim: Callable[[Candidate], int | None],
) -> None:
    """Give the entries axes and obstacles. ``named_dim``: the input dimension that the user
    named, or None. Names of one parameter that differ in their axes, or of which one has an
    obstacle, are obstacles to each other."""
    # PEFT's layers name the children that are adapters; modules_to_save is a whole layer among them
    adapters = tuple(
        f"{name}.{child}.".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        for child in getattr(module, "adapter_layer_names", ())
        if child != "modules_to_save"
    )
    same: dict[int, list[Candidate]] = defaultdict(list)
    for each in parameters:
        dim, meaning = named_dim(each), axes(each.module).get(each.attribute)
        each.axes = meaning if dim is None else axes_along(dim, len(each.shape))
        each.obstacle = obstacle(each.module, each.attribute, named=dim is not None)
        by_name = any(ADAPTER.fullmatch(part) for part in each.name.split("."))
        each.adapter = by_name or f"{each.name}.".startswith(adapters)
        same[id(each.parameter)].append(each)
    ties = [_tie(each, same[id(each.parameter)]) for each in parameters]
    for each, tie in zip(parameters, ties, strict=True):
        each.obstacle = each.obstacle or tie


def _tie(entry: Candidate, same: Sequence[Candidate]) -> str:
    """Which other name of a parameter keeps it dense, or nothing."""
    others = [p for p in same if p.name != entry.name]
    for other in sorted(others, key=lambda p: p.obstacle != EMBEDDING):
        if other.obstacle:
            return f"tied to {other.name}"
        if other.axes != entry.axes:
            return f"tied to {other.name}, which sums over another dimension"
    return ""
