"""MaskLLM: frozen weights, learnable masks (Fang et al. 2024, arXiv 2409.17481, NeurIPS 2024).

Each group has a logit for every possible mask. Forward ``w * (softmax((kappa * logits + Gumbel
noise) / temperature) @ candidates)``; kappa rises and the temperature falls, linearly, until a
blend of masks is one mask. At iteration it of the n that learn masks, the loss has
``- reg * (1 - it / n) * ||w * mask||^2`` added, as in the authors' code. All weights are frozen from
``dense`` of the steps on. Evaluation is by the likeliest masks, which the last step leaves.

Cost: C / M logits a weight, C = (M over N), with optimizer state; a softmax and three products of
(weights / M, M) by (M, C) a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmrun.errors import ConfigError, refused
from nmrun.ranges import FRACTION, SPAN, WEIGHTS, number
from nmrun.recipes.base import drawn_seed
from nmrun.recipes.parameters import FrozenWeights, MaskScores, candidates
from nmrun.sparsity.layers import plain_name
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.reference import by_group
from nmrun.sparsity.weight import SparseWeight

Span = Sequence[float]


@dataclass
class MaskLLM(MaskScores, FrozenWeights):
    """Learned masks for a network whose weights are frozen.

    When to use: a trained network whose weights should stay. SparseGPT does as well at 2:4, in a
    tenth of the time.

    Args:
        kappa: factor of the logits, one for each mask of a group, at the start and at the end.
        temperature: that of the softmax over a group's masks, at the start and at the end.
        prior: how much logits start out preferring large weights, or those that ``masks`` keeps.
        masks: the folder of a finished N:M run of the same network, such as that of nmrun prune,
            or a .safetensors file of its parameters; null: the masks of the largest weights.
        reg: the weight of a bonus in the loss, the sum of squares that the masks keep. It falls to 0,
            linearly.
        lr_mult: the learning rate of the logits, over that of the first parameter group.
        dense: fraction of all steps trained first; 0 for a model that comes trained.
    """

    name: ClassVar[str] = "maskllm"
    title: ClassVar[str] = "MaskLLM"
    needs_total_steps: ClassVar[str] = "kappa and temperature change over the run"

    kappa: Annotated[Span, SPAN] = (100.0, 500.0)
    temperature: Annotated[Span, SPAN] = (4.0, 0.05)
    prior: Annotated[float, number(0)] = 3.0
    masks: Annotated[str | None, WEIGHTS] = None
    reg: Annotated[float, number(0)] = 1e-5
    lr_mult: Annotated[float, number(0, open_low=True)] = 10.0
    dense: Annotated[float, FRACTION] = 0.5
    seed: int = field(init=False, repr=False, default=0)  # drawn by :meth:`attach`

    @property
    def path(self) -> Path | None:
        """The file of the masks to begin with, if there is one: ``masks``, or its folder's."""
        if self.masks is None:
            return None
        path = Path(os.path.expanduser(self.masks))
        return path if path.is_file() else path / "model.safetensors"

    def _value(self, span: Span) -> float:
        passed = (self.step - self.begins) / max(1, self.ends - 1 - self.begins)
        return span[0] + (span[1] - span[0]) * passed

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        def first(weight: SparseWeight, shape: tuple[int, ...]) -> Tensor:
            like = weight.dense
            generator = torch.Generator(like.device).manual_seed(
                self.seed + self.place[weight.name]
            )
            return 0.01 * torch.randn(
                shape, generator=generator, dtype=like.dtype, device=like.device
            )

        self.seed = drawn_seed()
        self.soft: dict[str, Tensor] = {}  # the blend of masks that the forward pass uses
        self.place = {weight.name: number for number, weight in enumerate(weights)}
        if (path := self.path) is not None:  # read when the dense phase ends; mistakes are told now
            for weight in weights:
                masks_in(path, weight)
        self.score(weights, optimizer, first, lr_mult=self.lr_mult)
        self._begin_masks(weights)

    @torch.no_grad()
    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        self.check_frozen(optimizer)
        self.part(optimizer)
        self._begin_masks(weights)

    @torch.no_grad()
    def _begin_masks(self, weights: Sequence[SparseWeight]) -> None:
        """Freeze the weights, at the step that is the time for it."""
        if self.step != self.begins:
            return
        for weight in weights:
            logits = self.scores(weight)
            likeness = agreement(self.path, weight)
            if logits.numel() > 1:  # else it is one group with one mask
                logits.add_(self.prior * logits.std() * likeness)
        self.dense_forward = False
        self.say("MaskLLM freezes the weights and begins to learn masks", "phase")

    def project(self, weight: SparseWeight, out: Tensor) -> None:
        if self.is_sparse:
            return self.project_final(weight, out)
        soft = self._blend(weight)
        self.soft[weight.name] = soft
        options = candidates(weight.pattern, weight.dense)
        torch.mul(weight.dense, self.mask(weight, soft @ options), out=out)

    def _blend(self, weight: SparseWeight) -> Tensor:
        # the seed is a function of the step, so that a resumed run draws the same
        seed = self.seed + 10007 * self.step + self.place[weight.name]
        logits = self._value(self.kappa) * self.scores(weight).detach()
        return gumbel_softmax(logits, self._value(self.temperature), seed)

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        if self.dense_forward:
            return self.largest(weight, out)
        self.keep(weight, out, self.scores(weight).detach().argmax(-1))

    @torch.no_grad()
    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        if self.dense_forward:
            return
        gradients = [weight.grad for weight in weights]
        self.join(optimizer)
        self.freeze(optimizer, but=self.parameters.values())
        if self.is_sparse:
            return
        scale = self._value(self.kappa) / self._value(self.temperature)
        bonus = self.reg * (self.ends - self.step) / (self.ends - self.begins)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                soft, w = self.soft[weight.name], weight.dense
                blend = self.mask(weight, soft @ candidates(weight.pattern, soft))
                of_weights = gradient * w - 2 * bonus * w.square() * blend
                of_mask = self.of_candidates(weight, of_weights)
                self.scores(weight).grad = scale * softmax_gradient(soft, of_mask)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def agreement(path: Path | None, weight: SparseWeight) -> Tensor:
    """How many entries every candidate shares with the masks to begin with, less N / 2: (groups,
    C). Those are of the largest weights, or of a file."""
    if path is None:
        groups = by_group(weight.dense, weight.pattern, weight.dim)
        masks = nm_mask(groups, weight.pattern, -1)
    else:
        masks = masks_in(path, weight)
    options = candidates(weight.pattern, weight.dense)
    return masks.to(options.dtype) @ options.T - weight.pattern.n / 2


def masks_in(path: Path, weight: SparseWeight) -> Tensor:
    """Which of a weight's entries are not zero in a file: ones and zeros by group. Raises
    ConfigError where it cannot be read, or has no such parameter that is N:M."""
    with (
        refused(f"masks={path}: it cannot be read: ", OSError, SafetensorError),
        safe_open(path, "pt") as opened,
    ):
        keys = opened.keys()
        name = {plain_name(key): key for key in keys}.get(plain_name(weight.name))
        saved = None if name is None else opened.get_tensor(name)
    if saved is None or saved.shape != weight.dense.shape:
        shape = "missing" if saved is None else list(saved.shape)
        raise ConfigError(
            f"masks={path} is of another network: {weight.name} is {shape} there and "
            f"{list(weight.dense.shape)} here"
        )
    masks = by_group((saved != 0).to(weight.dense), weight.pattern, weight.dim)
    most = int(masks.sum(-1).max())
    if most > weight.pattern.n:
        raise ConfigError(
            f"masks={path}: {weight.name} is not {weight.pattern} there: it keeps {most} of a group"
        )
    return masks


def gumbel_softmax(logits: Tensor, temperature: float, seed: int) -> Tensor:
    """``softmax((logits + noise) / temperature)`` over the last dimension, with Gumbel noise of the
    seed (Jang et al. 2017)."""
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    return torch.softmax((logits + noise) / temperature, -1)


def softmax_gradient(soft: Tensor, gradient: Tensor) -> Tensor:
    """The gradient at the argument of a softmax over the last dimension, from its result and the
    gradient there."""
    return soft * (gradient - (soft * gradient).sum(-1, keepdim=True))
