"""Labelled images into training, validation and test sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmrun.errors import ConfigError

Labelled = tuple[Tensor, Tensor]  # images and their classes


def split(
    pool: Labelled,
    test: Labelled | None,
    classes: int,
    split_seed: int,
    train_size: int | None,
    val_size: int | None,
    test_size: int | None,
    val: Labelled | None = None,
) -> dict[str, Labelled]:
    """Split images, by ``split_seed`` alone.

    Sizes are numbers of images, with the same number of every class, or one more of the first ones.
    A smaller training set is part of a larger one.

    Args:
        test: those for tests; None: they are taken from the pool.
        train_size: None: all the rest.
        val_size: None: a tenth of each class of the pool.
        test_size: None: all of ``test``, or a tenth of each class of the pool where there is none.
        val: those for validation; None: they are taken from the pool.

    Returns:
        ``{"train" | "val" | "test": (images, labels)}``.

    Raises:
        ConfigError: for a class that has too few images.
    """
    splits, rest = {}, pool
    for name, given, size in (
        ("test", test, test_size),
        ("val", val, val_size),
        ("train", None, train_size),
    ):
        source = rest if given is None else given
        counts = torch.bincount(source[1], minlength=classes)
        if size is not None:
            quotas = torch.tensor(
                [size // classes + (number < size % classes) for number in range(classes)]
            )
            for number in (quotas > counts).nonzero()[:1, 0].tolist():
                raise ConfigError(
                    f"dataset.{name}_size={size}: {int(quotas[number])} images of class {number}, of which there are {counts[number]}"
                )
        else:
            quotas = (
                counts if given is not None or name == "train" else (counts / 10).round().long()
            )
        chosen, left = _take(source[1], quotas, split_seed)
        splits[name] = source[0][chosen], source[1][chosen]
        if given is None:
            rest = source[0][left], source[1][left]
    empty = [name for name, (images, _) in splits.items() if not len(images)]
    if empty:
        raise ConfigError(
            f"dataset.{empty[0]}_size: no image is left for it of the {len(pool[1])} that there are"
        )
    return splits


def _take(labels: Tensor, quotas: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows with ``quotas`` of each class, in random order, and all others."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = labels[order].argsort(stable=True)  # rows of ``order``, class by class
    counts = torch.bincount(labels, minlength=len(quotas))
    rank = torch.arange(len(labels)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    taken = torch.zeros(len(labels), dtype=torch.bool)
    taken[by_class] = rank < torch.repeat_interleave(quotas, counts)
    return order[taken], order[~taken]


def about(splits: dict[str, Labelled], shape: Sequence[int], classes: int, place: Path) -> str:
    """Say what the data are, in a line of the plan.

    Args:
        shape: (C, H, W).
        place: where the images lie.
    """
    counts = ", ".join(f"{len(splits[name][1]):,} {name}" for name in ("train", "val", "test"))
    return f"images of {'x'.join(map(str, shape))} in {classes} classes ({counts}) from {place}"
