"""What a recipe may do around a step of Adam, once more, by the functions for users: for the tests of the kernels that do it in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels.adam import Around, WorkingCopy
from nmrun.patterns import Pattern
from nmrun.sparsity import nm_mask, soft_threshold

# what a recipe may do around a step: hyperparameters of Around; a mask is held where there is one
KINDS: dict[str, dict[str, float | bool]] = {
    "nothing": {},
    "decayed": {"decay": 0.02},
    "decayed, held": {"decay": 0.02, "mask": True},
    "masked, held": {"spared": 0.0, "mask": True},
    "soft": {"scale": 1.3},
    "fading": {"spared": 0.3, "factor": 0.25},
}


def working_copy(kind: str, weight: Tensor, pattern: Pattern, dim: int) -> WorkingCopy:
    """As it is before a step: faded by another factor than after it."""
    options = dict(KINDS[kind])
    mask = nm_mask(torch.randn_like(weight), pattern, dim) if "mask" in options else None
    scale = torch.tensor(options["scale"], device=weight.device) if "scale" in options else None
    around = Around(pattern, **{**options, "mask": mask, "scale": scale})
    return WorkingCopy(projection(weight, around._replace(factor=0.3 if around.factor else 0.0), dim), dim, around)


def pruned(weight: Tensor, around: Around, dim: int) -> Tensor:
    return ~(nm_mask(weight, around.pattern, dim) if around.mask is None else around.mask)


def projection(weight: Tensor, around: Around, dim: int) -> Tensor:
    """The projection, by the functions for users."""
    if around.scale is not None:
        return soft_threshold(weight, around.pattern, dim) * around.scale
    if around.mask is not None:
        return weight * around.mask
    return torch.where(pruned(weight, around, dim), weight * around.factor, weight) + 0.0


def edited(grad: Tensor, weight: Tensor, around: Around, dim: int) -> Tensor:
    """The gradient that Adam sees."""
    return torch.where(pruned(weight, around, dim), around.spared * grad + around.decay * weight, grad)
