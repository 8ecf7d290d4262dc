"""What one optimizer step does to one sparse weight, as data: nearly every paper fits one equation for
the gradient and one for the forward weight.

A recipe states it once. Torch (``nmrun.sparsity.projections``), C and Triton (``nmrun.kernels``) carry
it out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor

from nmrun.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """What one optimizer step does to one sparse weight, as data. The default is STE: the N largest of
    every M are kept, and the gradient passes unchanged.

    Let w be the dense weight, m its mask (1 = kept) and g the gradient at the forward weight::

        gradient   g * (m + (1 - m) * pruned_gradient_factor) + pruned_gradient_decay * (1 - m) * w
        forward    w * (m + (1 - m) * pruned_weight_factor)    or    scale * soft_threshold(w)

    Args:
        pruned_gradient_decay: SR-STE's lambda. Not together with ``pruned_gradient_factor``,
            ``pruned_weight_factor`` or ``soft_threshold_scale``.
        pruned_gradient_factor: 1 leaves the gradients of pruned weights, 0 masks them. Without a
            fixed ``mask`` a pruned weight that is exactly 0 counts as kept.
        pruned_weight_factor: MdGf's D; 0 prunes.
        soft_threshold_scale: 0-dimensional; the forward weight is then the soft threshold times
            this scale (S-STE's beta). None: the hard threshold.
        soft_threshold_gamma: where the soft threshold lies between the (N+1)-th largest magnitude
            (0, S-STE's) and the N-th (1).
        mask: a fixed mask: bool, shape of the weight, True = kept. None: the N largest of every M,
            chosen anew after every step.
        pattern: the pattern of this step. None: the weight's own. Structure decay has others.

    Raises:
        ValueError: for a decay of gradients together with a factor or a soft threshold.
    """

    pruned_gradient_decay: float = 0.0
    pruned_gradient_factor: float = 1.0
    pruned_weight_factor: float = 0.0
    soft_threshold_scale: Tensor | None = None
    soft_threshold_gamma: float = 0.0
    mask: Tensor | None = None
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        if self.pruned_gradient_decay and self.pruned_gradient_factor != 1:
            raise ValueError(
                "a rule has pruned_gradient_decay or pruned_gradient_factor, not both: edit_gradient "
                "of a recipe can do anything else"
            )
        # the decayed part is what the projection took away, which is (1 - m) * w for 0 alone
        keeps_some = self.pruned_weight_factor or self.soft_threshold_scale is not None
        if self.pruned_gradient_decay and keeps_some:
            raise ValueError(
                "a rule has pruned_gradient_decay only where pruned weights become 0, without "
                "pruned_weight_factor and soft_threshold_scale: edit_gradient of a recipe can do "
                "anything else"
            )

    @property
    def kind(self) -> tuple[bool, bool, bool, bool, bool]:
        """The variant that a kernel is compiled for: whether the rule decays gradients, scales them,
        has a fixed mask, has a soft threshold, and keeps a fraction of pruned weights."""
        return (
            self.pruned_gradient_decay != 0,
            self.pruned_gradient_factor != 1,
            self.mask is not None,
            self.soft_threshold_scale is not None,
            self.pruned_weight_factor != 0,
        )

    def projects_as(self, other: Rule) -> bool:
        """Whether both have the same forward part: the same numbers, and the very same tensors."""
        return (
            self.mask is other.mask
            and self.soft_threshold_scale is other.soft_threshold_scale
            and self.soft_threshold_gamma == other.soft_threshold_gamma
            and self.pruned_weight_factor == other.pruned_weight_factor
            and self.pattern == other.pattern
        )

    def then(self, after: Rule) -> Rule:
        """The rule of a fused step, which edits the gradient by the rule before it and projects by the
        rule after it: this rule's gradient part with the forward part of ``after``."""
        fused = copy.copy(after)  # unchecked: what is refused in one rule may follow in two
        for part in ("pruned_gradient_decay", "pruned_gradient_factor"):
            object.__setattr__(fused, part, getattr(self, part))
        return fused
