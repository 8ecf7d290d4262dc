"""2:4 weights into cuSPARSELt's compressed form on Hopper, in Triton, in one pass.

The form was read off compressed matrices; :mod:`nmrun.fast.gpu.kernels.compression` compares this kernel with the
library before it is used. First come the kept values, two a group, row by row. Then comes a nibble a
group, the two places of its values, low bits first. Nibbles lie in tiles of 64 rows and 32 columns
(64 columns for numbers of 8 bits); tiles lie row by row. In a tile, from the lowest bit of a
nibble's place up, with r the row and g the group:

    16 bits    r3    g2    g0 g1       r0 r1 r2    r4 r5
    8 bits     g0    r3    g3    g1 g2    r0 r1 r2    r4 r5
"""

from __future__ import annotations

import triton
import triton.language as tl

from nmrun.kernels.triton_groups import pointer
from nmrun.kernels.triton_mvue import estimate_four, uniform

ROWS = 64  # of a tile
GROUPS = {16: 8, 8: 16}  # of a tile, by the bits of a number


@triton.jit
def _bits(w, CAST: tl.constexpr, BITS: tl.constexpr):
    """Numbers as their bits; -0.0, as a pruned weight may be, as 0."""
    if CAST is not None:
        w = w.to(CAST).to(tl.int16, bitcast=True)
    w = w.to(tl.int32)
    size = w & (0x7FFF if BITS == 16 else 0x7F)
    return tl.where(size != 0, w, 0)


@triton.jit
def _kept(a, b, c, d):
    """(the first kept value of groups, the second, their places), of bits of which two at most are
    not zero."""
    last = tl.where(d != 0, 3, tl.where(c != 0, 2, 1))
    first = tl.where(a != 0, 0, tl.where(b != 0, 1, tl.where(c != 0, 2, 3)))
    first = tl.where(first < last, first, 0)  # fewer than two are not zero
    first_value = tl.where(first == 0, a, tl.where(first == 1, b, c))
    last_value = tl.where(last == 1, b, tl.where(last == 2, c, d))
    return first_value, last_value, first | (last << 2)


@triton.jit
def _place(word, k: tl.constexpr, BITS: tl.constexpr):
    """(row, group) in a tile of the k-th nibble of 16-bit words."""
    if BITS == 16:
        r = (word >> 5) * 16 + (k & 1) * 8 + ((word >> 2) & 7)
        g = (k >> 1) * 4 + (word & 3)
    else:
        r = (word >> 6) * 16 + (k >> 1) * 8 + ((word >> 3) & 7)
        g = (word & 1) * 8 + ((word >> 1) & 3) * 2 + (k & 1)
    return r, g


@triton.jit
def _read(weight, copy, at, exists, CAST: tl.constexpr, BITS: tl.constexpr, COPIES: tl.constexpr):
    w = tl.load(weight + at, exists, other=0)
    if COPIES:
        tl.store(copy + at, w.to(copy.dtype.element_ty), exists)
    return _bits(w, CAST, BITS)


@triton.jit
def _group(
    weight, copy, r, g, rows, groups, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """(the first kept value, the second, their places) of groups g in rows r, (HEIGHT, WIDTH)."""
    exists = (r < rows) & (g < groups)
    if TRANSPOSED:  # side by side in memory are the rows
        at = (g * 4).to(tl.int64) * rows + r
        a = _read(weight, copy, at, exists, CAST, BITS, COPIES)
        b = _read(weight, copy, at + rows, exists, CAST, BITS, COPIES)
        c = _read(weight, copy, at + 2 * rows, exists, CAST, BITS, COPIES)
        d = _read(weight, copy, at + 3 * rows, exists, CAST, BITS, COPIES)
    else:
        at = (r.to(tl.int64) * groups + g) * 4
        at = tl.expand_dims(at, 2) + tl.arange(0, 4)[None, None, :]
        w = _read(weight, copy, at, tl.expand_dims(exists, 2), CAST, BITS, COPIES)
        even, odd = tl.split(tl.reshape(w, (HEIGHT, WIDTH, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    return _kept(a, b, c, d)


@triton.jit
def _tile(
    down, right, across, weight, copy, values, meta, rows, groups, TRANSPOSED: tl.constexpr,
    CAST: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The tile number ``right`` of ``across`` in the row of tiles ``down``. COPIES: the weight is also
    written to ``copy``, which is stored as it is.

    Weights are read twice, the second time from the cache: in the order of the values, and in that
    of the places. Reordering places in registers, Triton 3.6 mixed values into them.
    """
    first_row, first_group = down * ROWS, right * GROUPS
    r, g = first_row + tl.arange(0, ROWS)[:, None], first_group + tl.arange(0, GROUPS)[None, :]
    first_value, last_value, _ = _group(
        weight, copy, r, g, rows, groups, ROWS, GROUPS, TRANSPOSED, CAST, BITS, COPIES
    )
    pair = (first_value & ((1 << BITS) - 1)) | (last_value << BITS)
    place = r.to(tl.int64) * groups + g
    tl.store(values + place, pair.to(values.dtype.element_ty), (r < rows) & (g < groups))

    words: tl.constexpr = ROWS * GROUPS // 4  # of four nibbles
    word = tl.arange(0, words)[:, None]
    packed = tl.zeros_like(word)
    for k in tl.static_range(4):
        r, g = _place(word, k, BITS)
        _, _, nibble = _group(
            weight, copy, first_row + r, first_group + g, rows, groups, words, 1, TRANSPOSED, CAST, BITS, False
        )  # fmt: skip
        packed |= nibble << (4 * k)
    tile = down.to(tl.int64) * across + right
    tl.store(meta + tile * words + word, packed.to(tl.int16))


@triton.jit
def pack_one(
    weight, values, meta, rows, groups,
    TRANSPOSED: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile. ``weight`` (rows, 4 groups) is stored by rows, or by columns where it is TRANSPOSED.
    CAST: the dtype that float32 is rounded to; None: ``weight`` has the bits of the numbers, as
    integers.
    """
    down, right, across = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _tile(
        down, right, across, weight, weight, values, meta, rows, groups, TRANSPOSED, CAST, BITS, ROWS, GROUPS, False
    )  # fmt: skip


@triton.jit
def pack_many(
    table, owner,
    TRANSPOSED: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT: tl.constexpr, PAIR: tl.constexpr, COPY: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile of the weights of a table: ``owner`` has the row of each program. EVEN: 16 divides rows
    and groups. WEIGHT: the dtype that a weight is read as; PAIR: integers of two values; COPY: the
    dtype of a copy, None for none."""
    program = tl.program_id(0)
    row = table + tl.load(owner + program) * FIELDS
    rows, groups = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    block = program - tl.load(row + 3).to(tl.int32)
    if EVEN:
        rows, groups = tl.multiple_of(rows, 16), tl.multiple_of(groups, 16)
    high, across = tl.cdiv(rows, ROWS), tl.cdiv(groups, GROUPS)
    weight, values = pointer(row, 4, WEIGHT), pointer(row, 5, PAIR)
    meta = pointer(row, 5, tl.int16) + rows.to(tl.int64) * groups * (BITS // 8)
    if COPY is not None:
        copy = pointer(row, 6, COPY)
    else:
        copy = weight
    _tile(
        block % high, block // high, across, weight, copy, values, meta, rows, groups,
        TRANSPOSED, CAST, BITS, ROWS, GROUPS, COPY is not None,
    )  # fmt: skip


@triton.jit
def _entry(x, at, exists):
    return tl.load(x + at, exists, other=0.0).to(tl.float32)


@triton.jit
def pack_estimate(
    x, values, meta, seed, rows, groups, N: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile of an N:4 estimate (``nmrun.sparsity.mvue``) in 16 bits. ``x`` (4 groups, rows) is
    estimated along its first dimension, and compressed as (rows, 4 groups).

    Read and written in the order of the places alone: an estimate costs more than half a sector.
    """
    first_row, first_group = tl.program_id(0) * ROWS, tl.program_id(1) * GROUPS
    words: tl.constexpr = ROWS * GROUPS // 4
    word = tl.arange(0, words)
    packed = tl.zeros_like(word)
    number = tl.load(seed)
    for k in tl.static_range(4):
        r, g = _place(word, k, 16)
        r, g = first_row + r, first_group + g
        exists = (r < rows) & (g < groups)
        at = (g * 4).to(tl.int64) * rows + r
        a, b = _entry(x, at, exists), _entry(x, at + rows, exists)
        c, d = _entry(x, at + 2 * rows, exists), _entry(x, at + 3 * rows, exists)
        a, b, c, d = estimate_four(a, b, c, d, uniform(number, g * rows + r), N)
        first_value, last_value, nibble = _kept(
            _bits(a, CAST, 16), _bits(b, CAST, 16), _bits(c, CAST, 16), _bits(d, CAST, 16)
        )
        pair = (first_value & 0xFFFF) | (last_value << 16)
        tl.store(values + r.to(tl.int64) * groups + g, pair, exists)
        packed |= nibble << (4 * k)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(meta + tile * words + word, packed.to(tl.int16))
