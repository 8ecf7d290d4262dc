"""What masks, weights and gradients do in training, as numbers for a log.

The mask of a weight is where the forward weight is not 0. While the forward weight is not N:M (in a
dense phase, or in the transition to a sparse one), the mask is a virtual one: the N largest of
every M dense weights, or the best transposable mask, or the best candidates of a recipe that scores
masks. So curves begin with the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nmrun.kernels import cpu_split
from nmrun.kernels.layout import has_memory, local
from nmrun.sparsity.processes import global_sum
from nmrun.sparsity.weight import FIRST_MASK, SparseWeight

PIECE = 1 << 18  # entries: a megabyte of float32


class Masks(Protocol):
    """The part of a recipe that is read here."""

    @property
    def is_sparse(self) -> bool: ...

    def would_keep(self, weight: SparseWeight, out: Tensor) -> None: ...


@torch.no_grad()
def mask_of(weight: SparseWeight, recipe: Masks) -> Tensor:
    """The mask of a weight as it is now, real or virtual (see above): bool, shape of
    ``weight.dense``."""
    if recipe.is_sparse:
        return weight.weight.bool()  # several times as fast as != 0
    projection = torch.empty_like(weight.dense)
    recipe.would_keep(weight, projection)
    return projection.bool()


class MaskMetrics:
    """Measures one optimizer step: call :meth:`before` and :meth:`after` around it.

    Each weight keeps the run's first mask, packed, in ``nmrun_first_mask``.
    """

    def __init__(self, recipe: Masks, weights: Sequence[SparseWeight]) -> None:
        self.recipe, self.weights = recipe, weights
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Keep the present masks as the run's first masks, where a weight has none yet."""
        for weight in self.weights:
            if FIRST_MASK not in weight:
                weight[FIRST_MASK] = pack(weight.whole(mask_of(weight, self.recipe)))

    def first(self, weight: SparseWeight) -> Tensor:
        """The run's first mask of a weight, after :meth:`begin` or :meth:`before`."""
        return weight.part(unpack(weight[FIRST_MASK], weight.shape))

    def before(self) -> None:
        """Keep the masks of before an optimizer step."""
        self.begin()
        self._before = [mask_of(w, self.recipe) for w in self.weights]

    def reorder(self, name: str, dim: int, index: Tensor) -> None:
        """Reorder the kept masks of a weight that became ``weight.index_select(dim, index)``.
        ``name``: the name of a parameter; one that is not sparse is passed over. ``index``: the
        new order, int64."""
        for i, weight in enumerate(self.weights):
            if weight.name == name and FIRST_MASK in weight:
                weight[FIRST_MASK] = pack(self.first(weight).index_select(dim, index))
            if weight.name == name and self._before:
                self._before[i] = self._before[i].index_select(dim, index)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Measure the step that was made since :meth:`before`.

        Returns:
            Over all sparse weights together: ``sparsity/flip_rate``, the share of mask entries that
            changed (Hu et al. 2024, arXiv 2404.01847), over ``sparsity/flip_interval`` = 1 steps;
            ``sparsity/sad``, the number of these entries (sparse architecture divergence, Zhou et
            al. 2021, arXiv 2102.04010); ``sparsity/sad_since_first``, the share of entries that
            differ from the first masks; ``sparsity/kept_energy``, the sum of squares of the kept
            dense weights over that of all; ``sparsity/pruned_norm``, the Euclidean norm of the
            pruned dense weights; with Adam, ``sparsity/gradient_noise_kept`` and ``..._pruned``,
            the mean of :func:`gradient_variance` over the kept and the pruned.
        """
        masks = [mask_of(w, self.recipe) for w in self.weights]
        variances = gradient_variance([w.parameter for w in self.weights], optimizer)
        sums = []
        for i, (weight, mask) in enumerate(zip(self.weights, masks, strict=True)):
            entries = (mask ^ self._before[i], mask ^ self.first(weight), mask)
            split = energies(weight.dense, mask) + (_split(variances[i], mask) if variances else [])
            sums.append(
                torch.stack([*(s.double() for s in map(torch.count_nonzero, entries)), *split])
            )
        self._before = []
        flips, moved, count, kept, pruned, *noise = global_sum(
            self.weights, torch.stack(sums).sum(0)
        ).tolist()
        numel = sum(w.shape.numel() for w in self.weights)
        measured = {
            "sparsity/flip_rate": flips / numel,
            "sparsity/flip_interval": 1.0,
            "sparsity/sad": flips,
            "sparsity/sad_since_first": moved / numel,
            "sparsity/kept_energy": _ratio(kept, kept + pruned),
            "sparsity/pruned_norm": math.sqrt(pruned),
        }
        if noise:
            measured["sparsity/gradient_noise_kept"] = _ratio(noise[0], count)
            measured["sparsity/gradient_noise_pruned"] = _ratio(noise[1], numel - count)
        return measured


@torch.no_grad()
def layer_metrics(weights: Sequence[SparseWeight], recipe: Masks) -> dict[str, float]:
    """Measure each sparse weight by itself. Returns ``layer/<name>/density``, the share of
    non-zeros in the forward weight, and ``layer/<name>/kept_energy``, as in
    :meth:`MaskMetrics.after`."""
    rows = []
    for weight in weights:
        nonzeros = torch.count_nonzero(weight.weight.bool()).double()
        rows.append(torch.stack([nonzeros, *energies(weight.dense, mask_of(weight, recipe))]))
    sums = global_sum(weights, torch.stack(rows)).tolist() if rows else []
    measured = {}
    for weight, (nonzeros, kept, pruned) in zip(weights, sums, strict=True):
        measured[f"layer/{weight.name}/density"] = nonzeros / weight.shape.numel()
        measured[f"layer/{weight.name}/kept_energy"] = _ratio(kept, kept + pruned)
    return measured


def gradient_variance(
    params: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> list[Tensor] | None:
    """Estimate the variance of each gradient coordinate over the last steps by Adam's ``v - m^2``.

    Both moments are bias-corrected. They contain coupled weight decay, if Adam has any. They
    average over different spans, so single values can be below 0. Returns a tensor for each
    parameter, of its shape. None where a parameter has not both moments: another optimizer than
    Adam, no step yet, or STEP's frozen second moment.
    """
    betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
    variances = []
    for p in params:
        state = optimizer.state.get(p, {})
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
            return None
        beta1, beta2 = betas[id(p)]  # type: ignore[misc]  # an optimizer with these moments has them
        steps = float(state["step"])
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"]) / (1 - beta2**steps)
        variances.append(square.addcmul_(mean, mean, value=-1 / (1 - beta1**steps) ** 2))
    return variances


def pack(mask: Tensor) -> Tensor:
    """A mask in bits: uint8, an eighth of its entries long (rounded up). Bit i of the bytes has
    the i-th eighth of the entries."""
    bits = torch.nn.functional.pad(mask.flatten().view(torch.uint8), (0, -mask.numel() % 8)).view(
        8, -1
    )
    return (bits << _SHIFTS.to(mask.device)).sum(0, dtype=torch.uint8)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack`: a mask of this shape."""
    bits = (packed >> _SHIFTS.to(packed.device)).bitwise_and_(1)
    return bits.flatten()[: math.prod(shape)].view(*shape).view(torch.bool)


_SHIFTS = torch.arange(8, dtype=torch.uint8).unsqueeze(1)


def energies(weight: Tensor, mask: Tensor) -> list[Tensor]:
    """The sums of squares of the kept and of the pruned weights, 0-dimensional and float64."""
    return _split(weight, mask, squares=True)


def _split(values: Tensor, mask: Tensor, squares: bool = False) -> list[Tensor]:
    """The sums of ``values``, or of their squares, over the kept and over the pruned entries.

    In one pass where the compiled kernel applies. Else piece by piece on a CPU, in memory that is
    used again: what is computed on the way stays in the cache.
    """
    if has_memory(values) and (sums := cpu_split.split(values, mask, squares)) is not None:
        return list(sums)
    size = min(values.numel(), PIECE) if values.is_cpu else values.numel()
    piece, share = values.new_empty((2, size), dtype=torch.float32)
    total = values.new_zeros(2, dtype=torch.float64)
    flat, bits = values.flatten(), mask.flatten().view(torch.uint8)
    for some, kept in zip(flat.split(max(1, size)), bits.split(max(1, size)), strict=True):
        numbers, parts = piece[: len(some)], share[: len(some)].copy_(kept)
        torch.mul(some, some, out=numbers) if squares else numbers.copy_(some)
        total[0] += torch.dot(numbers, parts)
        total[1] += torch.dot(numbers, torch.sub(1, parts, out=parts))
    return list(total)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
