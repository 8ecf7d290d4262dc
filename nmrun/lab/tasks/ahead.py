"""Training items that are read from files as they are needed, by processes beside the training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nmrun import ranks
from nmrun.errors import RunError
from nmrun.lab import signals
from nmrun.lab.tasks.augment import generator

Key = tuple[int, int]  # epoch and row of an item; epoch -1 is an evaluation
Collated = tuple[Any, ...]


class Ahead:
    """Batches of items that are read while the training is at earlier ones.

    Each epoch is a fresh permutation of the training rows, a pure function of (seed, epoch). A run
    that begins in the middle of an epoch begins to read there.

    Args:
        files: gives the item of a key.
        collate: makes a batch of items; the last it gives is what is wrong with one of them, empty
            where nothing is.
        rows: of training items, (N,).
        seed: of the order.
        batch_size: of training.
        batches_per_epoch: the same.
        workers: processes that read; 0: the training's own; None: one for each core of this rank.
        pinned: whether batches go to a GPU.
    """

    def __init__(
        self,
        files: Dataset[Any],
        collate: Callable[[list[Any]], Collated],
        rows: Tensor,
        seed: int,
        batch_size: int,
        batches_per_epoch: int,
        workers: int | None,
        pinned: bool,
    ) -> None:
        self.files, self.collate, self.rows, self.seed = files, collate, rows, seed
        self.batch_size, self.batches_per_epoch = batch_size, batches_per_epoch
        own_cores = max(1, (os.cpu_count() or 1) // ranks.local_world())
        self.workers = own_cores if workers is None else workers
        self.pinned = pinned
        self._next: tuple[Any, ...] = ()
        self._batches: Iterator[Collated] = iter(())

    def training(self, epoch: int, index: int, share: list[int]) -> Collated:
        """Some items of a training batch.

        Args:
            epoch: from 0.
            index: of the batch in its epoch, from 0.
            share: places in the batch of the items that are wanted.

        Returns:
            What ``collate`` makes of them, but for the last.

        Raises:
            RunError: for a file that cannot be read.
        """
        if self._next != (epoch, index, share):
            self._batches = self.read(self.keys(epoch, index, share))
        batch = next(self._batches)
        ends = index + 1 == self.batches_per_epoch
        self._next = (epoch + 1, 0, share) if ends else (epoch, index + 1, share)
        return batch

    def evaluated(self, batches: Sequence[Sequence[int]]) -> Iterator[Collated]:
        """Batches of rows, read for an evaluation.

        Args:
            batches: the rows of each.
        """
        return self.read([(-1, row) for row in rows] for rows in batches)

    def read(self, keys: Iterator[list[Key]]) -> Iterator[Collated]:
        """Batches as :meth:`training`, of any keys."""
        loader = DataLoader(
            self.files,
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.pinned,
            worker_init_fn=_begin,
            # else it draws from torch's own, which a resumed run would notice
            generator=torch.Generator(),
        )
        return _checked(loader)

    def close(self) -> None:
        """End the processes that read."""
        self._next, self._batches = (), iter(())

    def keys(self, epoch: int, index: int, share: list[int]) -> Iterator[list[Key]]:
        """The items ``share`` of this batch and of those after it, without end: no process waits
        where an epoch ends.

        Args:
            epoch, index, share: as of :meth:`training`.
        """
        size, count = self.batch_size, self.batches_per_epoch
        return _keys(self.rows, self.seed, size, count, epoch, index, share)


# Functions, so that no generator holds the `Ahead` that holds it: torch waits five seconds for each
# process of a loader that is collected as part of a cycle.


def _checked(loader: DataLoader[Any]) -> Iterator[Collated]:
    for *batch, problem in loader:
        if problem:
            raise RunError(problem)
        yield tuple(batch)


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
