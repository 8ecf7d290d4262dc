"""SQFT's SparsePEFT: low-rank adapters that are merged and stay N:M (Munoz et al. 2024, arXiv
2410.03750, section 3.2).

A pruned weight w0 stays, and so does its mask m. Trained are the adapters B (outputs, rank) and A
(rank, inputs), whose product is masked: ``w = w0 + m * (alpha / rank) * B A``. So w is N:M at every
moment. A convolution's inputs are its channels at each kernel position. Let g be the weight's
gradient and ``g' = (alpha / rank) * m * g``. Then B has the gradient ``g' A^T`` and A has ``B^T
g'``. B begins as 0 and A uniform, drawn anew for each seed. Not here: the paper's search for ranks,
and quantisation.

Cost: w0 and a mask byte a weight; no moments of the optimizer but those of the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.ranges import among, number, whole
from nmrun.recipes.base import drawn_seed, generator_of, keep_mask
from nmrun.recipes.parameters import AddedParameters
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class SQFT(AddedParameters):
    """Masked low-rank adapters on a pruned network, whose weights stay.

    When to use: fine-tuning a pruned network with few trained parameters.

    Args:
        rank: the adapters' rank.
        alpha: the adapters' product is multiplied by ``alpha / rank``.
    """

    name: ClassVar[str] = "sqft"
    title: ClassVar[str] = "SQFT"
    masks_are_largest: ClassVar[bool] = True

    rank: Annotated[int, whole(1), among(8, 16, 32, 64)] = 32
    alpha: Annotated[float, number(0, open_low=True)] = 64.0

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            keep_mask(weight, self.choose(weight))
            weight.dense.masked_fill_(~weight["mask"], 0.0)
            weight["base"] = weight.dense.clone()
        self._versions: dict[str, tuple[Tensor, int]] = {}  # as the last step wrote them
        seed, place = drawn_seed(), {w.name: number for number, w in enumerate(weights)}

        def first(weight: SparseWeight) -> dict[str, Tensor]:
            outputs, inputs = _matrix(weight, weight.dense).shape
            generator = generator_of(seed, place[weight.name])
            down = torch.empty(self.rank, inputs, device="cpu").uniform_(-1, 1, generator=generator)
            up = weight.dense.new_zeros(outputs, self.rank)
            return {"up": up, "down": (down * inputs**-0.5).to(up)}

        self.add(weights, optimizer, first)

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(mask=weight["mask"], pruned_gradient_factor=0.0)

    def _product(self, weight: SparseWeight) -> Tensor:
        up, down = (self.parameter(weight, key).detach() for key in ("up", "down"))
        sides = weight.dense.movedim(weight.outputs, 0).shape
        product = (self.alpha / self.rank * (up @ down)).reshape(sides).movedim(0, weight.outputs)
        return product * weight["mask"]

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        self.join(optimizer)
        for weight in weights:
            tensor, version = self._versions.get(weight.name, (None, 0))
            # another tensor was loaded or taken over, or this one was written
            if tensor is not weight.dense or version != weight.dense._version:
                product = self._product(weight)
                if not torch.equal(weight.dense, weight["base"] + product):
                    weight["base"].copy_(weight.dense * weight["mask"] - product)
            if weight.grad is not None:
                gradient = self.alpha / self.rank * _matrix(weight, weight.grad * weight["mask"])
                up, down = (self.parameter(weight, key) for key in ("up", "down"))
                up.grad, down.grad = gradient @ down.t(), up.t() @ gradient
                weight.parameter.grad = None  # the optimizer passes over it

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.part(optimizer)
        for weight in weights:
            dense = torch.add(weight["base"], self._product(weight), out=weight.dense)
            self._versions[weight.name] = dense, dense._version


def _matrix(weight: SparseWeight, tensor: Tensor) -> Tensor:
    """A tensor of the weight's shape as (outputs, inputs); a kernel's positions are inputs."""
    return tensor.movedim(weight.outputs, 0).flatten(1)
