"""Gradients that a GradScaler leaves scaled."""

from __future__ import annotations

import torch


def skipped_by_loss_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Unscale the gradients where a GradScaler left that to the optimizer.

    A GradScaler gives its scale and its overflow flag to optimizers whose fused kernel applies
    them. A recipe edits gradients before this kernel: they must be unscaled, and a step that
    overflows must not count.

    Args:
        optimizer: the optimizer that is about to step.

    Returns:
        Whether the gradients overflowed, so that the step is skipped.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return True
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch._foreach_div_(grads, float(scale))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    return False
