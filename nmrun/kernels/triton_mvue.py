"""The minimum-variance unbiased N:M estimate on CUDA devices, in Triton: ``nmrun.sparsity.mvue`` in
one read and one write.

In float32, where the reference works in float64: probabilities are off by some 1e-7 of themselves.
It is for groups of four, the pattern of the hardware: they are four registers of a thread, and
threads exchange nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST
from nmrun.kernels.triton_groups import DTYPES, on
from nmrun.patterns import Pattern

TILE = 4096  # entries a program has at most
TINY = tl.constexpr(2.0**-120)


@triton.jit
def uniform(seed, group):
    """A random number in [0, 1) for each group. Seven rounds of Philox are the fewest that pass
    the tests of randomness (Salmon et al. 2011, table 2)."""
    return tl.rand(seed, group, n_rounds=7)


@triton.jit
def _flag(condition):
    """As a number: a thread has few registers for truth values."""
    return tl.where(condition, 1.0, 0.0)


@triton.jit
def _pick(value, size, sure, share, end, before, N: tl.constexpr):
    """(the estimate of an entry, the ticks up to the end of its part of the group's line):
    systematic sampling keeps an entry where a tick, a whole number, falls into its part."""
    tick = _flag(end >= 1)
    for k in tl.static_range(2, N + 1):
        tick += _flag(end >= k)
    # an uncertain entry over its probability, a share of the sum: its own size cancels
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    signed = (share.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    estimate = tl.where(sure > 0, value, signed)
    return tl.where((tick > before) & (size > 0), estimate, 0.0), tick


@triton.jit
def estimate_four(a, b, c, d, start, N: tl.constexpr):
    """The N:4 estimates of groups (a, b, c, d) in float32, N below 4; ``start``: a uniform number
    for each group."""
    size_a, size_b, size_c, size_d = tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)
    zero = 0.0 * start
    sure_a, sure_b, sure_c, sure_d, room = zero, zero, zero, zero, zero + N
    rest_a, rest_b, rest_c, rest_d = size_a, size_b, size_c, size_d
    # not zero: no zero is certain, and nothing is divided by zero
    total = tl.maximum((rest_a + rest_b) + (rest_c + rest_d), TINY)
    # the largest entries whose share would be one or more are certain, the others share what is
    # left; where that is one entry, no share exceeds one
    for _ in tl.static_range(N - 1):
        sure_a += _flag(room * rest_a >= total)
        sure_b += _flag(room * rest_b >= total)
        sure_c += _flag(room * rest_c >= total)
        sure_d += _flag(room * rest_d >= total)
        rest_a, rest_b = tl.where(sure_a > 0, 0.0, size_a), tl.where(sure_b > 0, 0.0, size_b)
        rest_c, rest_d = tl.where(sure_c > 0, 0.0, size_c), tl.where(sure_d > 0, 0.0, size_d)
        room = N - (sure_a + sure_b) - (sure_c + sure_d)
        total = tl.maximum((rest_a + rest_b) + (rest_c + rest_d), TINY)
    ratio, share = room / total, total / tl.maximum(room, 1.0)
    # rounding must not cost or add a pick
    last = start + tl.where(total > TINY, N, N - room)
    end_a = start + (sure_a + rest_a * ratio)
    end_b = end_a + (sure_b + rest_b * ratio)
    end_c = end_b + (sure_c + rest_c * ratio)
    infinity, nan = float("inf"), float("nan")
    finite = (size_a < infinity) & (size_b < infinity) & (size_c < infinity) & (size_d < infinity)
    a, tick = _pick(a, size_a, sure_a, share, tl.minimum(end_a, last), zero, N)
    b, tick = _pick(b, size_b, sure_b, share, tl.minimum(end_b, last), tick, N)
    c, tick = _pick(c, size_c, sure_c, share, tl.minimum(end_c, last), tick, N)
    d, tick = _pick(d, size_d, sure_d, share, last, tick, N)
    a, b = tl.where(finite, a, nan), tl.where(finite, b, nan)
    return a, b, tl.where(finite, c, nan), tl.where(finite, d, nan)


@triton.jit
def estimate_one(x, out, seed, inner, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups of four entries ``inner`` apart; side by side in memory are the groups of a line, each
    with a uniform number of its own."""
    blocks = tl.cdiv(inner, COLUMNS)
    line, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < inner
    start = uniform(tl.load(seed), line * inner + column)
    first = line * 4 * inner + column
    a = tl.load(x + first, exists, other=0.0).to(tl.float32)
    b = tl.load(x + first + inner, exists, other=0.0).to(tl.float32)
    c = tl.load(x + first + 2 * inner, exists, other=0.0).to(tl.float32)
    d = tl.load(x + first + 3 * inner, exists, other=0.0).to(tl.float32)
    a, b, c, d = estimate_four(a, b, c, d, start, N)
    tl.store(out + first, a.to(out.dtype.element_ty), exists)
    tl.store(out + first + inner, b.to(out.dtype.element_ty), exists)
    tl.store(out + first + 2 * inner, c.to(out.dtype.element_ty), exists)
    tl.store(out + first + 3 * inner, d.to(out.dtype.element_ty), exists)


def applies(x: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether :func:`estimate` can do this: 1:4 to 3:4, 16 or 32 bits, contiguous, groups along a
    dimension that is not the last."""
    return (
        x.dtype in DTYPES
        and x.is_contiguous()
        and x.shape[dim + 1 :].numel() > 1
        and pattern.n < pattern.m == 4
        and x.shape[dim] % 4 == 0
        and 0 < x.numel() < LARGEST
    )


def estimate(x: Tensor, out: Tensor, pattern: Pattern, dim: int, seed: Tensor) -> None:
    """Write the estimate of ``x`` into ``out``; ``seed`` is an integer on the device, so that
    nothing waits for it."""
    inner, lines = x.shape[dim + 1 :].numel(), x.shape[: dim + 1].numel() // 4
    columns = min(TILE // 4, triton.next_power_of_2(inner))
    with on(x):
        estimate_one[(lines * triton.cdiv(inner, columns),)](
            x, out, seed, inner, pattern.n, columns, enable_fp_fusion=False
        )
