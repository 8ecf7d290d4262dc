"""MaskLLM: frozen weights, learnable masks (Fang et al. 2024, arXiv 2409.17481, NeurIPS 2024).

Each group has a logit for every possible mask. Forward ``w * (softmax((kappa * logits + Gumbel noise) / temperature) @ candidates)``; kappa
rises and the temperature falls, linearly, until a blend of masks is one mask. The loss has ``- reg * ||w * mask||^2`` added. All weights
are frozen from ``dense`` of the steps on; the last step leaves the likeliest mask. When to use: a trained network and little data.
Cost: C / M logits a weight, C = (M over N), with optimizer state; a softmax and three products of (weights / M, M) by (M, C) a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity import candidates as of_group
from nmrun.sparsity.attach import Projection, SparseWeight
from nmrun.sparsity.candidates import by_group, candidates, from_groups
from nmrun.sparsity.masks import nm_mask

Span = Sequence[float]


class MaskLLM(Recipe):
    """``kappa`` (100 to 500), ``temperature`` (4 to 0.05): from start to end. ``prior``: how much logits start out preferring large weights (3).
    ``reg``: 1e-5. ``lr_mult``: of the logits (10). ``dense``: fraction of all steps trained first (0.5; 0 for a model that comes trained).
    """

    name: ClassVar[str] = "maskllm"

    def __init__(
        self, pattern: Pattern, total_steps: int | None = None, *, kappa: Span = (1e2, 5e2), temperature: Span = (4.0, 0.05),
        prior: float = 3.0, reg: float = 1e-5, lr_mult: float = 10.0, dense: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__(pattern, total_steps)
        if total_steps is None:
            raise ValueError("maskllm needs total_steps: kappa and temperature change over the run")
        if not (0 <= dense < 1 and min(*kappa, *temperature, lr_mult) > 0):
            raise ValueError("maskllm: kappa, temperature and lr_mult must be above 0, and 0 <= dense < 1")
        self.kappa, self.temperature, self.prior, self.reg, self.lr_mult = kappa, temperature, prior, reg, lr_mult
        self.begins, self.ends = round(dense * total_steps), total_steps
        self.seed, self.dense_forward, self.dense_steps = 0, True, total_steps

    def refuses(self, shape: Sequence[int], dim: int, pattern: Pattern) -> str:
        return of_group.too_many(pattern)

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    def _at(self, span: Span) -> float:
        return span[0] + (span[1] - span[0]) * (self.step - self.begins) / max(1, self.ends - 1 - self.begins)

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.seed, self.place = int(torch.randint(2**31, ())), {weight.name: i for i, weight in enumerate(weights)}
        for weight in weights:
            groups = by_group(weight.dense, weight.pattern, weight.dim)
            logits = nn.Parameter(0.01 * torch.randn_like(groups @ candidates(weight.pattern, groups).T))
            weight.projection.register_parameter("logits", logits)
            weight.projection.register_buffer("soft", torch.zeros_like(logits, requires_grad=False), persistent=False)
        every = [weight.projection.get_parameter("logits") for weight in weights]
        optimizer.add_param_group({"params": every, "lr": float(optimizer.param_groups[0]["lr"]) * self.lr_mult})
        self.after_step(weights, optimizer)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step != self.begins:
            return
        for weight in weights:
            logits = weight.projection.get_parameter("logits")
            kept = by_group(nm_mask(weight.dense, weight.pattern, weight.dim).to(logits.dtype), weight.pattern, weight.dim)
            agreement = kept @ candidates(weight.pattern, logits).T - weight.pattern.n / 2
            logits.add_(self.prior * logits.std() * agreement)
        self.dense_forward = False
        self.events.append(f"step {self.step}: MaskLLM freezes the weights and begins to learn masks")

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.is_sparse:
            return self.final(projection, dense, out)
        seed = self.seed + 10007 * self.step + self.place[projection.name]  # so that a resumed run draws the same
        logits, soft = self._at(self.kappa) * projection.get_parameter("logits").detach(), projection.get_buffer("soft")
        soft.copy_(of_group.gumbel_softmax(logits, self._at(self.temperature), seed))
        torch.mul(dense, from_groups(soft @ candidates(projection.pattern, dense), dense.shape, projection.dim), out=out)

    def final(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.dense_forward:
            return super().final(projection, dense, out)
        best = candidates(projection.pattern, dense)[projection.get_parameter("logits").argmax(-1)]
        torch.mul(dense, from_groups(best, dense.shape, projection.dim), out=out)

    @torch.no_grad()
    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.dense_forward:
            return
        gradients = [weight.dense.grad for weight in weights]
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.grad = None  # frozen: an optimizer passes over it
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                soft, scale = weight.projection.get_buffer("soft"), self._at(self.kappa) / self._at(self.temperature)
                w, g = (by_group(t, weight.pattern, weight.dim) for t in (weight.dense, gradient))
                options = candidates(weight.pattern, soft)
                of_mask = g * w - 2 * self.reg * w.square() * (soft @ options)
                weight.projection.get_parameter("logits").grad = scale * of_group.softmax_gradient(soft, of_mask @ options.T)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])
