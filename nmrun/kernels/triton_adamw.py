"""Adam and AdamW for sparse weights on CUDA devices, in one pass with what the recipe does around the step, in Triton.

What a step of STE or SR-STE would read and write in five passes is done while a tile of groups is in registers: SR-STE's decay (with
the mask of the working copy as it is), the moments, the update, and the projection of the new weight into the working copy and its copy
in the compute dtype. That moves 36 bytes a weight (32 without decay) instead of 28 for Adam alone, and 2 more for a 16-bit copy.

The arithmetic is that of ``torch.optim.AdamW``'s for-each form, operation by operation, without fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.triton_groups import launches, locate, on, pointer, select, write
from nmrun.patterns import Pattern

TILE = 1024  # weights a program has: five tensors of them have to fit into registers


@triton.jit
def adam_many(
    table, owner, scalars, flips,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, STRIDED: tl.constexpr, SHORT: tl.constexpr,
    COUPLED: tl.constexpr, DECAY: tl.constexpr, CAST: tl.constexpr, FLIPS: tl.constexpr,
    WEIGHT: tl.constexpr, OUT: tl.constexpr, CASTED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One step for all weights of a table; ``scalars`` are those of :func:`scalars_of`."""
    program = tl.program_id(0)
    row = table + tl.load(owner + program) * FIELDS
    block = program - tl.load(row + 3).to(tl.int32)
    weight, grad, first, second = (
        pointer(row, 4, WEIGHT),
        pointer(row, 5, WEIGHT),
        pointer(row, 6, WEIGHT),
        pointer(row, 7, WEIGHT),
    )
    out, cast = pointer(row, 8, OUT), pointer(row, 9, CASTED)
    columns, inner, size = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    shrink, coupled, lerp, beta2, rest2 = (
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
    )  # fmt: skip
    root, eps, size_of_step, decay = (
        tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7), tl.load(scalars + 8)
    )  # fmt: skip

    offset, exists, j = locate(block, columns, inner, size, M, P, COLUMNS, STRIDED, SHORT)
    w = tl.load(weight + offset, exists, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, exists, other=0.0).to(tl.float32)
    m = tl.load(first + offset, exists, other=0.0).to(tl.float32)
    v = tl.load(second + offset, exists, other=0.0).to(tl.float32)
    before = w
    if DECAY or FLIPS:
        before = tl.load(out + offset, exists, other=0.0).to(tl.float32)

    if DECAY:
        g = g + decay * tl.where(before == 0, w, 0.0)
    if COUPLED:
        g = g + coupled * w
    else:
        w = w * shrink
    m = tl.where(lerp < 0.5, m + lerp * (g - m), g - (g - m) * (1 - lerp))  # torch.lerp's two forms
    v = v * beta2 + rest2 * g * g
    w = w + size_of_step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)

    kept, _ = select(w, j, N, M, COLUMNS, STRIDED, SHORT)
    tl.store(weight + offset, w, exists)
    tl.store(first + offset, m, exists)
    tl.store(second + offset, v, exists)
    write(tl.where(kept, w, 0.0) + 0.0, before, offset, exists, out, cast, flips, CAST, FLIPS)


def scalars_of(group: dict[str, Any], steps: float, decay: float) -> list[float]:
    """What the kernel needs of a parameter group for step number ``steps`` (from 1): nine numbers, computed in double precision."""
    (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
    return [
        1 - lr * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2,
        (1 - beta2**steps) ** 0.5, group["eps"], -lr / (1 - beta1**steps), decay,
    ]  # fmt: skip


class FusedAdam:
    """Adam's step and the projection of what it leaves, for some weights in as few launches as they allow.

    ``weights`` and ``outs``, their working copies, are float32; ``casts`` (None for none) get the projected values in another dtype. Raises
    ValueError where the kernels do not apply to a weight (see ``triton_projection.project``).
    """

    def __init__(
        self, weights: Sequence[Tensor], outs: Sequence[Tensor], patterns: Sequence[Pattern], dims: Sequence[int],
        casts: Sequence[Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        if any(w.dtype != torch.float32 for w in weights):
            raise ValueError("the fused step of Adam is for float32 weights")
        self.weights, self.outs, self.casts = weights, outs, casts or [None] * len(weights)
        self._launches = launches(weights, outs, patterns, dims, self.casts, TILE)
        self.scalars = torch.empty(9, device=weights[0].device)  # at one place for good: a captured graph reads them there

    def step(
        self, grads: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], decoupled: bool = True, decay: bool = True,
        flips: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Update ``weights``, both moments and ``outs``, by ``scalars``: set them before, with ``scalars.copy_(...)``. ``grads`` stay.

        decoupled: AdamW's weight decay, not Adam's. decay: False leaves SR-STE's term out. flips: as in ``triton_projection.project``.
        Raises ValueError if a tensor does not begin at a multiple of 16 bytes.
        """
        for members, table, constants in self._launches:
            rows = table.rows([(self.weights[i], grads[i], first[i], second[i], self.outs[i], self.casts[i]) for i in members])
            with on(rows):
                adam_many[(table.programs,)](
                    rows, table.owner, self.scalars, flips, **constants, COUPLED=not decoupled, DECAY=decay, FLIPS=flips is not None,
                    FIELDS=rows.shape[1], enable_fp_fusion=False,
                )  # fmt: skip
        written = [*self.weights, *first, *second, *self.outs, *(c for c in self.casts if c is not None)]
        torch.autograd.graph.increment_version(written)  # autograd and the working copies go by versions
