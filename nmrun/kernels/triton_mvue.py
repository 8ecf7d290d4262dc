"""The minimum-variance unbiased N:M estimate on CUDA devices, in Triton: ``nmrun.sparsity.mvue`` in
one read and one write.

In float32, where the reference works in float64: probabilities are off by some 1e-7 of themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST
from nmrun.kernels.triton_launches import DTYPES, on
from nmrun.patterns import Pattern

LARGEST_M = 16  # the sums along a group are unrolled
TILE = 1024  # entries a program has


@triton.jit(do_not_specialize=["columns", "inner"])
def estimate_one(
    x, out, seed, columns, inner, N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Groups of M entries ``inner`` apart; side by side in memory are the columns, each with a
    uniform number of its own."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, P)[:, None]
    offset = (column // inner * M)[None, :] * inner + (column % inner)[None, :] + j * inner
    exists = (column < columns)[None, :] & (j < M)
    value = tl.load(x + offset, exists, other=0.0).to(tl.float32)
    size = tl.abs(value)
    share = tl.zeros_like(size)
    capped = size < 0
    for _ in range(
        N + 1
        # the largest entries whose share would exceed one are certain, the others share what is left
    ):
        rest = tl.where(capped, 0.0, size)
        room = N - tl.sum(capped.to(tl.float32), 0)[None, :]
        total = tl.sum(rest, 0)[None, :]
        share = tl.where(total > 0, room * rest / tl.where(total > 0, total, 1.0), 0.0)
        capped = capped | (share >= 1.0)
    p = tl.where(capped, 1.0, share)
    whole = tl.floor(tl.sum(p, 0) + 0.5)  # rounding must not cost or add a pick
    start = tl.rand(tl.load(seed), column)
    end, before = tl.zeros_like(start), tl.zeros_like(start)
    mask = size < 0
    # systematic sampling: an entry is kept where a tick falls into its share
    for k in tl.static_range(M):
        end += tl.sum(tl.where(j == k, p, 0.0), 0)
        tick = tl.floor(tl.minimum(end, whole) + start if k < M - 1 else whole + start)
        mask = mask | ((j == k) & (tick > before)[None, :])
        before = tick
    mask = mask & (p > 0)
    estimate = tl.where(mask, tl.div_rn(value, tl.where(mask, p, 1.0)), 0.0)
    broken = tl.max((~(size < float("inf"))).to(tl.int32), 0)[None, :] > 0
    estimate = tl.where(broken, float("nan"), estimate)
    tl.store(out + offset, estimate.to(out.dtype.element_ty), exists)


def applies(x: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether :func:`estimate` can do this: 16 or 32 bits, contiguous, groups along a dimension
    that is not the last, M up to 16."""
    inner = x.shape[dim + 1 :].numel()
    return (
        x.dtype in DTYPES
        and x.is_contiguous()
        and inner > 1
        and pattern.m <= LARGEST_M
        and x.shape[dim] % pattern.m == 0
        and 0 < x.numel() < LARGEST
    )


def estimate(x: Tensor, out: Tensor, pattern: Pattern, dim: int, seed: Tensor) -> None:
    """Write the estimate of ``x`` into ``out``; ``seed`` is an integer on the device, so that
    nothing waits for it."""
    inner, columns = x.shape[dim + 1 :].numel(), x.numel() // pattern.m
    width = triton.next_power_of_2(pattern.m)
    constants = {"N": pattern.n, "M": pattern.m, "P": width, "COLUMNS": TILE // width}
    with on(x):
        estimate_one[(triton.cdiv(columns, constants["COLUMNS"]),)](
            x, out, seed, columns, inner, **constants, enable_fp_fusion=False
        )  # fmt: skip
