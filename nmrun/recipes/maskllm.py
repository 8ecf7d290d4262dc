"""MaskLLM: frozen weights, learnable masks (Fang et al. 2024, arXiv 2409.17481, NeurIPS 2024).

Each group has a logit for every possible mask. Forward ``w * (softmax((kappa * logits + Gumbel noise) / temperature) @ candidates)``; kappa
rises and the temperature falls, linearly, until a blend of masks is one mask. The loss has ``- reg * ||w * mask||^2`` added. All weights
are frozen from ``dense`` of the steps on; the last step leaves the likeliest mask. When to use: a trained network and little data.
Cost: C / M logits a weight, C = (M over N), with optimizer state; a softmax and three products of (weights / M, M) by (M, C) a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.recipes.scored import ScoredMasks
from nmrun.sparsity.candidates import by_group, candidates, gumbel_softmax, softmax_gradient
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import Projection, SparseWeight

Span = Sequence[float]


class MaskLLM(ScoredMasks):
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
        self.dense_forward, self.dense_steps = True, total_steps

    @property
    def is_sparse(self) -> bool:
        return self.step >= self.ends

    def _at(self, span: Span) -> float:
        return span[0] + (span[1] - span[0]) * (self.step - self.begins) / max(1, self.ends - 1 - self.begins)

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        def first(weight: SparseWeight, shape: tuple[int, ...]) -> Tensor:
            weight.projection.register_buffer("soft", weight.dense.detach().new_zeros(shape), persistent=False)
            return 0.01 * torch.randn(shape, dtype=weight.dense.dtype, device=weight.dense.device)

        self.place = {weight.name: number for number, weight in enumerate(weights)}
        self.score(weights, optimizer, first, lr=float(optimizer.param_groups[0]["lr"]) * self.lr_mult)
        self.after_step(weights, optimizer)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.step != self.begins:
            return
        for weight in weights:
            kept = nm_mask(by_group(weight.dense, weight.pattern, weight.dim), weight.pattern, -1)
            logits, options = self.scores(weight), candidates(weight.pattern, weight.dense)
            logits.add_(self.prior * logits.std() * (kept.to(options.dtype) @ options.T - weight.pattern.n / 2))
        self.dense_forward = False
        self.events.append(f"step {self.step}: MaskLLM freezes the weights and begins to learn masks")

    def project(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.is_sparse:
            return self.final(projection, dense, out)
        seed = self.seed + 10007 * self.step + self.place[projection.name]  # so that a resumed run draws the same
        logits, soft = self._at(self.kappa) * projection.get_parameter("scores").detach(), projection.get_buffer("soft")
        soft.copy_(gumbel_softmax(logits, self._at(self.temperature), seed))
        torch.mul(dense, self.mask(projection, soft @ candidates(projection.pattern, dense), dense.shape), out=out)

    def final(self, projection: Projection, dense: Tensor, out: Tensor) -> None:
        if self.dense_forward:
            return super().final(projection, dense, out)
        self.keep_best(projection, dense, out, projection.get_parameter("scores"))

    @torch.no_grad()
    def edit_gradients(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        if self.dense_forward:
            return
        gradients = [weight.dense.grad for weight in weights]
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.grad = None  # frozen: an optimizer passes over it
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                soft, w = weight.projection.get_buffer("soft"), weight.dense
                blend = self.mask(weight.projection, soft @ candidates(weight.pattern, soft), w.shape)
                of_mask = self.of_candidates(weight, gradient * w - 2 * self.reg * w.square() * blend)
                scale = self._at(self.kappa) / self._at(self.temperature)
                self.scores(weight).grad = scale * softmax_gradient(soft, of_mask)
