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

from nmrun.kernels import cpu
from nmrun.kernels.layout import has_memory, local
from nmrun.sparsity.processes import added, alike, global_sum
from nmrun.sparsity.weight import FIRST_MASK, SparseWeight

PIECE = 1 << 18  # entries: a megabyte of float32
MOST_ENTRIES = 1 << 26  # entries that are measured together: their copy takes 256 megabytes
TOGETHER = {"cpu": 0}  # on a CPU a weight at a time stays in the cache


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

    Each weight keeps the run's first mask, packed, in ``nmrun_first_mask``. Weights on a GPU are
    measured together, so that launches do not grow with their number; a virtual mask takes its own.
    """

    def __init__(self, recipe: Masks, weights: Sequence[SparseWeight]) -> None:
        self.recipe, self.weights = recipe, weights
        self._before: list[Tensor] = []  # of each group

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
        self._before = [self._masks(group) for group in _groups(self.weights)]

    def reorder(self, name: str, dim: int, index: Tensor) -> None:
        """Reorder the kept masks of the weight of this name, if there is one: its parameter has
        become ``parameter.index_select(dim, index)``."""
        for weight in self.weights:
            if weight.name == name and FIRST_MASK in weight:
                weight[FIRST_MASK] = pack(self.first(weight).index_select(dim, index))
        for number, group in enumerate(_groups(self.weights) if self._before else ()):
            if any(weight.name == name for weight in group):
                masks = _apart(self._before[number], [weight.dense.shape for weight in group])
                self._before[number] = _joined(
                    [
                        mask.index_select(dim, index) if weight.name == name else mask
                        for weight, mask in zip(group, masks, strict=True)
                    ]
                )

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
        sums = self.sums(optimizer).tolist()
        flips, moved, count, kept_energy, pruned_energy, *noise = sums
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

    def sums(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """What :meth:`after` is made of, still on the device: float64, sums over all processes.
        Entries that flipped, that differ from the first masks, that are kept. Squares of
        kept and of pruned weights. With Adam, variances of kept and of pruned gradients."""
        variances = gradient_variance([w.parameter for w in self.weights], optimizer)
        iterator, rows = iter(variances or ()), dict[SparseWeight, Tensor]()
        for number, group in enumerate(_groups(self.weights)):
            mask = self._masks(group)
            entries = (mask ^ self._before[number], mask ^ self._firsts(group), mask)
            row = [torch.count_nonzero(each).double() for each in entries]
            row += energies(_joined([weight.dense for weight in group]), mask)
            if variances:
                row += _split(_joined([next(iterator) for _ in group]), mask)
            rows[group[0]] = torch.stack(row)
        self._before = []

        def of(part: Sequence[SparseWeight]) -> Tensor:  # a group's weights are spread alike
            return torch.stack([rows[weight] for weight in part if weight in rows]).sum(0)

        return global_sum(self.weights, of)

    def _masks(self, group: Sequence[SparseWeight]) -> Tensor:
        if len(group) > 1 and self.recipe.is_sparse:
            return _joined([weight.weight for weight in group]).bool()
        return _joined([mask_of(weight, self.recipe) for weight in group])

    def _firsts(self, group: Sequence[SparseWeight]) -> Tensor:
        if len(group) == 1:
            return self.first(group[0])
        return _bits(torch.cat([weight[FIRST_MASK] for weight in group]))


def _groups(weights: Sequence[SparseWeight]) -> list[list[SparseWeight]]:
    """Consecutive weights that are measured together, where their device has many launches to
    save. A part of a sharded weight has no packed first mask of its own."""
    groups: list[list[SparseWeight]] = []
    room, like = 0, None
    for weight in weights:
        dense = weight.dense
        kind = dense.device, dense.dtype, weight.is_sharded
        room -= dense.numel()
        if weight.is_sharded or kind != like or room < 0:
            groups.append([])
            room, like = TOGETHER.get(dense.device.type, MOST_ENTRIES) - dense.numel(), kind
        groups[-1].append(weight)
    return groups


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Several tensors as one, (8, -1), in the order of packed bits; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(map(_eighths, tensors)), 1)


def _apart(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Undo :func:`_joined`."""
    if len(shapes) == 1:
        return [joined]
    parts = joined.split([-(-shape.numel() // 8) for shape in shapes], 1)
    return [
        part.flatten()[: shape.numel()].view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


@torch.no_grad()
def layer_metrics(weights: Sequence[SparseWeight], recipe: Masks) -> dict[str, float]:
    """Each sparse weight by itself: ``layer/<name>/density``, the share of non-zeros in the forward
    weight, and ``layer/<name>/kept_energy``, as in :meth:`MaskMetrics.after`."""
    rows = dict[SparseWeight, Tensor]()
    for weight in weights:
        nonzeros = torch.count_nonzero(weight.weight.bool()).double()
        rows[weight] = torch.stack([nonzeros, *energies(weight.dense, mask_of(weight, recipe))])
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
    for p, steps in zip(params, _numbers([state["step"] for state in states]), strict=True):
        beta1, beta2 = betas[id(p)]  # type: ignore[misc]  # an optimizer with these moments has them
        of_mean.append(-1 / (1 - beta1**steps) ** 2)
        of_square.append(1 - beta2**steps)
    variances = list(torch._foreach_div(squares, of_square))
    torch._foreach_addcmul_(variances, means, means, of_mean)
    return variances


def _numbers(steps: Sequence[Tensor | float]) -> list[float]:
    """Counts of steps; those of a fused optimizer lie on the device, which is waited for once."""
    tensors = [step for step in steps if isinstance(step, Tensor)]
    if len(tensors) < len(steps) or len({step.device for step in tensors}) > 1:
        return [float(step) for step in steps]
    return torch.stack(tensors).tolist() if tensors else []


def pack(mask: Tensor) -> Tensor:
    """A mask in bits: uint8, an eighth of its entries long (rounded up). Bit i of the bytes has the
    i-th eighth of the entries."""
    bits = _eighths(mask.view(torch.uint8))
    return (bits << _SHIFTS.to(mask.device)).sum(0, dtype=torch.uint8)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack`."""
    return _bits(packed).flatten()[: math.prod(shape)].view(*shape)


def _eighths(tensor: Tensor) -> Tensor:
    """The entries in their order as (8, -1), filled up with zeros."""
    flat, missing = tensor.flatten(), -tensor.numel() % 8
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(8, -1)


def _bits(packed: Tensor) -> Tensor:
    return (packed >> _SHIFTS.to(packed.device)).bitwise_and_(1).view(torch.bool)


_SHIFTS = torch.arange(8, dtype=torch.uint8).unsqueeze(1)


def energies(weight: Tensor, mask: Tensor) -> list[Tensor]:
    """The sums of squares of the kept and of the pruned weights, 0-dimensional and float64."""
    return _split(weight, mask, squares=True)


def _split(values: Tensor, mask: Tensor, squares: bool = False) -> list[Tensor]:
    """The sums of ``values``, or of their squares, over the kept and over the pruned entries. In
    one pass where the compiled kernel applies. Else piece by piece on a CPU: what is computed on
    the way stays in the cache."""
    if has_memory(values) and (sums := cpu.split(values, mask, squares)) is not None:
        return list(sums)
    size = min(values.numel(), PIECE) if values.is_cpu else values.numel()
    piece, share = values.new_empty((2, size), dtype=torch.float32)
    total = values.new_zeros(2, dtype=torch.float64)
    flat, bits = values.flatten(), mask.flatten().view(torch.uint8)
    for chunk, chunk_mask in zip(flat.split(max(1, size)), bits.split(max(1, size)), strict=True):
        numbers, parts = piece[: len(chunk)], share[: len(chunk)].copy_(chunk_mask)
        numbers.copy_(chunk)
        if squares:  # in float32, since those of float16 leave its range
            numbers.square_()
        total[0] += torch.dot(numbers, parts)
        total[1] += torch.dot(numbers, torch.sub(1, parts, out=parts))
    return list(total)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
