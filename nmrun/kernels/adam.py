"""One step of Adam and what a recipe does around it, in one pass over a weight: C on the CPU, Triton on CUDA devices.

Apart, SR-STE's decay, Adam and the projection move at least 52 bytes a weight through memory; Adam alone moves 28, and all of it together 36.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nmrun import kernels
from nmrun.patterns import Pattern

if TYPE_CHECKING:
    from nmrun.kernels.triton_adamw import FusedAdam


class Around(NamedTuple):
    """What a recipe does to one weight around an optimizer step, where it comes down to this (``nmrun.recipes.base.Recipe.around``).

    Before the step, to the gradients of pruned weights: ``decay`` times the weight is added (SR-STE), or else they are multiplied by
    ``spared``. Pruned is what ``mask`` (bool) does not hold or, without one, what the projection has changed. After the step the projection
    of the new weight is written: what ``mask`` holds; without one the N largest of every M of ``pattern``, the others kept ``factor`` times,
    or the soft threshold times ``scale`` (0-dimensional).
    """

    pattern: Pattern
    decay: float = 0.0
    spared: float = 1.0
    factor: float = 0.0
    scale: Tensor | None = None
    mask: Tensor | None = None

    @property
    def kind(self) -> tuple[bool, bool, bool, bool, bool]:
        """(decayed, spared, held, soft, fading): what kernels are compiled for."""
        return self.decay != 0, self.spared != 1, self.mask is not None, self.scale is not None, self.factor != 0


class WorkingCopy(NamedTuple):
    """Where the projection of a parameter goes, the dimension that its groups run along, and what is done."""

    projected: Tensor
    dim: int
    around: Around


class Operands(NamedTuple):
    """What a step reads and writes for one parameter; ``second`` is the second moment, or the constant denominator if ``frozen``."""

    weight: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    copy: WorkingCopy
    steps: float
    frozen: bool

    @property
    def all(self) -> list[Tensor]:
        return [self.weight, self.grad, self.first, self.second, self.copy.projected]


def takes(operands: Operands, fused: bool) -> bool:
    """Whether a kernel can do this step: float32 tensors stored alike, on the CPU for ``fused`` optimizers, whose bits it has."""
    weight, around = operands.weight, operands.copy.around
    by_triton = kernels.by_triton(weight, around.pattern)
    if not by_triton and not (fused and weight.is_cpu):
        return False
    numbers = [*operands.all, *([] if around.scale is None else [around.scale])]
    shaped = [*operands.all, *([] if around.mask is None else [around.mask])]
    if any(t.dtype != torch.float32 for t in numbers) or not kernels.stored_alike(*shaped):
        return False
    if any(t.data_ptr() % 16 or t.device != weight.device for t in [*shaped, *numbers]):
        return False
    from nmrun.kernels import cpu_adam  # here: it imports nmrun.sparsity

    return by_triton or cpu_adam.applies(operands)


def decoupled(group: dict[str, Any]) -> bool:
    """Whether a parameter group's weight decay is AdamW's."""
    return bool(group.get("decoupled_weight_decay", False))


def scalars(group: dict[str, Any], steps: float, around: Around) -> list[float]:
    """What the kernels need of a parameter group for step number ``steps`` (from 1), computed in double precision."""
    (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
    adam = [
        1 - lr * weight_decay, 0.0 if decoupled(group) else weight_decay, 1 - beta1, beta2, 1 - beta2,
        (1 - beta2**steps) ** 0.5, group["eps"], -lr / (1 - beta1**steps),
    ]  # fmt: skip
    return [*adam, around.decay, around.spared, around.factor]


class OnePass:
    """Steps in one pass, and what they need from one to the next."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], FusedAdam] = {}

    def step(self, group: dict[str, Any], parameters: Sequence[Operands]) -> None:
        """Update weights, moments and working copies. Gradients stay as they are."""
        alike: dict[tuple[Any, ...], list[Operands]] = {}  # what has the same scalars and the same kernel shares a launch
        for p in parameters:
            around = p.copy.around
            values = scalars(group, p.steps, around)
            if kernels.by_triton(p.weight, around.pattern):
                alike.setdefault((*values, p.frozen, around.kind), []).append(p)
            else:
                from nmrun.kernels import cpu_adam

                cpu_adam.step(p, values)
        for (*values, frozen, _), members in alike.items():
            self._launched(members).step(members, values, frozen)
        written = [t for p in parameters for t in p.all if t is not p.grad and not (p.frozen and t is p.second)]
        torch.autograd.graph.increment_version(written)  # autograd and the working copies go by versions

    def _launched(self, members: Sequence[Operands]) -> FusedAdam:
        from nmrun.kernels.triton_adamw import FusedAdam  # here: Triton is not everywhere

        key = tuple((id(p.weight), id(p.copy.projected), p.copy.around.pattern, p.copy.around.kind) for p in members)
        if key not in self._launches:
            if len(self._launches) > 64:  # patterns of structure decay, working copies that were replaced
                self._launches.clear()
            self._launches[key] = FusedAdam(members)
        return self._launches[key]
