"""The projections of many weights in as few launches as a CUDA device takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmrun.kernels import projection
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


class Batch:
    """Weights that Triton projects together. The launch is prepared anew when an address changes."""

    def __init__(self) -> None:
        self._addresses: list[tuple[int, int]] = []
        self._launch: Any = None

    def project(self, weights: Sequence[SparseWeight], rules: Sequence[Rule]) -> list[SparseWeight]:
        """Project the weights whose rule keeps the N largest and that Triton's kernel can project.

        Args:
            weights: sparse weights with a dense weight.
            rules: the rule of each weight.

        Returns:
            The weights that were not projected.
        """
        rest: list[SparseWeight] = []
        members: list[Any] = []  # (weight, its dense tensor, its projected tensor)
        for weight, rule in zip(weights, rules, strict=True):
            tensors = weight.dense, weight.weight
            if _keeps_largest(rule) and _fits(weight, *tensors):
                members.append((weight, *tensors))
            else:
                rest.append(weight)
        if members:
            from nmrun.kernels import triton_projection

            addresses = [(d.data_ptr(), p.data_ptr()) for _, d, p in members]
            if addresses != self._addresses:
                self._addresses = addresses
                self._launch = triton_projection.Batch(
                    [d for _, d, _ in members],
                    [p for _, _, p in members],
                    [w.pattern for w, _, _ in members],
                    [w.dim for w, _, _ in members],
                )
            self._launch.project()
        return rest


def _keeps_largest(rule: Rule) -> bool:
    """Say whether the forward weight is the hard threshold by the weight's own pattern."""
    plain = rule.mask is None and rule.soft_threshold_scale is None and rule.pattern is None
    return plain and not rule.pruned_weight_factor


def _fits(weight: SparseWeight, dense: Any, projected: Any) -> bool:
    if not projection.by_triton(dense, weight.pattern):
        return False
    from nmrun.kernels import triton_projection

    return triton_projection.fits(dense, projected, weight.pattern, weight.dim)
