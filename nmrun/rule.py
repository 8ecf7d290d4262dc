"""What one optimizer step does to one sparse weight, as data.

Let ``w`` be the dense weight, ``m`` its mask (1 = kept) and ``g`` the gradient at the projected
weight. Nearly every paper does this around an optimizer step::

    gradient   g * (m + (1 - m) * pruned_gradient_factor) + pruned_gradient_decay * (1 - m) * w
    forward    w * (m + (1 - m) * pruned_weight_factor)    or    scale * soft_threshold(w)

A recipe states it once. Torch (``nmrun.sparsity.projections``), C and Triton (``nmrun.kernels``) carry
it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from nmrun.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """One step's update of one weight. The default is STE: hard mask, straight-through gradient.

    Args:
        pruned_gradient_decay: this factor times the dense weight is added to the gradients of
            pruned weights (SR-STE's lambda). Not together with ``pruned_gradient_factor``.
        pruned_gradient_factor: of the gradients of pruned weights; 0 masks them.
        pruned_weight_factor: of pruned weights in the forward pass (MdGf's D).
        soft_threshold_scale: 0-dimensional; the forward weight is then the soft threshold times
            this scale (S-STE's beta). None: the hard threshold.
        soft_threshold_gamma: where the soft threshold lies between the (N+1)-th largest magnitude
            (0, S-STE's) and the N-th (1).
        mask: a fixed mask: bool, shape of the weight, True = kept. None: the N largest of every M,
            chosen anew after every step.
        pattern: of this step. None: the weight's own; structure decay has others.
    """

    pruned_gradient_decay: float = 0.0
    pruned_gradient_factor: float = 1.0
    pruned_weight_factor: float = 0.0
    soft_threshold_scale: Tensor | None = None
    soft_threshold_gamma: float = 0.0
    mask: Tensor | None = None
    pattern: Pattern | None = None

    @property
    def kind(self) -> tuple[bool, bool, bool, bool, bool]:
        """The variant that a kernel is compiled for: whether the rule decays gradients, scales
        gradients, has a fixed mask, has a soft threshold, keeps a fraction of pruned weights."""
        return (
            self.pruned_gradient_decay != 0,
            self.pruned_gradient_factor != 1,
            self.mask is not None,
            self.soft_threshold_scale is not None,
            self.pruned_weight_factor != 0,
        )

    def then(self, after: Rule) -> Rule:
        """Join the gradient's part of this rule with the forward part of the next step's rule: a
        fused step edits the gradient by the rule before it, and projects by the rule after it."""
        return replace(
            after,
            pruned_gradient_decay=self.pruned_gradient_decay,
            pruned_gradient_factor=self.pruned_gradient_factor,
        )
