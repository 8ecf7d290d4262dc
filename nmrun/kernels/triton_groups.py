"""What Triton's kernels share: the N:M choice within a tile of groups, where its weights lie, and
tables for launches over many weights.

A program takes a tile of groups. Every weight has a key, an integer that orders a group's
magnitudes (ties: the lower index is the larger; a NaN is below all), so that no two keys of a group
are equal and the N-th largest of them is a threshold. It is found by taking maxima N times, or
minima M - N times. Groups of four consecutive weights, the pattern of the hardware, need no loop:
they are split into four registers, whose six comparisons give every rank, and are read and written
16 bytes at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST, as_stored, stored_alike
from nmrun.patterns import Pattern

LARGEST_M = 64  # a key has six bits for the index
TILE = 2048  # weights a program has at least, if there are so many: 16 a thread
MODES = {"hard": 0, "soft": 1, "decayed": 2, "mask": 3}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _magnitude(w):
    """The bits of ``|w|``, ordered like it; -1 for a NaN."""
    bits = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > 0x7F800000, -1, bits)


@triton.jit
def _select_four(w, N: tl.constexpr, COLUMNS: tl.constexpr):
    """:func:`select` for a flat tile of groups of four."""
    even, odd = tl.split(tl.reshape(_magnitude(w), (COLUMNS, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    ab, ac, ad = (a >= b).to(tl.int32), (a >= c).to(tl.int32), (a >= d).to(tl.int32)
    bc, bd, cd = (b >= c).to(tl.int32), (b >= d).to(tl.int32), (c >= d).to(tl.int32)
    rank_a, rank_b = 3 - ab - ac - ad, ab + 2 - bc - bd  # how many of the others are larger
    rank_c, rank_d = ac + bc + 1 - cd, ad + bd + cd
    rank = tl.join(tl.join(rank_a, rank_c), tl.join(rank_b, rank_d)).reshape(COLUMNS * 4)
    if N < 4:
        next_ = tl.where(rank_a == N, a, tl.where(rank_b == N, b, tl.where(rank_c == N, c, d)))
        next_ = tl.maximum(next_, 0)
        shift = tl.join(tl.join(next_, next_), tl.join(next_, next_)).reshape(COLUMNS * 4)
    else:
        shift = tl.zeros_like(rank)
    return rank < N, shift.to(tl.float32, bitcast=True)


@triton.jit
def _select_any(w, j, N: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr):
    """:func:`select` for a tile whose dimension AXIS is the place j in the group, filled up to a
    power of two.
    """
    size = _magnitude(w)
    key = (size.to(tl.int64) << 6) | (63 - j)
    if 2 * N <= M:
        key = tl.where(j < M, key, -1000)  # below that of a NaN, which is -64 or more
        last = tl.max(key, AXIS, keep_dims=True)
        for _ in range(N - 1):
            last = tl.max(tl.where(key < last, key, -1000), AXIS, keep_dims=True)
        kept = key >= last
    elif N < M:
        key = tl.where(j < M, key, 1 << 40)  # above that of an infinity
        last = tl.min(key, AXIS, keep_dims=True)
        for _ in range(M - N - 1):
            last = tl.min(tl.where(key > last, key, 1 << 40), AXIS, keep_dims=True)
        kept = key > last
    else:
        kept = key == key
    shift = tl.max(tl.where(kept, 0, size), AXIS, keep_dims=True)
    return kept, shift.to(tl.float32, bitcast=True)


@triton.jit
def locate(
    block,
    columns,
    inner,
    size,
    M: tl.constexpr,
    P: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """(offsets of a tile's weights, which of them exist, their place in the group); flat where
    groups are of four and contiguous.
    """
    if M == 4 and not STRIDED and not SHORT:
        j = tl.arange(0, COLUMNS * 4)
        offset = block * (COLUMNS * 4) + j
        exists = offset < columns * 4
    else:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        j = tl.arange(0, P)
        if STRIDED:  # side by side in memory are the columns
            column, j = column[None, :], j[:, None]
        else:
            column, j = column[:, None], j[None, :]
        exists = (column < columns) & (j < M)
        line = column // inner
        if SHORT:
            groups = (size + M - 1) // M
            place = line % groups * M + j
            exists = exists & (place < size)
            offset = (line // groups * size + place) * inner + column % inner
        elif STRIDED:
            offset = (line * M + j) * inner + column % inner
        else:
            offset = column * M + j
    return offset, exists, j


@triton.jit
def select(
    w,
    j,
    N: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """(the mask, the group's largest magnitude that is not kept): what plain.nm_mask and
    plain.soft_threshold are made of.
    """
    if M == 4 and not STRIDED and not SHORT:
        kept, shift = _select_four(w, N, COLUMNS)
    else:
        kept, shift = _select_any(w, j, N, M, 0 if STRIDED else 1)
    return kept | (w != w), shift


@triton.jit
def project_tile(w, kept, shift, amount, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """What is left of a tile: the kept weights, the soft threshold times ``amount``, or all weights
    with the pruned ones times ``amount``; or the mask, as ones and zeros.
    """
    if MODE == 1:
        shrunk = tl.abs(w) - shift
        shrunk = tl.where(shrunk < 0, 0.0, shrunk)  # not maximum: a NaN stays one
        value = tl.where(w < 0, 0.0 - shrunk, shrunk)  # every zero is +0.0
        value = value.to(DTYPE).to(tl.float32) * amount  # the reference rounds twice
    elif MODE == 2:
        value = tl.where(kept, w, amount * w) + 0.0
    elif MODE == 3:
        value = kept.to(tl.float32)
    else:
        value = tl.where(kept, w, 0.0) + 0.0
    return value


@triton.jit
def write(value, before, offset, exists, out, cast, flips, CAST: tl.constexpr, FLIPS: tl.constexpr):
    """Store a tile of the working copy and of its copy in another dtype; count where its support is
    not that of ``before``.
    """
    tl.store(out + offset, value.to(out.dtype.element_ty), exists)
    if CAST:
        target = cast + offset
        if (
            len(target.shape) == 1
            # as many to a thread as of float32: more would have to change hands through shared memory
        ):
            target = tl.max_contiguous(target, 4)
        tl.store(target, value.to(cast.dtype.element_ty), exists)
    if FLIPS:
        tl.atomic_add(
            flips, tl.sum(((value != 0) != (before != 0)).to(tl.int32)).to(tl.int64), sem="relaxed"
        )


@triton.jit
def pointer(row, field, DTYPE: tl.constexpr):
    """A pointer from a table; :class:`Table` sees to it that 16 divides it."""
    return tl.multiple_of(tl.load(row + field).to(tl.pointer_type(DTYPE)), 16)


def shape_of(
    weight: Tensor, pattern: Pattern, dim: int, tile: int = TILE
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """((columns, elements between neighbours of a group, size of the dimension), the kernel's
    constants) for one weight.
    """
    dim, (weight,) = as_stored(dim, weight)
    inner, size = weight.shape[dim + 1 :].numel(), weight.shape[dim]
    columns = weight.shape[:dim].numel() * -(-size // pattern.m) * inner
    width = triton.next_power_of_2(pattern.m)
    constants = {
        "N": pattern.n, "M": pattern.m, "P": width, "STRIDED": inner > 1, "SHORT": size % pattern.m > 0,
        "COLUMNS": max(128 if inner > 1 else 1, tile // width),
    }  # fmt: skip
    return (columns, inner, size), constants


def applies(
    weight: Tensor, out: Tensor, pattern: Pattern, dim: int, *others: Tensor | None
) -> bool:
    """Whether these kernels can read ``weight`` and write ``out`` and the others, which have its
    shape.
    """
    size = weight.shape[dim] if weight.dim() else 0
    tensors = [t for t in (weight, out, *others) if t is not None]
    return (
        (weight.is_cuda or triton.knobs.runtime.interpret)
        and 0 < weight.numel() < LARGEST
        and pattern.m <= LARGEST_M
        and (size % pattern.m == 0 or size == pattern.length)
        and all(
            t.dtype in DTYPES and t.device == weight.device and t.shape == weight.shape
            for t in tensors
        )
        and stored_alike(*tensors)
    )


class Table:
    """Sizes and addresses of weights that share a launch, on their device; written anew only when a
    tensor has moved.

    A row has the number of columns, the elements between neighbours of a group, the size of the
    dimension, the first program; then the addresses of the tensors that the kernel takes, in its
    order.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, int, int]], columns: int, device: torch.device
    ) -> None:
        programs = [triton.cdiv(size[0], columns) for size in sizes]
        self.programs = sum(programs)
        first = [sum(programs[:i]) for i in range(len(programs))]
        self.sizes = [[*size, at] for size, at in zip(sizes, first, strict=True)]
        counts = torch.tensor(programs)
        self.owner = (
            torch.arange(len(programs), dtype=torch.int32).repeat_interleave(counts).to(device)
        )
        self._addresses: list[list[int]] = []
        self._rows = torch.empty(0, dtype=torch.int64, device=device)

    def rows(self, tensors: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """The table (weights, fields) for these tensors of each weight. Raises ValueError for one
        that does not begin at 16 bytes.
        """
        addresses = [[0 if t is None else t.data_ptr() for t in row] for row in tensors]
        if addresses != self._addresses:
            if any(address % 16 for row in addresses for address in row):
                raise ValueError("a tensor of a table must begin at a multiple of 16 bytes")
            rows = [size + row for size, row in zip(self.sizes, addresses, strict=True)]
            if not self._rows.numel():
                self._rows = torch.empty(
                    len(rows), len(rows[0]), dtype=torch.int64, device=self.owner.device
                )
            # in place: a captured graph reads this tensor
            self._rows.copy_(torch.tensor(rows), non_blocking=True)
            self._addresses = addresses
        return self._rows


class Launch(NamedTuple):
    """Weights, by their indices, that one launch can take."""

    members: list[int]
    table: Table
    constants: dict[str, Any]


def launches(
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    patterns: Sequence[Pattern],
    dims: Sequence[int],
    casts: Sequence[Tensor | None],
    tile: int = TILE,
) -> list[Launch]:
    """The fewest launches for these weights: one for each device, pattern, kind of layout and pair
    of dtypes.

    Raises ValueError where the kernels do not apply to a weight (see :func:`project`).
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    found = []
    for i, (weight, out, pattern, dim, cast) in enumerate(
        zip(weights, outs, patterns, dims, casts, strict=True)
    ):
        dim %= max(1, weight.dim())
        if not applies(weight, out, pattern, dim, cast):
            raise ValueError(
                f"weight {i} of the batch, {list(weight.shape)} {weight.dtype}, is none for the kernels"
            )
        sizes, constants = shape_of(weight, pattern, dim, tile)
        constants |= {
            "WEIGHT": DTYPES[weight.dtype], "OUT": DTYPES[out.dtype],
            "CAST": cast is not None, "CASTED": DTYPES[out.dtype if cast is None else cast.dtype],
        }  # fmt: skip
        found.append((sizes, constants))
        kinds.setdefault((weight.device, *constants.values()), []).append(i)
    made = []
    for members in kinds.values():
        constants = found[members[0]][1]
        table = Table(
            [found[i][0] for i in members], constants["COLUMNS"], weights[members[0]].device
        )
        made.append(Launch(members, table, constants))
    return made


def on(tensor: Tensor) -> Any:
    """Launches go to the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
