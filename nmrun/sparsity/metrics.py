"""What masks, weights and gradients do in training, as numbers for a log.

The mask of a weight is where the forward weight is not 0. While that is not N:M (in a dense phase
or a transition), it is a virtual one: the mask that the recipe would choose. So curves begin with
the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nmrun.kernels.layout import local
from nmrun.sparsity.processes import added, alike, global_sum
from nmrun.sparsity.weight import FIRST_MASK, SparseWeight

PIECE = 1 << 18  # entries: a megabyte of float32


class Masks(Protocol):
    """The part of a recipe that is read here."""

    @property
    def is_sparse(self) -> bool: ...

    @property
    def ends_dense(self) -> str: ...

    def project_final(self, weight: SparseWeight, out: Tensor) -> None: ...

    def largest(self, weight: SparseWeight, out: Tensor) -> None: ...


@torch.no_grad()
def mask_of(weight: SparseWeight, recipe: Masks) -> Tensor:
    """The mask of a weight as it is now, real or virtual: bool, shape of ``weight.dense``."""
    if recipe.is_sparse:
        return weight.weight.bool()  # several times as fast as != 0
    projection = torch.empty_like(weight.dense)
    write = recipe.largest if recipe.ends_dense else recipe.project_final
    write(weight, projection)
    return projection.bool()


class MaskMetrics:
    """Measures one optimizer step: call :meth:`before` and :meth:`after` around it.

    Each weight keeps the run's first mask, packed, in ``nmrun_first_mask``.
    """

    def __init__(self, recipe: Masks, weights: Sequence[SparseWeight]) -> None:
        self.recipe, self.weights = recipe, weights
        self._before: dict[SparseWeight, Tensor] = {}

    def begin(self) -> None:
        """Keep the present masks as the run's first masks, where a weight has none yet."""
        for weight in self.weights:
            if FIRST_MASK not in weight:
                weight[FIRST_MASK] = pack(weight.whole(mask_of(weight, self.recipe)))

    def first(self, weight: SparseWeight) -> Tensor:
        """The run's first mask of a weight, after :meth:`begin`."""
        return weight.part(unpack(weight[FIRST_MASK], weight.shape))

    def before(self) -> None:
        self.begin()
        self._before = {weight: mask_of(weight, self.recipe) for weight in self.weights}

    def reorder(self, name: str, dim: int, index: Tensor) -> None:
        """Reorder the kept masks of the weight of this name, if there is one: its parameter has
        become ``parameter.index_select(dim, index)``."""
        for weight in (each for each in self.weights if each.name == name):
            if FIRST_MASK in weight:
                weight[FIRST_MASK] = pack(self.first(weight).index_select(dim, index))
            if weight in self._before:
                self._before[weight] = self._before[weight].index_select(dim, index)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Measure the step that was made since :meth:`before`, over all sparse weights together.

        Returns:
            ``sparsity/flip_rate``, the share of mask entries that changed (Hu et al. 2024, arXiv
            2404.01847), over ``sparsity/flip_interval`` = 1 steps. ``sparsity/sad``, their number
            (sparse architecture divergence, Zhou et al. 2021, arXiv 2102.04010).
            ``sparsity/sad_since_first``, the share that differs from the first masks.
            ``sparsity/kept_energy``, the sum of squares of the kept dense weights over that of all.
            ``sparsity/pruned_norm``, the Euclidean norm of the pruned ones. With Adam
            ``sparsity/gradient_noise_kept`` and ``..._pruned``, means of :func:`gradient_variance`.
        """
        variances = gradient_variance([w.parameter for w in self.weights], optimizer)
        rows = dict[SparseWeight, Tensor]()
        for number, weight in enumerate(self.weights):
            mask = mask_of(weight, self.recipe)
            entries = (mask ^ self._before[weight], mask ^ self.first(weight), mask)
            row = [torch.count_nonzero(each).double() for each in entries]
            row += split(weight.dense, mask, squares=True)
            if variances:
                row += split(variances[number], mask)
            rows[weight] = torch.stack(row)
        self._before = {}
        sums = global_sum(self.weights, lambda part: torch.stack([rows[w] for w in part]).sum(0))
        flips, moved, count, kept_energy, pruned_energy, *noise = sums.tolist()
        numel = sum(w.shape.numel() for w in self.weights)
        measured = {
            "sparsity/flip_rate": flips / numel,
            "sparsity/flip_interval": 1.0,
            "sparsity/sad": flips,
            "sparsity/sad_since_first": moved / numel,
            "sparsity/kept_energy": _ratio(kept_energy, kept_energy + pruned_energy),
            "sparsity/pruned_norm": math.sqrt(pruned_energy),
        }
        if noise:
            measured["sparsity/gradient_noise_kept"] = _ratio(noise[0], count)
            measured["sparsity/gradient_noise_pruned"] = _ratio(noise[1], numel - count)
        return measured


@torch.no_grad()
def layer_metrics(weights: Sequence[SparseWeight], recipe: Masks) -> dict[str, float]:
    """Each sparse weight by itself: ``layer/<name>/density``, the share of non-zeros in the forward
    weight, and ``layer/<name>/kept_energy``, as in :meth:`MaskMetrics.after`."""
    rows = dict[SparseWeight, Tensor]()
    for weight in weights:
        nonzeros = torch.count_nonzero(weight.weight.bool()).double()
        rows[weight] = torch.stack(
            [nonzeros, *split(weight.dense, mask_of(weight, recipe), squares=True)]
        )
    sums = dict[SparseWeight, list[float]]()
    for part in alike(weights) if rows else ():
        of_part = added(part, torch.stack([rows[weight] for weight in part])).tolist()
        sums |= dict(zip(part, of_part, strict=True))
    measured = {}
    for weight, (kept, kept_energy, pruned_energy) in sums.items():
        measured[f"layer/{weight.name}/density"] = kept / weight.shape.numel()
        measured[f"layer/{weight.name}/kept_energy"] = _ratio(
            kept_energy, kept_energy + pruned_energy
        )
    return measured


def gradient_variance(
    params: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> list[Tensor] | None:
    """Estimate the variance of each gradient coordinate over the last steps by Adam's ``v - m^2``,
    both bias-corrected. They contain coupled weight decay and average over different spans, so
    single values can be below 0. A tensor for each parameter, of its shape. None where one has
    not both moments: another optimizer, no step yet, or STEP's frozen second moment."""
    betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
    states = [optimizer.state.get(p, {}) for p in params]
    if not all({"exp_avg", "exp_avg_sq", "step"} <= state.keys() for state in states):
        return None
    means, squares = ([local(s[key]) for s in states] for key in ("exp_avg", "exp_avg_sq"))
    of_mean, of_square = [], []
    for p, state in zip(params, states, strict=True):
        beta1, beta2 = betas[id(p)]  # type: ignore[misc]  # an optimizer with these moments has them
        steps = float(state["step"])
        of_mean.append(-1 / (1 - beta1**steps) ** 2)
        of_square.append(1 - beta2**steps)
    variances = list(torch._foreach_div(squares, of_square))
    torch._foreach_addcmul_(variances, means, means, of_mean)
    return variances


def pack(mask: Tensor) -> Tensor:
    """A mask in bits: uint8, an eighth of its entries long (rounded up). Bit i of the bytes has the
    i-th eighth of the entries."""
    bits = torch.nn.functional.pad(mask.flatten().view(torch.uint8), (0, -mask.numel() % 8))
    return (bits.view(8, -1) << _SHIFTS.to(mask.device)).sum(0, dtype=torch.uint8)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack`."""
    bits = (packed >> _SHIFTS.to(packed.device)).bitwise_and_(1).view(torch.bool)
    return bits.flatten()[: math.prod(shape)].view(*shape)


_SHIFTS = torch.arange(8, dtype=torch.uint8, device="cpu").unsqueeze(1)


def split(values: Tensor, mask: Tensor, squares: bool = False) -> list[Tensor]:
    """The sums of ``values``, or of their squares, over the kept and over the pruned entries:
    0-dimensional and float64. Piece by piece on a CPU: what is computed on the way stays in the
    cache."""
    size = min(PIECE, values.numel()) if values.is_cpu else values.numel()
    total = values.new_zeros(2, dtype=torch.float64)
    # written for each piece: new memory would take longer than the sums
    squared, share = (values.new_empty(size, dtype=torch.float32) for _ in range(2))
    pieces = (tensor.flatten().split(max(1, size)) for tensor in (values, mask))
    for piece, kept in zip(*pieces, strict=True):
        numbers = piece.float()  # squares of float16 leave its range
        if squares:
            numbers = torch.square(numbers, out=squared[: len(piece)])
        # from bool it takes 8 times as long
        part = share[: len(piece)].copy_(kept.view(torch.uint8))
        total[0] += torch.dot(numbers, part)
        total[1] += torch.dot(numbers, part.neg_().add_(1))
    return list(total)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
