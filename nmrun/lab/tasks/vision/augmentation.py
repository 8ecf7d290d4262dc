"""Augmentation of images in batches, on whatever device they are, a pure function of (seed, epoch,
index).

All that is random is drawn on the CPU, so a GPU sees the same crops and no step waits for it. The
transforms of torchvision.transforms.v2 decide once for a whole batch; here each image gets its own
crop, flip, operation or box.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.lab.tasks.base import sent

MAGNITUDES = 31  # RandAugment's scale, 0 to 30 (Cubuk et al. 2020 as in torchvision)
TRIES = 10  # boxes that are drawn for an image, of which the first that fits is erased


class Share:
    """Some rows of a batch, and random numbers for them. They are drawn for the whole batch of
    ``count`` rows, so that each row gets the same whoever has it.

    ``places`` are the rows that are wanted, side by side; None: all. With ``mixing`` a row is mixed
    with the one before it, which is at hand then too.
    """

    def __init__(
        self, random: torch.Generator, count: int, places: range | None = None, mixing: bool = False
    ) -> None:
        self.random, self.count = random, count
        places = range(count) if places is None else places
        self.extra = int(mixing and len(places) < count)
        """Rows at hand, in front, that are wanted for mixing only: one or none."""
        self.rows = torch.arange(places.start - self.extra, places.stop) % count
        """The rows at hand."""

    def uniform(self, columns: int) -> Tensor:
        """Numbers from 0 to 1 (rows at hand, ``columns``), float32."""
        return torch.rand(self.count, columns, generator=self.random)[self.rows]

    def below(self, end: int, columns: int) -> Tensor:
        """Whole numbers from 0 to ``end`` - 1 (rows at hand, ``columns``), int64."""
        return torch.randint(end, (self.count, columns), generator=self.random)[self.rows]


@dataclass(frozen=True)
class Augment:
    """What is done to a batch of training images, in this order; each of it is off at 0.

    ``crop_padding`` black pixels are around, of which a window of the old size is cut out. ``flip``
    mirrors every second image. ``erasing`` is a probability, ``mixup`` and ``cutmix`` the parameter
    of their beta distribution. If both are on, every batch has one of them, with equal chances.
    """

    crop_padding: int = 0
    flip: bool = False
    randaugment: int = 0
    randaugment_magnitude: int = 9
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    @classmethod
    def of(cls, options: dict[str, Any]) -> Augment:
        """The part of a ``dataset:`` config that is about augmentation."""
        return cls(**{key: options[key] for key in cls.__dataclass_fields__ if key in options})

    def share(self, random: torch.Generator, count: int, places: range | None = None) -> Share:
        """The rows of a batch that have to be at hand for ``places``, with their random numbers."""
        return Share(random, count, places, mixing=bool(self.mixup or self.cutmix))

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: int,
        normalise: Callable[[Tensor], Tensor],
        share: Share,
    ) -> tuple[Tensor, Tensor]:
        """Augment the rows at hand of a ``share``: images uint8 (B, C, H, W), labels (B,).

        Gives the rows that are wanted: float32 images and labels (B,), or probabilities (B,
        classes) with mixup or cutmix.
        """
        if self.crop_padding or self.flip:
            images = crop_and_flip(images, self.crop_padding, self.flip, share)
        for _ in range(self.randaugment):
            images = rand_augment(images, self.randaugment_magnitude, share)
        images = normalise(images)
        if self.erasing:
            images = erase(images, self.erasing, share)
        if self.mixup or self.cutmix:
            images, labels = mix(images, labels, classes, self.mixup, self.cutmix, share.random)
        return images[share.extra :], labels[share.extra :]


def crop_and_flip(images: Tensor, padding: int, flip: bool, share: Share) -> Tensor:
    """Shift each image by at most ``padding`` pixels, black moving in, and mirror half of them."""
    count, channels, height, width = images.shape
    top, left = (share.below(2 * padding + 1, 1) for _ in range(2))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    if flip:
        mirrored = share.uniform(1) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    places = sent(torch.cat([rows, columns], 1), images.device)
    rows, columns = places.split([height, width], 1)
    each = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(-1, 1, 1)
    padded = functional.pad(images, [padding] * 4)
    return padded[each, channel, rows[:, None, :, None], columns[:, None, None, :]]


def rand_augment(images: Tensor, magnitude: int, share: Share) -> Tensor:
    """One of RandAugment's 14 operations for each image (uint8; Cubuk et al. 2020), with
    torchvision's ranges. ``magnitude`` is 0 to 30.
    """
    operations = _operations(magnitude, *images.shape[-2:])
    kinds = [
        (operation, factor * value) for operation, value, _ in operations for factor in (1, -1)
    ]
    choice = share.below(len(operations), 1)[:, 0]
    takes_sign = torch.tensor([signed for _, _, signed in operations])
    kind = 2 * choice + share.below(2, 1)[:, 0] * takes_sign[choice]
    # the images of each kind are side by side in the order, so that one copy has them all
    order = sent(kind.argsort(stable=True), images.device)
    out, counts = images.clone(), kind.bincount(minlength=len(kinds)).tolist()
    for (operation, value), rows in zip(kinds, order.split(counts), strict=True):
        if len(rows):
            out[rows] = operation(images[rows], value)
    return out


def _operations(
    magnitude: int, height: int, width: int
) -> list[tuple[Callable[[Tensor, float], Tensor], float, bool]]:
    """Function of (images, value), its value, and whether the value takes a random sign."""
    from torchvision.transforms.v2 import functional as tv

    def affine(
        images: Tensor,
        angle: float = 0.0,
        x: float = 0.0,
        y: float = 0.0,
        shear: tuple[float, float] = (0.0, 0.0),
    ) -> Any:
        skew = [math.degrees(math.atan(part)) for part in shear]
        centre = [0.0, 0.0] if any(shear) else None
        return tv.affine(
            images, angle=angle, translate=[int(x), int(y)], scale=1.0, shear=skew, center=centre
        )

    part = magnitude / (MAGNITUDES - 1)
    return [
        (lambda images, value: images, 0.0, False),
        (lambda images, value: affine(images, shear=(value, 0.0)), 0.3 * part, True),
        (lambda images, value: affine(images, shear=(0.0, value)), 0.3 * part, True),
        (lambda images, value: affine(images, x=value), 150.0 / 331.0 * width * part, True),
        (lambda images, value: affine(images, y=value), 150.0 / 331.0 * height * part, True),
        (lambda images, value: tv.rotate(images, value), 30.0 * part, True),
        (lambda images, value: tv.adjust_brightness(images, 1.0 + value), 0.9 * part, True),
        (lambda images, value: tv.adjust_saturation(images, 1.0 + value), 0.9 * part, True),
        (lambda images, value: tv.adjust_contrast(images, 1.0 + value), 0.9 * part, True),
        (lambda images, value: tv.adjust_sharpness(images, 1.0 + value), 0.9 * part, True),
        (lambda images, value: tv.posterize(images, int(value)), 8 - round(4 * part), False),
        (lambda images, value: tv.solarize(images, value), 255.0 * (1.0 - part), False),
        (lambda images, value: tv.autocontrast(images), 0.0, False),
        (lambda images, value: tv.equalize(images), 0.0, False),
    ]


def erase(images: Tensor, probability: float, share: Share) -> Tensor:
    """Put a box of zeros, the mean of normalised images, into some images (Zhong et al. 2020).

    A box has 2 to 33 % of the area and sides in a ratio of 0.3 to 3.3. The first box that fits
    counts. If none does, the image stays whole.
    """
    (height, width), count, random = images.shape[-2:], share.count, share.random
    area = height * width * (0.02 + 0.31 * torch.rand(count, TRIES, generator=random))
    low, high = math.log(0.3), math.log(3.3)
    ratio = torch.exp(low + (high - low) * torch.rand(count, TRIES, generator=random))
    tall, wide = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.float().argmax(1, keepdim=True)
    hit = fits.any(1, keepdim=True) & (torch.rand(count, 1, generator=random) < probability)
    tall, wide = tall.gather(1, first), wide.gather(1, first)
    top = (torch.rand(count, 1, generator=random) * (height - tall + 1)).floor()
    left = (torch.rand(count, 1, generator=random) * (width - wide + 1)).floor()
    hit, top, left, tall, wide = (each[share.rows] for each in (hit, top, left, tall, wide))
    row, column = torch.arange(height), torch.arange(width)
    rows = hit & (row >= top) & (row < top + tall)
    columns = (column >= left) & (column < left + wide)
    box = rows[:, None, :, None] & columns[:, None, None, :]
    return images.masked_fill(sent(box, images.device), 0.0)


def mix(
    images: Tensor,
    labels: Tensor,
    classes: int,
    mixup: float,
    cutmix: float,
    random: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Mix images by torchvision's MixUp (Zhang et al. 2018) or CutMix (Yun et al. 2019), of which 0
    turns one off. Labels become probabilities (B, classes).
    """
    from torchvision.transforms import v2

    kinds = [
        kind(alpha=alpha, num_classes=classes)
        for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
        if alpha
    ]
    with torch.random.fork_rng(devices=[]):  # they draw from torch's own generator
        torch.default_generator.manual_seed(int(torch.randint(0, 2**32, (), generator=random)))
        kind = kinds[int(torch.randint(0, len(kinds), ()))]
        images, labels = kind(images, labels)
    return images, labels
