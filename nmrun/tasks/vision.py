"""Classification of images that are held in memory, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.tasks.base import Batch

EVALUATED_AT_ONCE = 1024  # images; bounds the memory of an evaluation


class Classification:
    """Cross entropy over classes; see :class:`nmrun.tasks.base.Task`.

    Each epoch is a fresh permutation of the training images, a pure function of (seed, epoch). A last batch that would be
    smaller than ``batch_size`` is left out; which images that hits changes from epoch to epoch.
    """

    metric = "accuracy"

    def __init__(
        self,
        splits: dict[str, tuple[Tensor, Tensor]],
        classes: int,
        batch_size: int,
        seed: int,
        label_smoothing: float = 0.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.splits = {name: (images.to(device), labels.to(device)) for name, (images, labels) in splits.items()}
        self.images, self.labels = self.splits["train"]
        self.inputs = {"shape": tuple(self.images.shape[1:]), "classes": classes}
        self.batch_size, self.seed, self.label_smoothing = batch_size, seed, label_smoothing
        if batch_size > len(self.images):
            raise ConfigError(f"trainer.batch_size={batch_size}: there are only {len(self.images)} training images")
        self.batches_per_epoch = min(len(self.images) // batch_size, limit_batches or len(self.images))
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    @classmethod
    def of(cls, config: Any, splits: dict[str, tuple[Tensor, Tensor]], classes: int, device: torch.device) -> Classification:
        """With batch size, seed, smoothing and limits of a run's config (``nmrun.schema.Config``)."""
        keys = ("batch_size", "label_smoothing", "limit_batches")
        return cls(splits, classes, seed=config.seed, device=device, **{key: config.trainer[key] for key in keys})

    def micro_batches(self, epoch: int, index: int, parts: int) -> list[Batch]:
        if self._order[0] != epoch:
            # torch's CPU generator looks at the low 32 bits of a seed only, so the pair must be mixed into them
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
            self._order = (epoch, torch.randperm(len(self.images), generator=generator).to(self.images.device))
        chosen = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        return [(self.images[part], self.labels[part]) for part in chosen.chunk(parts)]

    def size(self, batch: Batch) -> int:
        return len(batch[0])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images).float(), labels, label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        images, labels = self.splits[split]
        loss = torch.zeros((), dtype=torch.float64, device=images.device)
        right = torch.zeros((), dtype=torch.int64, device=images.device)
        for some, truth in zip(images.split(EVALUATED_AT_ONCE), labels.split(EVALUATED_AT_ONCE), strict=True):
            logits = model(some).float()
            loss += functional.cross_entropy(logits, truth, reduction="sum")
            right += (logits.argmax(1) == truth).sum()
        return {"loss": float(loss) / len(labels), "accuracy": float(right) / len(labels)}

    def example(self) -> Batch:
        return self.images[:2], self.labels[:2]
