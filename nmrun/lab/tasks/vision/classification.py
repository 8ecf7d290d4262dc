"""Classification of images that are held in memory, on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab.tasks.base import (
    Batch,
    Categorical,
    ItemBatches,
    Tally,
    as_logits,
    epoch_order,
    generator,
    limited,
    sent,
    settings,
    shared,
    thinned,
)
from nmrun.lab.tasks.vision.augmentation import Augment, Share

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

PIXELS_AT_ONCE = 2**20  # of an evaluation; bounds its memory


class Classification(ItemBatches, Categorical):
    """Cross entropy over classes of images that are held in memory, on the device.

    Images in uint8 are normalised by mean and standard deviation of each channel over the training
    images, batch by batch, and the training images augmented. Each epoch is a fresh permutation of
    the training images, a pure function of (seed, epoch), and augmentation one of (seed, epoch,
    index). A last smaller batch is left out; which images that hits changes from epoch to epoch.

    ``splits`` are images (N, C, H, W) and labels (N,). ``signature`` says how an image becomes what
    the network takes. Its ``input`` has ``shape`` and, of pixels in ``range``, the ``mean`` and
    ``std`` of each channel: the network's input is ``(pixel - mean) / std``. Its ``classes`` are
    their names, in the order of the logits. ``prepared`` adds to ``input``, such as ``resize``;
    images that come as floats say nothing else of pixels.
    """

    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        splits: dict[str, tuple[Tensor, Tensor]],
        classes: int,
        batch_size: int,
        seed: int,
        label_smoothing: float = 0.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
        augment: Augment | None = None,
        about: str = "",
        names: Sequence[str] = (),
        prepared: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        for name, (images, labels) in splits.items():
            check_labelled(name, images, labels, classes)
        self.normalise = Normalise.of(splits["train"][0], device)
        self.splits = {
            name: (images.to(device), labels.to(device))
            for name, (images, labels) in splits.items()
        }
        self.images, self.labels = self.splits["train"]
        self.has_test = "test" in splits
        self.classes = classes
        self.inputs: dict[str, Any] = {"shape": tuple(self.images.shape[1:]), "classes": classes}
        pixels = self.normalise.plain if self.images.dtype == torch.uint8 else {}
        self.signature = {"input": {"shape": list(self.inputs["shape"]), **pixels, **prepared}}
        if names:
            self.signature["classes"] = list(names)
        self.augment = augment or Augment()
        self.about = about
        self.seed, self.label_smoothing = seed, label_smoothing
        self.cut(len(self.images), "training images", batch_size, limit_batches)

    @classmethod
    def of(
        cls,
        config: Config,
        splits: dict[str, tuple[Tensor, Tensor]],
        classes: int,
        device: torch.device,
        **described: Any,
    ) -> Classification:
        """The task with the settings of a run's config; ``described`` are ``about``, ``names`` and
        ``prepared``."""
        augment = Augment.of(config.dataset.values())
        few = limited(splits, config.trainer.limit_evaluation, thinned)
        return cls(few, classes, augment=augment, **settings(config, device), **described)

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        pieces = self.pieces(parts, mine)
        if not pieces:
            return []
        places = range(pieces[0].start, pieces[-1].stop)
        share = self.augment.share(generator(self.seed, epoch, index), self.batch_size, places)
        images, labels = self._read_share(epoch, index, share)
        images, labels = self.augment(images, labels, self.classes, self.normalise, share)
        sizes = [len(piece) for piece in pieces]
        return list(zip(images.split(sizes), labels.split(sizes), strict=True))

    def _read_share(self, epoch: int, index: int, share: Share) -> Batch:
        """The images at hand of a share of a training batch, as they are stored, with their labels."""
        order = epoch_order(self.seed, epoch, len(self.images))
        rows = sent(order[index * self.batch_size + share.rows], self.images.device)
        return self.images[rows], self.labels[rows]

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return as_logits(model(batch[0]), batch[0].shape[:1], self.classes).float()

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits, batch[1], label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        device, count = self.normalise.mean.device, 0
        loss = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        for _, (images, labels), counts in self._evaluation(split, rank, world):
            logits = model(images).float()
            if counts:
                loss += functional.cross_entropy(logits, labels, reduction="sum")
                right += (logits.argmax(1) == labels).sum()
                count += len(labels)
        return {"loss": float(loss), "right": int(right), "count": count}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        loss, right, count = (
            sum(tally[key] for tally in tallies) for key in ("loss", "right", "count")
        )
        return {"loss": loss / count, "accuracy": right / count}

    def _evaluation(
        self, split: str, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Any, Batch, bool]]:
        """A rank's pieces of a split, its normalised images and labels, and whether they count."""
        images, labels = self.splits[split]
        at_once = max(1, min(1024, PIXELS_AT_ONCE // math.prod(images.shape[2:])))
        rows = [slice(first, first + at_once) for first in range(0, len(labels), at_once)]
        return shared(rows, lambda few: (self.normalise(images[few]), labels[few]), rank, world)

    def example(self) -> Batch:
        return self.normalise(self.images[:2]), self.labels[:2]


def check_labelled(split: str, images: Any, labels: Any, classes: int) -> None:
    """ConfigError where a split of the user's own is not images with a class each."""
    right = isinstance(images, Tensor) and isinstance(labels, Tensor)
    right = right and labels.dtype == torch.int64 and labels.shape == images.shape[:1]
    if not right or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise ConfigError(
            f"{split}: it takes tensors, images (N, ...) and labels (N,) of int64, 0 to {classes - 1}"
        )


def in_8_bits(image: Any, path: str | Path, mode: str = "RGB") -> Any:
    """A PIL image as ``RGB`` or ``L``, of 8 bits; of 16 bits the upper ones stay. ConfigError for
    pixels that have no such range."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # PIL's own conversion makes all above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ConfigError(f"{path} has pixels of mode {image.mode}; images have 8 or 16 bits")
    return image.convert(mode)


class Normalise:
    """uint8 images to float32, normalised channel by channel; float images stay as they are.
    ``mean`` and ``std`` (C,) are on the scale of 0 to 255.
    """

    def __init__(self, mean: Tensor, std: Tensor, device: torch.device | str) -> None:
        self.mean, self.std = (value.float().view(-1, 1, 1).to(device) for value in (mean, std))

    @property
    def plain(self) -> dict[str, list[float]]:
        """As plain data, for a signature."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"range": [0, 255], "mean": mean, "std": std}

    @classmethod
    def of(cls, train: Tensor, device: torch.device | str) -> Normalise:
        """Normalise by mean and standard deviation of the training images (N, C, H, W)."""
        if train.dtype != torch.uint8:
            return cls(torch.zeros(1), torch.ones(1), device)
        counts = torch.stack(
            [torch.bincount(channel.reshape(-1), minlength=256) for channel in train.unbind(1)]
        ).double()
        shares, values = counts / counts.sum(1, keepdim=True), torch.arange(256).double()
        mean = (shares * values).sum(1, keepdim=True)
        # a channel may be constant
        std = (shares * (values - mean) ** 2).sum(1).sqrt().clamp(min=1.0)
        return cls(mean, std, device)

    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images
        # convolutions take the layout of their input, and are faster with the channels last, on
        # GPUs by far
        pixels = images.permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format)
        # arithmetic on whole lines is several times faster than on three channels at a time
        lines = pixels.flatten(2)
        lines.sub_(self.mean.flatten().repeat(pixels.shape[2])).div_(
            self.std.flatten().repeat(pixels.shape[2])
        )
        return pixels.permute(0, 3, 1, 2)
