"""Classification of images that worker processes read from the disk as they are needed."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from nmrun.errors import ConfigError, RunError
from nmrun.lab import ranks, signals
from nmrun.lab.keys.datasets import ImageNet
from nmrun.lab.runs import documents
from nmrun.lab.tasks.base import (
    Batch,
    batches_of_rank,
    generator,
    limited,
    settings,
    shared,
    thinned,
)
from nmrun.lab.tasks.vision.augmentation import Augment, Share
from nmrun.lab.tasks.vision.classification import Classification, Normalise, in_8_bits

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

Key = tuple[int, int]  # epoch and row of an image; epoch -1 is an evaluation
# ImageNet's
MEAN, STD = (
    torch.tensor([0.485, 0.456, 0.406]) * 255,
    torch.tensor([0.229, 0.224, 0.225]) * 255,
)
WHOLE = 256 / 224  # an evaluated image is scaled to so much more than what is cut out of its middle
# JPEGs are decoded at 1/2, 1/4 or 1/8 of their size where a part still has so many times the pixels
# of a side that it is scaled to
SPARE = 2


class ImageStream(Classification):
    """As :class:`Classification`, with images that are read from files as they are needed.

    A training image is a part of ``crop_scale`` to 100 % of the file's area, in a ratio of 3/4 to
    4/3, scaled (Szegedy et al. 2015). Every second one is mirrored (``flip``). It is a pure
    function of (seed, epoch, row); all other augmentation is done in batches on the device. The
    order is one of (seed, epoch), so a resumed run begins to read where it stopped. ``splits`` are
    rows of ``paths`` and labels, both (N,).
    """

    def __init__(
        self,
        config: Config,
        paths: NDArray[np.bytes_],
        splits: dict[str, tuple[Tensor, Tensor]],
        classes: int,
        device: torch.device,
        about: str = "",
        names: Sequence[str] = (),
    ) -> None:
        options = config.dataset.as_kind(ImageNet)
        size, normalise = options.resolution, Normalise(MEAN, STD, device)
        resize = {"shorter_side": round(size * WHOLE), "crop": size}
        super().__init__(
            limited(splits, config.trainer.limit_evaluation, thinned),
            classes,
            # mirrored where it is read
            augment=dataclasses.replace(Augment.of(options.values()), flip=False),
            about=about,
            names=names,
            prepared={"shape": [3, size, size], "colours": "RGB", **normalise.plain, "resize": resize},
            **settings(config, "cpu"),
        )  # fmt: skip
        self.device, self.normalise = device, normalise
        self.inputs["shape"] = (3, size, size)
        self.files = ImageFiles(paths, size, options.crop_scale, options.flip, config.seed)
        own_cores = max(1, (os.cpu_count() or 1) // ranks.local_world())
        self.workers = own_cores if options.workers is None else options.workers
        self._labels = torch.empty(len(paths), dtype=torch.int64)
        for rows, labels in splits.values():
            self._labels[rows] = labels
        self._next: tuple[Any, ...] = ()
        self._batches: Iterator[Batch] = iter(())

    def _read_share(self, epoch: int, index: int, share: Share) -> Batch:
        """Read ahead, while the training uses earlier batches. Raises RunError for a damaged file."""
        places = share.rows.tolist()
        if self._next != (epoch, index, places):
            self._batches = self._read(self.keys(epoch, index, places))
        images, rows = next(self._batches)
        ends = index + 1 == self.batches_per_epoch
        self._next = (epoch + 1, 0, places) if ends else (epoch, index + 1, places)
        return self._on_device(images, rows)

    def _evaluation(
        self, split: str, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Any, Batch, bool]]:
        rows = self.splits[split][0].split(self.batch_size)
        mine = [rows[number].tolist() for number, _ in batches_of_rank(len(rows), rank, world)]
        ahead = self._read([[(-1, row) for row in few] for few in mine])

        def read(_: Tensor) -> Batch:
            images, labels = self._on_device(*next(ahead))
            return self.normalise(images), labels

        return shared(rows, read, rank, world)

    def keys(self, epoch: int, index: int, places: list[int]) -> Iterator[list[Key]]:
        """The images at these places of a training batch and of those after it, without end. Each
        epoch is a fresh permutation."""
        size, count = self.batch_size, self.batches_per_epoch
        return _keys(self.images, self.seed, size, count, epoch, index, places)

    def _read(self, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """Batches of these keys, by ``workers`` processes; 0: the training's own."""
        loader = DataLoader(
            self.files,
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_begin,
            # else it draws from torch's own, which a resumed run would notice
            generator=torch.Generator(),
        )
        return _checked(loader)

    def _on_device(self, images: Tensor, rows: Tensor) -> Batch:
        """uint8 images and labels."""
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return images, self._labels[rows].to(self.device, non_blocking=True)

    def close(self) -> None:
        """End the processes that read."""
        self._next, self._batches = (), iter(())

    def example(self) -> Batch:
        images = torch.zeros(2, *self.inputs["shape"], device=self.device)
        return images, torch.zeros(2, dtype=torch.int64, device=self.device)


class ImageFiles(Dataset[tuple[Tensor, int, str]]):
    """Image ``(epoch, row)``, in training one of ``epoch``'s parts of it, for epoch -1 its middle:
    uint8 (size, size, 3), row, problem.
    """

    def __init__(
        self, paths: NDArray[np.bytes_], size: int, scale: float, flip: bool, seed: int
    ) -> None:
        self.paths, self.size, self.scale, self.flip, self.seed = paths, size, scale, flip, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int, str]:
        from PIL import Image

        epoch, row = key
        path = self.paths[row].decode()
        try:
            with documents.opened(path) as content, Image.open(content) as file:
                part = self._middle(file, path) if epoch < 0 else self._part(file, path, *key)
                return part, row, ""
        except ConfigError as error:
            return torch.empty(0), row, str(error)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            return torch.empty(0), row, f"{path} is damaged, or not an image ({error})"

    def _middle(self, file: Any, path: str) -> Tensor:
        from torchvision.transforms import functional as tv

        image = tv.center_crop(
            tv.resize(in_8_bits(file, path), round(self.size * WHOLE)), [self.size, self.size]
        )
        return torch.from_numpy(np.array(image))

    def _part(self, file: Any, path: str, epoch: int, row: int) -> Tensor:
        from torchvision.transforms import RandomResizedCrop

        # the parameters are drawn from torch's own generator
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(generator(self.seed, epoch, row, 1).get_state())
            top, left, tall, wide = RandomResizedCrop.get_params(
                file, [self.scale, 1.0], [3 / 4, 4 / 3]
            )
            mirrored = self.flip and float(torch.rand(())) < 0.5
        sides = [
            math.ceil(SPARE * self.size * whole / part)
            for whole, part in zip(file.size, (wide, tall), strict=True)
        ]
        width = file.width
        drafted = file.draft(None, sides)  # of a JPEG that is larger: 1/2, 1/4 or 1/8 of it
        scale = drafted[1][2] / width if drafted else 1.0
        box = [round(scale * side) for side in (left, top, left + wide, top + tall)]
        pixels = torch.from_numpy(np.array(in_8_bits(file.crop(box), path)))
        # what PIL's resize does, to a rounding, in half of the time
        layout = pixels[None].permute(0, 3, 1, 2)
        image = functional.interpolate(
            layout, (self.size, self.size), mode="bilinear", antialias=True
        )[0].permute(1, 2, 0)
        return image.flip(1) if mirrored else image


# Functions, so that no generator holds the task that holds it: torch waits five seconds for each
# process of a loader that is collected as part of a cycle.


def _checked(loader: DataLoader[Any]) -> Iterator[Batch]:
    with signals.blocked_while_forking():
        batches = iter(loader)
    for images, rows, problem in batches:
        if problem:
            raise RunError(problem)
        yield images, rows


def _keys(
    rows: Tensor, seed: int, size: int, count: int, epoch: int, index: int, share: list[int]
) -> Iterator[list[Key]]:
    while True:
        order = rows[torch.randperm(len(rows), generator=generator(seed, epoch))]
        for first in range(index * size, count * size, size):
            yield [(epoch, row) for row in order[first : first + size][share].tolist()]
        epoch, index = epoch + 1, 0


def _begin(worker: int) -> None:
    signals.left_to_parent()


def _collate(items: list[tuple[Tensor, int, str]]) -> tuple[Tensor, Tensor, str]:
    problem = next((problem for _, _, problem in items if problem), "")
    images = torch.empty(0) if problem else torch.stack([image for image, _, _ in items])
    return images, torch.tensor([row for _, row, _ in items]), problem
