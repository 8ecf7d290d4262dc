"""ASP: train dense, prune once by magnitude, train on with the mask fixed (Mishra et al. 2021,
arXiv 2104.08378, and NVIDIA's apex).

Apex prunes a trained network and repeats the whole training. Here one run holds both: ``prune_at``
of the steps are dense, the rest train with the fixed mask, and all recipes get the same number of
steps. The optimizer keeps its state, and the learning rate its schedule (on the command line
``schedule.cycles=2`` begins it anew). ``prune_at=0`` prunes at once, for a model that comes
trained. Pruned weights are 0 after every step, as in apex.

Cost: one mask byte a weight, one pass for the masked copy, one for the gradient, one for the zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from nmrun.patterns import Pattern
from nmrun.permutation.channels import Channels, input_channels
from nmrun.permutation.permute import permute_inputs
from nmrun.ranges import FLAG, FRACTION, between
from nmrun.recipes.base import Recipe, keep_mask
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class ASP(Recipe):
    """Dense training, one pruning by magnitude, then training with the mask fixed.

    When to use: fine-tuning a trained network at 2:4 in a hundred steps, as the simplest recipe.
    Retraining a language model that SparseGPT pruned, with a dense teacher. Not in fine-tuning at 1:16.

    Args:
        prune_at: the fraction of all steps that is trained densely first.
        permute: before pruning, reorder channels so that the masks keep more
            (:mod:`nmrun.permutation.permute`). Copies of the model (EMA) are then made after it.
    """

    name: ClassVar[str] = "asp"
    title: ClassVar[str] = "ASP"
    masks_are_largest: ClassVar[bool] = True

    prune_at: Annotated[float, FRACTION, between(0.0, 0.8)] = 0.5
    permute: Annotated[bool, FLAG] = False

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        super().begin(pattern, total_steps)
        steps = self.need_total_steps("prune_at=0 prunes at once") if self.prune_at else 0
        self.prune_step = self.dense_steps = round(self.prune_at * steps)
        self.dense_forward = True
        self.channels: dict[str, Channels] = {}

    @property
    def looks_across_rows(self) -> bool:
        return self.transposable or self.permute

    def check_blocks(self, pattern: Pattern) -> None:
        super().check_blocks(pattern)
        if self.permute:
            pattern.without_blocks("asp: permute=true")

    def prepare(self, model: nn.Module) -> None:
        if self.permute:
            try:
                self.channels = input_channels(model)
            except ValueError as error:
                self.say(f"no channels will be permuted: {error}")

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.after_step(weights, optimizer)  # with prune_at=0 it is time

    def rule(self, weight: SparseWeight) -> Rule:
        if self.dense_forward:  # asked for ahead of the pruning, for a plan of the run
            return Rule(pruned_gradient_factor=0.0)
        return Rule(mask=weight["mask"], pruned_gradient_factor=0.0)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if not self.dense_forward:
            for weight in weights:
                # momentum has moved pruned weights: they return to 0, as in apex, which leaves the
                # projection as it is
                with torch.autograd.grad_mode._unsafe_preserve_version_counter(weight.dense):
                    weight.dense.mul_(weight["mask"])
        if self.step != self.prune_step or not self.dense_forward:
            return
        for sentence in permute_inputs(weights, self.channels, optimizer, self.reordered):
            self.say(sentence, "permutation")
        for weight in weights:
            keep_mask(weight, self.choose(weight))
            weight.dense.masked_fill_(~weight["mask"], 0.0)
        self.dense_forward = False
        self.say(
            f"ASP pruned once by magnitude to {self.pattern}; the mask is fixed from here on",
            "phase",
        )
