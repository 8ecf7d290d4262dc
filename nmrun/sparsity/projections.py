"""A :class:`nmrun.rule.Rule` carried out on one weight, and the projections of many weights at once.

``nmrun.optim.Adam`` carries out the same rules inside its step (``nmrun.optim.adam``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.patterns import Pattern
from nmrun.rule import Rule
from nmrun.sparsity import reference
from nmrun.sparsity.weight import SparseWeight

if TYPE_CHECKING:
    from nmrun.kernels.triton_projection import Batch


@torch.no_grad()
def edit_gradient(grad: Tensor, dense: Tensor, projected: Tensor, rule: Rule) -> None:
    """Apply the gradient's part of a rule to the gradient at the projected weight, in place.
    Without a mask in the rule, an entry counts as pruned where the projection changed the dense
    weight. An entry whose dense weight is 0 then counts as kept."""
    if rule.pruned_gradient_decay:
        # (1 - m) * w is dense minus projected, exactly
        grad.add_(dense - projected, alpha=rule.pruned_gradient_decay)
    if rule.pruned_gradient_factor == 1:
        return
    if rule.mask is not None and rule.pruned_gradient_factor == 0:
        grad.mul_(rule.mask)  # on a CPU four times faster than masked_fill_
        return
    mask = (projected == dense) if rule.mask is None else rule.mask
    # lerp gives exactly 1 or the factor; torch.where takes four times as long on a CPU
    factor = grad.new_full((), rule.pruned_gradient_factor)
    grad.mul_(torch.lerp(factor, grad.new_ones(()), mask.to(grad.dtype)))


@torch.no_grad()
def edit_gradients(weights: Sequence[SparseWeight], rules: Sequence[Rule]) -> None:
    """:func:`edit_gradient` of weights that have gradients. On a GPU the weights of one decay share
    two launches. On a CPU a weight at a time stays in the cache."""
    decayed = defaultdict(list)
    for weight, rule in zip(weights, rules, strict=True):
        grad, decay = weight.grad, rule.pruned_gradient_decay
        assert grad is not None
        if decay and grad.device.type != "cpu":
            decayed[decay, grad.device, grad.dtype].append((grad, weight.dense, weight.weight))
        else:
            edit_gradient(grad, weight.dense, weight.weight, rule)
    for (decay, *_), members in decayed.items():
        grads, dense, projected = map(list, zip(*members, strict=True))
        torch._foreach_add_(grads, torch._foreach_sub(dense, projected), alpha=decay)


@torch.no_grad()
def project(dense: Tensor, out: Tensor, pattern: Pattern, dim: int, rule: Rule) -> None:
    """Write the projection of a dense weight, by the forward part of a rule whose own pattern is
    not read. Raises ValueError where M does not divide the size of ``dim``."""
    factor, scale = rule.pruned_weight_factor, rule.soft_threshold_scale
    if scale is not None:
        gamma = rule.soft_threshold_gamma
        if gamma or not projection.project(dense, out, pattern, dim, soft=True, scale=scale):
            torch.mul(reference.soft_threshold(dense, pattern, dim, gamma), scale, out=out)
        return
    if rule.mask is not None:
        torch.mul(dense, rule.mask, out=out)
    elif factor and projection.project(dense, out, pattern, dim, factor=factor):
        return
    else:
        keep_largest(dense, out, pattern, dim)
    if factor:
        out.add_(dense - out, alpha=factor)  # the difference is (1 - m) * w, exactly


def keep_largest(dense: Tensor, out: Tensor, pattern: Pattern, dim: int) -> None:
    """Write ``m * w``, where the mask m keeps the N largest magnitudes of every M. Raises
    ValueError as :func:`project`."""
    if not projection.project(dense, out, pattern, dim):
        out.copy_(reference.hard_threshold(dense, pattern, dim))


class WeightBatch:
    """Weights that Triton projects together, in as few launches as a CUDA device takes."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def project(self, weights: Sequence[SparseWeight], rules: Sequence[Rule]) -> list[SparseWeight]:
        """Project the weights whose rule keeps the N largest and that Triton's kernel can project;
        returns the others."""
        rest: list[SparseWeight] = []
        together = list[tuple[Tensor, Tensor, Pattern, int]]()
        for weight, rule in zip(weights, rules, strict=True):
            tensors = weight.dense, weight.weight
            if _keeps_largest(rule) and _fits(weight, *tensors):
                together.append((*tensors, weight.pattern, weight.dim))
            else:
                rest.append(weight)
        if together:
            from nmrun.kernels.triton_projection import Batch

            self._batch = self._batch or Batch()
            self._batch.project(together)
        return rest


def _keeps_largest(rule: Rule) -> bool:
    """Whether the forward weight is the hard threshold by the weight's own pattern."""
    plain = rule.mask is None and rule.soft_threshold_scale is None and rule.pattern is None
    return plain and not rule.pruned_weight_factor


def _fits(weight: SparseWeight, dense: Any, projected: Any) -> bool:
    if not projection.by_triton(dense, weight.pattern):
        return False
    from nmrun.kernels import triton_projection

    return triton_projection.fits(dense, projected, weight.pattern, weight.dim)
