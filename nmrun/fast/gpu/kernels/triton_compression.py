"""2:4 weights into cuSPARSELt's compressed form on Hopper, in Triton, in one pass.

The form was read off compressed matrices; :mod:`nmrun.fast.gpu.kernels.cusparselt` compares this kernel with the
library before it is used. First come the kept values, two a group, row by row. Then comes a nibble a
group, the two places of its values, low bits first. Nibbles lie in tiles of 64 rows and 32 columns;
tiles lie row by row. In a tile, from the lowest bit of a nibble's place up, with r the row and g the
group: r3, g2, g0, g1, r0, r1, r2, r4, r5.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 64  # of a tile
GROUPS = 8  # of a tile


@triton.jit
def _bits(w, CAST: tl.constexpr):
    """Numbers as their bits; -0.0, as a pruned weight may be, as 0."""
    if CAST is not None:
        w = w.to(CAST).to(tl.int16, bitcast=True)
    w = w.to(tl.int32)
    return tl.where(w & 0x7FFF != 0, w, 0)


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
def _group(
    weight, r, g, rows, groups, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """(the first kept value, the second, their places) of groups g in rows r, (HEIGHT, WIDTH)."""
    exists = (r < rows) & (g < groups)
    if TRANSPOSED:  # side by side in memory are the rows
        at = (g * 4).to(tl.int64) * rows + r
        a = _bits(tl.load(weight + at, exists, other=0), CAST)
        b = _bits(tl.load(weight + at + rows, exists, other=0), CAST)
        c = _bits(tl.load(weight + at + 2 * rows, exists, other=0), CAST)
        d = _bits(tl.load(weight + at + 3 * rows, exists, other=0), CAST)
    else:
        at = (r.to(tl.int64) * groups + g) * 4
        at = tl.expand_dims(at, 2) + tl.arange(0, 4)[None, None, :]
        w = _bits(tl.load(weight + at, tl.expand_dims(exists, 2), other=0), CAST)
        even, odd = tl.split(tl.reshape(w, (HEIGHT, WIDTH, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    return _kept(a, b, c, d)


@triton.jit
def pack(
    weight, values, meta, rows, groups,
    TRANSPOSED: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile. ``weight`` (rows, 4 groups) is stored by rows, or by columns where it is TRANSPOSED.
    CAST: the dtype that float32 is rounded to; None: ``weight`` has the bits of the numbers, as
    integers.

    Weights are read twice, the second time from the cache: in the order of the values, and in that
    of the places. Reordering places in registers, Triton 3.6 mixed values into them.
    """
    down, right, across = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first_row, first_group = down * ROWS, right * GROUPS
    r, g = first_row + tl.arange(0, ROWS)[:, None], first_group + tl.arange(0, GROUPS)[None, :]
    first_value, last_value, _ = _group(weight, r, g, rows, groups, ROWS, GROUPS, TRANSPOSED, CAST)
    pair = (first_value & 0xFFFF) | (last_value << 16)
    place = r.to(tl.int64) * groups + g
    tl.store(values + place, pair, (r < rows) & (g < groups))

    words: tl.constexpr = ROWS * GROUPS // 4  # of four nibbles
    word = tl.arange(0, words)[:, None]
    packed = tl.zeros_like(word)
    for k in tl.static_range(4):
        r = (word >> 5) * 16 + (k & 1) * 8 + ((word >> 2) & 7)
        g = (k >> 1) * 4 + (word & 3)
        _, _, nibble = _group(
            weight, first_row + r, first_group + g, rows, groups, words, 1, TRANSPOSED, CAST
        )
        packed |= nibble << (4 * k)
    tile = down.to(tl.int64) * across + right
    tl.store(meta + tile * words + word, packed.to(tl.int16))
