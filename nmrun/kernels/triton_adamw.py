"""Adam and AdamW for sparse weights on CUDA devices, in one pass with what the recipe does around
the step, in Triton.

While a tile of groups is in registers, the gradient is edited, moments and weight are updated, and
the weight is projected. That moves 36 bytes a weight (32 where the gradient needs no mask) instead
of 28 for Adam alone; with a frozen second moment 28. The arithmetic is that of
``torch.optim.AdamW``'s for-each form, operation by operation, without fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nmrun.kernels.layout import Operands
from nmrun.kernels.triton_groups import MODES, Launches, locate, on, pointer, project_tile, select

TILE = 1024  # weights a program has: five tensors of them have to fit into registers


@triton.jit
def adam_many(
    table, owner, scalars,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDED: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr,
    DECAYED: tl.constexpr, SPARED: tl.constexpr, HAS_MASK: tl.constexpr, MODE: tl.constexpr, COUPLED: tl.constexpr, FROZEN: tl.constexpr,
    WEIGHT: tl.constexpr, OUT: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One step for all weights of a table; ``scalars`` are those of
    ``nmrun.kernels.layout.scalars``."""
    program = tl.program_id(0)
    row = table + tl.load(owner + program) * FIELDS
    block = program - tl.load(row + 3).to(tl.int32)
    weight, grad, first, second = (
        pointer(row, 4, WEIGHT),
        pointer(row, 5, WEIGHT),
        pointer(row, 6, WEIGHT),
        pointer(row, 7, WEIGHT),
    )
    out, mask, scale = pointer(row, 8, OUT), pointer(row, 9, tl.int8), pointer(row, 10, WEIGHT)
    columns, inner, size = (
        tl.load(row).to(tl.int32),
        tl.load(row + 1).to(tl.int32),
        tl.load(row + 2).to(tl.int32),
    )
    shrink, coupled, lerp, beta2, rest2 = (
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
    )  # fmt: skip
    root, eps, size_of_step = tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7)
    decay, spared, amount = tl.load(scalars + 8), tl.load(scalars + 9), tl.load(scalars + 10)

    offset, exists, j = locate(block, columns, inner, size, M, P, COLUMNS, STRIDED, SHORT, WIDE)
    w = tl.load(weight + offset, exists, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, exists, other=0.0).to(tl.float32)
    m = tl.load(first + offset, exists, other=0.0).to(tl.float32)
    v = tl.load(second + offset, exists, other=0.0).to(tl.float32)
    before = w
    if DECAYED or (SPARED and not HAS_MASK):
        before = tl.load(out + offset, exists, other=0.0).to(tl.float32)
    mask_value = w
    if HAS_MASK:
        mask_value = tl.load(mask + offset, exists, other=0).to(tl.float32)

    if DECAYED:
        g = g + decay * (w - before)
    if SPARED:
        if HAS_MASK:
            g = tl.where(mask_value != 0, g, g * spared)
        else:
            g = tl.where(before == w, g, g * spared)
    if COUPLED:
        g = g + coupled * w
    else:
        w = w * shrink
    m = tl.where(lerp < 0.5, m + lerp * (g - m), g - (g - m) * (1 - lerp))  # torch.lerp's two forms
    if FROZEN:
        w = w + size_of_step * tl.div_rn(m, v)
    else:
        v = v * beta2 + rest2 * g * g
        w = w + size_of_step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        tl.store(second + offset, v, exists)
    tl.store(weight + offset, w, exists)
    tl.store(first + offset, m, exists)

    if HAS_MASK:
        value = w * mask_value
    else:
        if MODE == 1:
            amount = tl.load(scale).to(tl.float32)
        largest, shift = select(w, j, N, M, COLUMNS, STRIDED, SHORT)
        value = project_tile(w, largest, shift, amount, MODE, tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), exists)


class FusedAdam:
    """Adam's step, with what is done around it, for weights of one ``Rule.kind`` on one device, in as
    few launches as they allow."""

    def __init__(self, kind: tuple[bool, ...], device: torch.device) -> None:
        decayed, spared, has_mask, soft, fading = kind
        mode = MODES["soft" if soft else "decayed" if fading else "hard"]
        self._constants = {"DECAYED": decayed, "SPARED": spared, "HAS_MASK": has_mask, "MODE": mode}
        self._launches = Launches(TILE)
        # at one place for good: a captured graph reads them there
        self.scalars = torch.empty(11, dtype=torch.float32, device=device)

    def step(self, members: Sequence[Operands], scalars: list[float], frozen: bool = False) -> None:
        """Update weights, moments and working copies. Raises ValueError where the kernels do not apply
        to a weight, and where a tensor does not begin at a multiple of 16 bytes."""
        self.scalars.copy_(torch.tensor(scalars, dtype=torch.float32), non_blocking=True)
        updates = [o.update for o in members]
        batch = [(u.dense, u.projected, u.pattern, u.dim) for u in updates]
        for launch in self._launches.of(batch):
            rows = launch.rows([
                (*members[i].all, updates[i].rule.mask, updates[i].rule.soft_threshold_scale)
                for i in launch.members
            ])  # fmt: skip
            with on(rows):
                adam_many[(launch.programs,)](
                    rows, launch.owner, self.scalars, **launch.constants, **self._constants, COUPLED=scalars[1] != 0, FROZEN=frozen,
                    FIELDS=rows.shape[1], enable_fp_fusion=False,
                )  # fmt: skip
