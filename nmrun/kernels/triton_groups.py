"""What Triton's kernels share: the N:M choice within a tile of groups, where its weights lie, and
launches: the constants for a weight, and tables of the weights that share one.

Every weight has a key, an integer that orders a group's magnitudes (ties: the lower index is the
larger; a NaN is below all). No two keys of a group are equal, so the N-th largest is a threshold.
It is found by taking maxima N times, or minima M - N times. Groups of four consecutive weights, the
pattern of the hardware, need no loop. They are split into four registers, whose six comparisons
give every rank, and are read and written 16 bytes at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST, as_stored, stored_alike
from nmrun.patterns import Pattern

LARGEST_M = 64  # a key has six bits for the index
MODES = {"hard": 0, "soft": 1, "decayed": 2, "mask": 3}


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
    power of two."""
    size = _magnitude(w)
    key = (size.to(tl.int64) << 6) | (63 - j)
    if 2 * N <= M:
        key = tl.where(j < M, key, -1000)  # below that of a NaN, which is -64 or more
        last = tl.max(key, AXIS, keep_dims=True)
        for _ in range(N - 1):
            last = tl.max(tl.where(key < last, key, -1000), AXIS, keep_dims=True)
        mask = key >= last
    elif N < M:
        key = tl.where(j < M, key, 1 << 40)  # above that of an infinity
        last = tl.min(key, AXIS, keep_dims=True)
        for _ in range(M - N - 1):
            last = tl.min(tl.where(key > last, key, 1 << 40), AXIS, keep_dims=True)
        mask = key > last
    else:
        mask = key == key
    shift = tl.max(tl.where(mask, 0, size), AXIS, keep_dims=True)
    return mask, shift.to(tl.float32, bitcast=True)


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
    WIDE: tl.constexpr,
):
    """(offsets of a tile's weights, which of them exist, their place in the group); flat where
    groups are of four and contiguous. WIDE: 16 divides ``inner``, and no tile has weights of two lines,
    so that threads read several neighbours at once and have whole groups."""
    if M == 4 and not STRIDED and not SHORT:
        j = tl.arange(0, COLUMNS * 4)
        offset = block * (COLUMNS * 4) + j
        exists = offset < columns * 4
    else:
        if WIDE:
            inner = inner // 16 * 16  # the compiler sees that 16 divides it
            across = tl.cdiv(inner, COLUMNS)
            line, block, columns = block // across, block % across, inner
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        j = tl.arange(0, P)
        if STRIDED:  # side by side in memory are the columns
            column, j = column[None, :], j[:, None]
        else:
            column, j = column[:, None], j[None, :]
        exists = (column < columns) & (j < M)
        if not STRIDED:
            line, column, inner = column, 0, 1
        elif not WIDE:
            line, column = column // inner, column % inner
        if SHORT:
            groups = (size + M - 1) // M
            place = line % groups * M + j
            exists = exists & (place < size)
            offset = (line // groups * size + place) * inner + column
        else:
            offset = (line * M + j) * inner + column
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
    """(the mask, the group's largest magnitude that is not kept): what the reference's mask and
    soft threshold are made of."""
    if M == 4 and not STRIDED and not SHORT:
        mask, shift = _select_four(w, N, COLUMNS)
    else:
        mask, shift = _select_any(w, j, N, M, 0 if STRIDED else 1)
    return mask | (w != w), shift


@triton.jit
def project_tile(w, mask, shift, amount, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """What is left of a tile: the kept weights, the soft threshold times ``amount``, or all weights
    with the pruned ones times ``amount``; or the mask, as ones and zeros."""
    if MODE == 1:
        shrunk = tl.abs(w) - shift
        shrunk = tl.where(shrunk < 0, 0.0, shrunk)  # not maximum: a NaN stays one
        value = tl.where(w < 0, 0.0 - shrunk, shrunk)  # every zero is +0.0
        value = value.to(DTYPE).to(tl.float32) * amount  # the reference rounds twice
    elif MODE == 2:
        value = tl.where(mask, w, amount * w) + 0.0
    elif MODE == 3:
        value = mask.to(tl.float32)
    else:
        value = tl.where(mask, w, 0.0) + 0.0
    return value


@triton.jit
def pointer(row, field, DTYPE: tl.constexpr):
    """A pointer from a table; :class:`Launch` sees to it that 16 divides it."""
    return tl.multiple_of(tl.load(row + field).to(tl.pointer_type(DTYPE)), 16)


Sizes = tuple[int, int, int]
TILE = 2048  # weights a program has at least, if there are so many: 16 a thread
MOST_BATCHES = 64  # batches of other kinds that are kept: structure decay changes patterns
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def shape_of(
    weight: Tensor, pattern: Pattern, dim: int, tile: int = TILE
) -> tuple[Sizes, int, dict[str, Any]]:
    """((columns, elements between neighbours of a group, size of the dimension), how many programs
    one weight takes, the kernel's constants)."""
    dim, (weight,) = as_stored(dim, weight)
    inner, size = weight.shape[dim + 1 :].numel(), weight.shape[dim]
    lines = weight.shape[:dim].numel() * -(-size // pattern.m)
    width = triton.next_power_of_2(pattern.m)
    across = max(128 if inner > 1 else 1, tile // width)
    wide = inner % 16 == 0 and inner >= across
    constants = {
        "N": pattern.n, "M": pattern.m, "P": width, "STRIDED": inner > 1, "SHORT": size % pattern.m > 0,
        "COLUMNS": across, "WIDE": wide,
    }  # fmt: skip
    columns = lines * inner
    programs = lines * triton.cdiv(inner, across) if wide else triton.cdiv(columns, across)
    return (columns, inner, size), programs, constants


def applies(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether these kernels can read ``weight`` and write ``out``."""
    size = weight.shape[dim] if weight.dim() else 0
    return (
        readable(weight, out)
        and pattern.v == 1
        and pattern.m <= LARGEST_M
        and (size % pattern.m == 0 or size == pattern.length)
        and stored_alike(weight, out)
    )


def readable(weight: Tensor, out: Tensor) -> bool:
    """Whether device, size and dtypes are such that any of Triton's kernels takes them."""
    return (
        (weight.is_cuda or triton.knobs.runtime.interpret)
        and 0 < weight.numel() < LARGEST
        and out.device == weight.device
        and out.shape == weight.shape
        and weight.dtype in DTYPES
        and out.dtype in DTYPES
    )


class Launch:
    """Weights that share a launch, by their indices in a batch: their sizes and addresses on the
    device, written anew only when a tensor has moved.

    A row has the number of columns, the elements between neighbours of a group, the size of the
    dimension, the first program. The addresses of the kernel's tensors follow.
    """

    def __init__(self, constants: dict[str, Any], device: torch.device) -> None:
        self.constants, self.device = constants, device
        self.members: list[int] = []
        self.programs = 0
        self._sizes: list[list[int]] = []
        self._addresses: list[list[int]] = []
        self._rows = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, member: int, sizes: Sizes, programs: int) -> None:
        self.members.append(member)
        self._sizes.append([*sizes, self.programs])
        self.programs += programs

    @cached_property
    def owner(self) -> Tensor:
        """The row of each program."""
        counts = torch.tensor([*(row[3] for row in self._sizes), self.programs]).diff()
        rows = torch.arange(len(self.members), dtype=torch.int32)
        return rows.repeat_interleave(counts).to(self.device)

    def rows(self, tensors: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """The table (weights, fields) for these tensors of each weight. Raises ValueError for one
        that does not begin at 16 bytes."""
        addresses = [[0 if t is None else t.data_ptr() for t in row] for row in tensors]
        if addresses != self._addresses:
            if any(address % 16 for row in addresses for address in row):
                raise ValueError("a tensor of a table must begin at a multiple of 16 bytes")
            rows = [size + row for size, row in zip(self._sizes, addresses, strict=True)]
            if not self._rows.numel():
                self._rows = self._rows.new_empty(len(rows), len(rows[0]))
            # in place: a captured graph reads this tensor
            self._rows.copy_(torch.tensor(rows), non_blocking=True)
            self._addresses = addresses
        return self._rows


class Launches:
    """The fewest launches for batches of weights: one for each device and set of constants. They depend
    on the kinds of the tensors alone, so they hold none, and are made once.

    Args:
        tile: weights that a program has at least.
    """

    def __init__(self, tile: int = TILE) -> None:
        self._tile = tile
        self._made: dict[tuple[Any, ...], list[Launch]] = {}

    def of(self, batch: Sequence[tuple[Tensor, Tensor, Pattern, int]]) -> list[Launch]:
        """Those of a batch: each weight with where its projection goes, its pattern and dimension.
        Raises ValueError where the kernels do not apply to a weight."""
        key = tuple((*_kind(weight), *_kind(out), *how) for weight, out, *how in batch)
        if key not in self._made:
            if len(self._made) >= MOST_BATCHES:
                self._made.clear()
            self._made[key] = self._make(batch)
        return self._made[key]

    def _make(self, batch: Sequence[tuple[Tensor, Tensor, Pattern, int]]) -> list[Launch]:
        alike: dict[tuple[Any, ...], Launch] = {}
        for i, (weight, out, pattern, dim) in enumerate(batch):
            dim %= max(1, weight.dim())
            if not applies(weight, out, pattern, dim):
                raise ValueError(
                    f"weight {i} of the batch, {list(weight.shape)} {weight.dtype}, is none for the kernels"
                )
            sizes, programs, constants = shape_of(weight, pattern, dim, self._tile)
            constants |= {"WEIGHT": DTYPES[weight.dtype], "OUT": DTYPES[out.dtype]}
            key = weight.device, *constants.values()
            alike.setdefault(key, Launch(constants, weight.device)).add(i, sizes, programs)
        return list(alike.values())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
