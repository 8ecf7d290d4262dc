"""What Triton's kernels share: the N:M choice within a tile of groups, and where its weights lie.

Every weight has a key, an integer that orders a group's magnitudes (ties: the lower index is the
larger; a NaN is below all). No two keys of a group are equal, so the N-th largest is a threshold.
It is found by taking maxima N times, or minima M - N times. Groups of four consecutive weights, the
pattern of the hardware, need no loop. They are split into four registers, whose six comparisons
give every rank, and are read and written 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    """A pointer from a table; :class:`LaunchTable` sees to it that 16 divides it."""
    return tl.multiple_of(tl.load(row + field).to(tl.pointer_type(DTYPE)), 16)
