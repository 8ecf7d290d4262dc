"""Masks, projections and checks for N:M sparsity, usable on their own."""

from nmrun.sparsity.check import check_nm
from nmrun.sparsity.masks import hard_threshold, mvue, nm_mask, soft_threshold, soft_threshold_scale
from nmrun.sparsity.transposable import transposable_mask

__all__ = [
    "check_nm",
    "hard_threshold",
    "mvue",
    "nm_mask",
    "soft_threshold",
    "soft_threshold_scale",
    "transposable_mask",
]
