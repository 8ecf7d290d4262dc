"""Bi-Mask: a second mask makes the input gradient N:M as well (Zhang et al. 2023, arXiv
2302.06058).

Forward and weight gradient are SR-STE's. The input gradient ``dX = dZ W`` sums over the outputs, so
there the forward weight is pruned once more, to N:M along the outputs. Which outputs share a group
is free: every ``interval`` steps the best of ``candidates`` random permutations is taken, the one
that loses fewest entries. Between, the mask alone follows the weight. 100 and 100 are the paper's;
its code for CNNs draws 10 unless told otherwise, and that for DeiT counts forward passes.

Cost: SR-STE's, and a mask a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from nmrun.kernels import cpu
from nmrun.products import layer
from nmrun.ranges import log, number, whole
from nmrun.recipes.base import Recipe, drawn_seed, generator_of
from nmrun.rule import Rule
from nmrun.sparsity.projections import keep_largest
from nmrun.sparsity.weight import SparseWeight


@dataclass
class BiMask(Recipe):
    """SR-STE with a second mask for the input gradient.

    When to use: where the product that gives the input gradient has to be sparse too. It was
    compared on the digits alone.

    Args:
        decay: the decay of pruned weights, as SR-STE's.
        interval: optimizer steps between searches for a permutation.
        candidates: permutations that a search draws, other ones for each seed.

    Grouped convolutions and what ``layer.install`` leaves alone keep the exact input gradient.
    """

    name: ClassVar[str] = "bi_mask"
    title: ClassVar[str] = "Bi-Mask"

    decay: Annotated[float, number(0), log(1e-6, 1e-2)] = 2e-4
    interval: Annotated[int, whole(1)] = 100
    candidates: Annotated[int, whole(1)] = 100
    seed: int = field(init=False, repr=False, default=0)  # drawn by :meth:`attach`

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        # each group of a grouped convolution has outputs of its own
        grouped = [w for w in weights if getattr(w.module, "groups", 1) > 1]
        exact = [w.name for w in grouped]
        exact += layer.install([w for w in weights if w not in grouped])
        for weight in (w for w in weights if w.name not in exact):
            order = torch.arange(len(_rows(weight.dense, weight)), device=weight.dense.device)
            weight["permutation"] = order.view(torch.uint8)  # bytes survive a cast to floats
            weight.layer.keep_input_weight()
            weight.dependents.append(self._prune_rows)
        if exact:
            self.say(f"Bi-Mask leaves the input gradient exact at {', '.join(exact)}")
        self.seed = drawn_seed()
        self._search(weights)

    @property
    def looks_across_rows(self) -> bool:
        return True

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pruned_gradient_decay=self.decay)

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step % self.interval == 0:
            self._search(weights)

    def _prune_rows(self, weight: SparseWeight) -> None:
        order, input_weight = _order(weight), weight.layer.keep_input_weight()
        used, pattern = weight.weight, weight.pattern
        if weight.outputs == 0 and cpu.project_rows(used, input_weight, pattern, order):
            return
        permuted = _rows(used, weight)[order]
        pruned = torch.empty_like(permuted)
        keep_largest(permuted, pruned, pattern, 0)
        places = order.argsort()[: input_weight.shape[weight.outputs]]
        rows = pruned.movedim(0, weight.outputs)
        torch.index_select(rows, weight.outputs, places, out=input_weight)

    @torch.no_grad()
    def _search(self, weights: Sequence[SparseWeight]) -> None:
        for place, weight in enumerate(weights):
            if "permutation" not in weight:
                continue
            used = torch.empty_like(weight.dense)
            self.project(weight, used)
            order, rows, pattern = _order(weight), _rows(used != 0, weight), weight.pattern
            generator = generator_of(self.seed, place, self.step)
            permutations = [
                torch.randperm(len(order), generator=generator, device="cpu").to(order.device)
                for _ in range(self.candidates)
            ]
            groups = (rows[p].unflatten(0, (-1, pattern.m)) for p in permutations)
            # any N of the non-zeros of a group stay
            entries = torch.stack([g.sum(1).clamp_max(pattern.n).sum() for g in groups]).tolist()
            order.copy_(permutations[entries.index(max(entries))])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def _order(weight: SparseWeight) -> Tensor:
    return weight["permutation"].view(torch.int64)


def _rows(values: Tensor, weight: SparseWeight) -> Tensor:
    """Values of the weight's shape with its outputs in front, filled up to whole groups."""
    rows = values.detach().movedim(weight.outputs, 0)
    missing = rows.new_zeros(-len(rows) % weight.pattern.m, *rows.shape[1:])
    return torch.cat([rows, missing])
