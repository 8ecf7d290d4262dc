"""The projections of many weights in as few launches as a CUDA device takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmrun.kernels import projection
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


class Batch:
    """Weights that a CUDA device projects in as few launches as it takes."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._launch: Any = None

    def project(self, weights: Sequence[SparseWeight], rules: Sequence[Rule]) -> list[SparseWeight]:
        """Project the N largest of the weights it can; returns the others."""
        rest: list[SparseWeight] = []
        chosen: list[SparseWeight] = []
        for weight, rule in zip(weights, rules, strict=True):
            plain = rule.mask is None and rule.soft_threshold_scale is None
            plain = plain and rule.pattern is None and not rule.pruned_weight_factor
            takes = plain and projection.by_triton(weight.dense, weight.pattern)
            (chosen if takes else rest).append(weight)
        if not chosen:
            return rest
        from nmrun.kernels import triton_projection

        tensors = [(w.dense, w.weight) for w in chosen]
        fit = [
            triton_projection.fits(d, p, w.pattern, w.dim)
            for w, (d, p) in zip(chosen, tensors, strict=True)
        ]
        rest += [w for w, good in zip(chosen, fit, strict=True) if not good]
        members = [(w, *t) for w, t, good in zip(chosen, tensors, fit, strict=True) if good]
        key = [(d.data_ptr(), p.data_ptr()) for _, d, p in members]
        if key != self._key or self._launch is None:
            self._key = key
            self._launch = triton_projection.Batch(
                [d for _, d, _ in members],
                [p for _, _, p in members],
                [w.pattern for w, _, _ in members],
                [w.dim for w, _, _ in members],
            )
        self._launch.project()
        return rest
