"""Transposable masks: every M x M block keeps N weights in each row and in each column, so that the
weight and its transpose are both N:M.

Where M is too large to compare all masks of a block, its mask is a transportation problem: N units
leave each row and N reach each column, one at most by each entry. As in TSENOR (Meng et al. 2025,
arXiv 2505.23949) it is regularised by the entropy, solved by Dykstra's projections and rounded.
What the rounding misses is then found exactly: units move along a cycle of rows as long as that
keeps more. A mask without such a cycle is the best one (Klein 1967, "A primal method for minimal
cost flows").
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from nmrun.kernels.layout import filled
from nmrun.patterns import Pattern

ENUMERATED_UP_TO = 4  # 90 candidates for 2:4; 1:8 alone would have 40,320
STEPS, SHARPNESS = 50, 50.0  # of Dykstra's projections; they decide on time alone
UNBOUNDED = 1e300  # for NaN and infinity, which are kept first
ELEMENTS = 1 << 22  # of the largest temporary tensor
TOLERANCE = 1e-12  # of gains, where a block's largest is 1: the optimum up to rounding


@cache
def block_patterns(n: int, m: int) -> Tensor:
    """All 0/1 matrices whose rows and columns each sum to n: (count, m, m), float64. Feasible for m
    up to 4."""
    rows = [row for row in itertools.product((0, 1), repeat=m) if sum(row) == n]
    blocks = [
        b
        for b in itertools.product(rows, repeat=m)
        if all(sum(column) == n for column in zip(*b, strict=True))
    ]
    return torch.tensor(blocks, dtype=torch.float64, device="cpu")


@torch.no_grad()
def transposable_mask(weight: Tensor, pattern: str | Pattern, pad: bool = False) -> Tensor:
    """Find the mask that is N:M along both dimensions and keeps the largest sum of ``|w|``, exactly.

    For M <= 4 all masks of a block are compared at once (Hu et al. 2024, arXiv 2404.01847,
    algorithm 1). At 1:M with larger M, scipy solves each block as an assignment problem. Otherwise
    all blocks are solved together as transportation problems.

    Args:
        weight: a matrix (out, in); both sizes are multiples of M.
        pad: let ``in`` be any size. Zeros fill up the last blocks. They may take places of their
            rows, so that these keep fewer than N there.

    Returns:
        The mask: bool, shape of ``weight``, True = kept.

    Raises:
        ValueError: for a tensor of other dimensions or sizes, and for V:N:M patterns.
    """
    pattern = Pattern.parse(pattern)
    n, m = pattern.n, pattern.m
    pattern.without_blocks("a transposable mask")
    if pad and weight.dim() == 2:
        pattern = pattern.over(weight.shape[1])
    if (
        weight.dim() != 2
        or weight.shape[0] % m
        or (weight.shape[1] % m and weight.shape[1] != pattern.length)
    ):
        raise ValueError(
            f"a transposable {pattern} mask needs a matrix with both sides multiples of {m}, not {tuple(weight.shape)}"
        )
    whole = filled(weight.detach(), pattern, 1)
    rows, columns = whole.shape[0] // m, whole.shape[1] // m
    blocks = whole.abs().reshape(rows, m, columns, m).transpose(1, 2).reshape(-1, m * m).double()
    blocks = blocks.nan_to_num(UNBOUNDED, UNBOUNDED)
    if m <= ENUMERATED_UP_TO:
        candidates = block_patterns(n, m).to(weight.device).flatten(1)
        masks = candidates[(blocks @ candidates.T).argmax(1)]
    elif n == 1 and len(blocks):
        masks = torch.stack([_assignment(block) for block in blocks.unflatten(1, (m, m)).cpu()])
        masks = masks.to(weight.device)
    else:
        masks = best_masks(blocks.unflatten(1, (m, m)), n)
    return (
        masks.bool()
        .reshape(rows, columns, m, m)
        .transpose(1, 2)
        .reshape(whole.shape)[:, : weight.shape[1]]
    )


def _assignment(block: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    mask = torch.zeros_like(block)
    mask[linear_sum_assignment(block.numpy(), maximize=True)] = 1.0
    return mask


def best_masks(blocks: Tensor, n: int) -> Tensor:
    """The masks with N < M in each row and column that keep the largest sum, up to rounding.
    ``blocks``: (count, M, M), float64. The same bits on every call."""
    large = torch.finfo(blocks.dtype).max
    finite = blocks.nan_to_num(large, large)  # NaN and infinity are kept first
    most = finite.amax((1, 2), keepdim=True).clamp_min(torch.finfo(blocks.dtype).tiny)
    gains = finite / most
    masks = torch.empty_like(gains, dtype=torch.bool)
    m = blocks.shape[1]
    for part, out in zip(
        gains.split(ELEMENTS // m**2 + 1), masks.split(ELEMENTS // m**2 + 1), strict=True
    ):
        plan = dykstra(part.float(), n)
        out.copy_(_saturated(_top(plan, n, 1) & _top(plan, n, 2), part, n))
    for part, out in zip(
        gains.split(ELEMENTS // m**3 + 1), masks.split(ELEMENTS // m**3 + 1), strict=True
    ):
        _improve(out, part)
    return masks


def dykstra(gains: Tensor, n: int) -> Tensor:
    """Approach the solution of the regularised problem: TSENOR's algorithm 1, with logarithms.
    ``gains``: (count, M, M), from 0 to 1. Returns the logarithm of the plan. Projected onto rows
    that sum to N, columns that do, and entries of 1 at most, in turn."""
    plan, correction = gains * SHARPNESS, torch.zeros_like(gains)
    for _ in range(STEPS):
        plan = plan - plan.logsumexp(2, keepdim=True) + math.log(n)
        plan = plan - plan.logsumexp(1, keepdim=True) + math.log(n)
        free = plan + correction
        plan = free.clamp_max(0.0)
        correction = free - plan
    return plan


def _top(plan: Tensor, n: int, dim: int) -> Tensor:
    places = plan.topk(n, dim).indices
    return torch.zeros_like(plan, dtype=torch.bool).scatter_(dim, places, True)


def _saturated(masks: Tensor, gains: Tensor, n: int) -> Tensor:
    """Add entries to masks with N or fewer in each row and column until all have N. An entry is
    added where row and column lack one. Where every such entry is taken, one at (i', j') moves
    into row i and column j, which lack one: (i, j') and (i', j) take its place. There always is
    one: else all entries between the rows without column j and the columns without row i were
    free. More than M - N columns are, so these rows lack entries, likewise these columns, and a
    free entry between them could be added."""
    size, todo = masks.shape[1], torch.arange(len(masks), device=masks.device)
    while len(todo):
        mask = masks[todo]
        rows, columns = n - mask.sum(2), n - mask.sum(1)
        lacks = rows.sum(1) > 0
        todo, mask, rows, columns = todo[lacks], mask[lacks], rows[lacks], columns[lacks]
        if not len(todo):
            break
        each, gain = torch.arange(len(todo), device=masks.device), gains[todo]
        free = (rows > 0).unsqueeze(2) & (columns > 0).unsqueeze(1) & ~mask
        added = torch.where(free, gain, -1.0).flatten(1).max(1)
        row, column = added.indices // size, added.indices % size
        moves = added.values < 0
        row = torch.where(moves, rows.argmax(1), row)
        column = torch.where(moves, columns.argmax(1), column)
        can = mask & ~mask[each, row].unsqueeze(1) & ~mask[each, :, column].unsqueeze(2)
        swap_gain = gain[each, row].unsqueeze(1) + gain[each, :, column].unsqueeze(2) - gain
        place = torch.where(can, swap_gain, -torch.inf).flatten(1).argmax(1)
        other_row, other_column = place // size, place % size
        mask[each[~moves], row[~moves], column[~moves]] = True
        each, row, column = each[moves], row[moves], column[moves]
        other_row, other_column = other_row[moves], other_column[moves]
        mask[each, other_row, other_column] = False
        mask[each, row, other_column] = mask[each, other_row, column] = True
        masks[todo] = mask
    return masks


def _improve(masks: Tensor, gains: Tensor) -> None:
    """Move units along cycles of rows, in place, until no cycle keeps more. A step from row i to
    row i' takes an entry of a column out of i and adds that of i'. The best column
    counts. A
    cycle of such steps keeps the sums of rows and columns. Cycles that gain have negative
    length, by Bellman and Ford's algorithm."""
    size, todo = masks.shape[1], torch.arange(len(masks), device=masks.device)
    while len(todo):
        mask, gain = masks[todo], gains[todo]
        out = torch.where(mask, gain, torch.inf).unsqueeze(2)
        into = torch.where(mask, torch.inf, -gain).unsqueeze(1)
        length, column = (out + into).min(3)
        reached = torch.zeros_like(gain[:, 0])
        before = torch.zeros_like(reached, dtype=torch.long)
        for _ in range(size):
            shorter, by = (reached.unsqueeze(2) + length).min(1)
            changed = shorter < reached - TOLERANCE
            reached, before = (
                torch.where(changed, shorter, reached),
                torch.where(changed, by, before),
            )
            if not bool(changed.any()):
                return
        gains_more = changed.any(1)
        todo, mask = todo[gains_more], mask[gains_more]
        column, before = column[gains_more], before[gains_more]
        each = torch.arange(len(todo), device=masks.device)
        row = changed[gains_more].int().argmax(1)
        for _ in range(size):  # back into the cycle
            row = before[each, row]
        first, index = row, each
        while len(index):
            source = before[index, row]
            moved = column[index, source, row]
            mask[index, source, moved] = False
            mask[index, row, moved] = True
            on = source != first
            index, row, first = index[on], source[on], first[on]
        masks[todo] = mask
