"""How one sparse layer computes its products in training, where not as its module does."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.kernels.layout import is_transformed
from nmrun.patterns import Pattern
from nmrun.products.simulation import compute_dtype, convolution, linear
from nmrun.sparsity.layers import axes, forward_class, is_plain_linear, of_one_input, own_forward
from nmrun.sparsity.projections import keep_largest
from nmrun.sparsity.weight import SparseWeight


class Phase(Protocol):
    """What is asked of a recipe by what computes products."""

    transposable: bool
    dense_forward: bool

    @property
    def is_sparse(self) -> bool: ...

    def masks_gradient(self, weight: SparseWeight) -> bool: ...


class PackedProducts(Protocol):
    """Products with the kept weights alone, for one layer, on a CPU or a GPU. Whoever has some sets
    them as :attr:`Layer.packed`."""

    dtype: torch.dtype

    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Take over a weight, (outputs, inputs) of a linear layer. ``other``: the weight of the
        input gradient, where it is another one. ``masked``: nobody needs gradients of pruned
        weights."""

    def __call__(self, *args: Any) -> Any:
        """The layer's output from input, weight, bias, with gradients for these. A linear layer
        also takes the pattern that its output gradient is estimated by, or None."""


class DenseProducts(Protocol):
    """Dense products of linear layers other than torch's own."""

    def takes(self, module: nn.Module, x: Tensor) -> bool:
        pass

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pass


class Layer:
    """How one layer computes its products: what its own ``forward`` does not know.

    Like dropout, it acts in training mode alone, and not in a dense phase of the recipe. A deep
    copy of the module computes as if it were not there.

    Attributes:
        mvue, fp8, input_mvue: see :func:`nmrun.products.simulation.linear`.
        input_weight: the weight of the input gradient, stored as the weight, or None.
        packed: what N:M products read, or None; ``uses_packed``: it is up to date.
        dense: what computes products that are dense, or None for torch.
        masked: the recipe needs no gradients of pruned weights; ``whole_gradients``: the loop does.
        active: the recipe's forward weights are not the dense ones.
    """

    def __init__(self, weight: SparseWeight) -> None:
        self.weight, self.module = weight, weight.module
        self.mvue: Pattern | None = None
        self.fp8 = False
        self.input_mvue: Pattern | None = None
        self.input_weight: Tensor | None = None
        self.packed: PackedProducts | None = None
        self.uses_packed = False
        self.dense: DenseProducts | None = None
        self.masked = self.whole_gradients = False
        self.active = False
        self._looked_at, self._holds = -1, True  # the version that is_behind has seen
        self._waits = False  # a sharded weight is packed where it is whole: in the next pass

    def matrix(self, stored: Any) -> Any:
        """A linear layer's weight, or None, as (outputs, inputs), however the layer stores it."""
        return stored if stored is None or self.weight.dim == 1 else stored.t()

    def is_on(self, module: Any) -> bool:
        return self.active and module is self.module and bool(module.training)

    @property
    def other_input_gradient(self) -> bool:
        """Whether the input gradient is by a weight of its own, N:M along the outputs."""
        return self.input_weight is not None or self.input_mvue is not None

    @torch.no_grad()
    def is_behind(self, used: Tensor) -> bool:
        """Whether a pass uses another weight than the last step left: one that it was given
        (``torch.func.functional_call``), or, until the next step, one that was written from outside
        and is no N:M weight. Where it is one (a checkpoint was loaded), what depends on it follows
        first. Compiled code does not ask about writes. ``used``: the module's weight."""
        weight = self.weight
        if used is not weight.parameter and not weight.is_sharded:  # FSDP gathers another tensor
            return True
        if torch.compiler.is_compiling() or not weight.moved():
            return False
        if self._looked_at != weight.parameter._version:
            self._looked_at, self._holds = weight.parameter._version, weight.holds()
            if self._holds:
                for follow in weight.dependents:
                    follow(weight)
                self.pack()
        return not self._holds

    def other_weight(self, used: Tensor) -> Tensor | None:
        """:attr:`input_weight` as this pass needs it, also where the model was moved or cast."""
        stored = self.input_weight
        if stored is None or self.is_behind(used):
            return None
        return stored.to(self.weight.parameter)

    def keep_input_weight(self) -> Tensor:
        """The memory of :attr:`input_weight`, made where the weight is."""
        like, memory = self.weight.weight, self.input_weight
        if memory is None or memory.device != like.device or memory.dtype != like.dtype:
            memory = self.input_weight = torch.zeros_like(like)
        return memory

    def prune_again(self, weight: SparseWeight) -> None:
        """Double pruning: write the projected weight, N:M along the outputs too, for the input
        gradient."""
        pattern = weight.pattern.by_rows
        keep_largest(weight.weight, self.keep_input_weight(), pattern, weight.outputs)

    def enter(self, phase: Phase) -> None:
        """Compute as the recipe's present phase asks."""
        self.active = not phase.dense_forward
        self.uses_packed = self.active and phase.is_sparse
        self.masked = self.active and phase.masks_gradient(self.weight)

    def pack(self) -> None:
        """Pack what N:M products read; of a sharded weight in the next pass."""
        self._waits = self.weight.is_sharded
        if self.packed is not None and self.uses_packed and not self._waits:
            self.packed.write(*self.to_write(self.weight.weight))

    def to_write(self, whole: Tensor) -> tuple[Tensor, Tensor | None, bool]:
        """What :attr:`packed` is given of a weight."""
        masked = self.masked and not self.whole_gradients
        return self.matrix(whole), self.matrix(self.input_weight), masked

    def up_to_date(self, whole: Tensor) -> PackedProducts | None:
        """:attr:`packed` for a pass, None where it is not used. ``whole``: the module's weight in
        this pass, which FSDP has gathered."""
        if self.packed is None or not self.uses_packed:
            return None
        if is_transformed() or self.is_behind(whole):  # torch.func has no rules for packed products
            return None
        if self._waits:
            if whole.dtype != self.weight.parameter.dtype:  # FSDP's mixed precision
                return None
            self.packed.write(*self.to_write(whole.detach()))
            self._waits = False
        return self.packed


def install(
    weights: Sequence[SparseWeight], mvue: Pattern | None = None, fp8: bool = False
) -> list[str]:
    """Let the layers of sparse weights compute their products by a :class:`Layer`; returns the
    names of those that are left alone. ``mvue`` and ``fp8`` are for linear layers only
    (:func:`nmrun.products.simulation.linear`). Left alone are the projections of
    ``nn.MultiheadAttention``, layers with a ``forward`` of their own, and those whose groups ``dims``
    turned. Code that reads ``layer.weight`` without calling the layer goes past this. Works under
    ``torch.compile(fullgraph=True)``; gradients of gradients raise. Raises ConfigError for an
    ``mvue`` that is V:N:M."""
    if mvue is not None:
        mvue.without_blocks("mvue")
    left_alone = []
    for weight in weights:
        layer = weight.layer or Layer(weight)
        forward = _forward_of(weight, layer)
        if forward is None or ((mvue is not None or fp8) and weight.parameter.dim() > 2):
            left_alone.append(weight.name)
            continue
        layer.mvue, layer.fp8 = mvue, fp8
        weight.layer = layer
        weight.module.forward = types.MethodType(forward, weight.module)
    return left_alone


def prune_again(weights: Sequence[SparseWeight]) -> list[str]:
    """Double pruning: an ``input_weight`` for every layer, N:M along the outputs as well. Returns
    the names of layers that cannot have one: grouped convolutions, outputs that M does not
    divide, and what :func:`install` leaves alone."""
    can = [
        weight
        for weight in weights
        if getattr(weight.module, "groups", 1) == 1 and _whole_groups(weight) and ensured(weight)
    ]
    for weight in can:
        weight.dependents.append(weight.layer.prune_again)
        weight.layer.keep_input_weight()
    return [weight.name for weight in weights if weight not in can]


def estimate_again(weights: Sequence[SparseWeight]) -> list[str]:
    """Compute input gradients with the unbiased estimate of the weight, N:M along the outputs.
    Returns the names of layers that keep the exact one: outputs that M does not divide, what is
    no linear layer, and what :func:`install` leaves alone."""
    can = [w for w in weights if w.parameter.dim() == 2 and _whole_groups(w) and ensured(w)]
    for weight in can:
        weight.layer.input_mvue = Pattern(weight.pattern.n, weight.pattern.m)
    return [weight.name for weight in weights if weight not in can]


def _whole_groups(weight: SparseWeight) -> bool:
    return weight.shape[weight.outputs] % weight.pattern.m == 0


def replaceable(weight: SparseWeight) -> bool:
    """Whether :func:`install` can do anything for this layer."""
    return _forward_of(weight, Layer(weight)) is not None


def is_turned(weight: SparseWeight) -> bool:
    """Whether the groups of a known layer's weight run along another dimension than it sums over."""
    meaning = axes(weight.module).get(weight.attribute)
    return meaning is not None and meaning.dim != weight.dim


def unpackable(weight: SparseWeight) -> str:
    """Why no packed products can take a layer: its groups are turned, or its products are simulated.
    Empty if they are not."""
    if is_turned(weight):
        return "its groups do not run along its inputs (dims)"
    if weight.layer is None:
        return ""
    if weight.layer.input_mvue is not None:
        return "its input gradient is by a new estimate of the weight in every pass"
    return "FP8 is simulated, in dense products" if weight.layer.fp8 else ""


def ensured(weight: SparseWeight) -> bool:
    """Whether the layer's products are computed here: from now on at the latest, if they can be."""
    return weight.layer is not None or not install([weight])


def uninstall(weight: SparseWeight) -> None:
    """Take back what :func:`install` did, if it did anything."""
    if weight.layer is not None:
        restore_forward([weight.module])
        weight.layer.active, weight.layer.dense = False, None  # a wrapper calls it on
        weight.layer, weight.dependents = None, []


def restore_forward(modules: list[nn.Module]) -> None:
    """Take back a ``forward`` that faster or simulated products gave to modules, and empty the list.
    What others have wrapped around it since (accelerate's hooks and precision) stays."""
    while modules:
        own = vars(modules.pop())
        if _is_ours(own.get("forward"), __name__.partition(".")[0]):
            del own["forward"]


def _is_ours(forward: Any, home: str = __name__) -> bool:
    """Whether a ``forward`` was set by a module of nmrun's. Wrappers take over the name of what they
    wrap, but are no methods."""
    return isinstance(forward, types.MethodType) and f"{forward.__module__}.".startswith(f"{home}.")


def _forward_of(weight: SparseWeight, layer: Layer) -> Callable[..., Tensor] | None:
    module, attribute = weight.module, weight.attribute
    current = own_forward(module)
    if attribute != "weight" or (current is not None and not _is_ours(current)):
        return None
    if is_turned(weight):  # a Layer knows by `dim` how its class stores the matrix
        return None
    # MultiheadAttention.out_proj, which nobody calls
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    if is_plain_linear(module):
        return _linear_forward(layer)
    if forward_class(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _convolution_forward(layer)
    return None


def _linear_forward(layer: Layer) -> Callable[..., Tensor]:
    @of_one_input
    def forward(module: Any, input: Tensor) -> Tensor:
        weight, bias = layer.matrix(module.weight), module.bias
        other, on = None, layer.is_on(module)
        if on:
            packed = layer.up_to_date(module.weight)
            # torch refuses an input of another width; packed products would read past its end
            fits = input.numel() and input.shape[-1:] == weight.shape[1:]
            if packed is not None and fits and compute_dtype(input) == packed.dtype:
                return packed(input, weight, bias, layer.mvue)
            other = layer.matrix(layer.other_weight(module.weight))
        estimated = layer.mvue is not None or layer.input_mvue is not None
        plain = not on or (other is None and not estimated and not layer.fp8)
        dense = layer.dense if plain and module is layer.module else None
        if dense is not None and dense.takes(module, input):
            return dense.linear(input, weight, bias)
        if plain:
            return type(module).forward(module, input)
        operands = (input, weight, bias, other, layer.mvue, layer.fp8)
        return linear(*operands, input_mvue=layer.input_mvue)

    return forward


def _convolution_forward(layer: Layer) -> Callable[..., Tensor]:
    def forward(module: Any, input: Tensor) -> Tensor:
        if not layer.is_on(module):
            return type(module).forward(module, input)
        packed = layer.up_to_date(module.weight)
        fits = input.dim() == 4 and input.numel() and input.shape[1] == module.weight.shape[1]
        if packed is not None and fits and compute_dtype(input) == packed.dtype:
            return packed(input, module.weight, module.bias)
        input_weight = layer.other_weight(module.weight)
        if input_weight is None:
            return type(module).forward(module, input)
        x, padding = input, module.padding
        if module.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x, padding = (
                F.pad(x, module._reversed_padding_repeated_twice, mode),
                [0] * len(module.stride),
            )
        batch = x if x.dim() == input_weight.dim() else x.unsqueeze(0)
        geometry = (module.stride, padding, module.dilation, module.groups)
        z = convolution(batch, module.weight, module.bias, input_weight, *geometry)
        return z if batch is x else z.squeeze(0)

    return forward
