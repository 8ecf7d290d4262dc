"""Items that worker processes read from files as they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nmrun.errors import RunError
from nmrun.lab import ranks, signals
from nmrun.lab.tasks.base import generator

if TYPE_CHECKING:
    pass

Key = tuple[int, int]  # epoch and row of an item; epoch -1 is an evaluation
Collated = tuple[Any, ...]


class ItemReader:
    """Batches of items that are read ahead, while the training uses earlier ones.

    Each epoch is a fresh permutation of the training ``rows`` (N,), a pure function of (seed,
    epoch). A run that begins in the middle of an epoch begins to read there. ``collate`` makes a
    batch of items; the last it gives is what is wrong with one of them, or empty. ``workers``
    processes read; 0: the training's own; None: one for each core of this rank.
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
        """The items at the places ``share`` of a batch. Raises RunError for a damaged file."""
        if self._next != (epoch, index, share):
            self._batches = self.read(self.keys(epoch, index, share))
        batch = next(self._batches)
        ends = index + 1 == self.batches_per_epoch
        self._next = (epoch + 1, 0, share) if ends else (epoch, index + 1, share)
        return batch

    def evaluated(self, batches: Sequence[Sequence[int]]) -> Iterator[Collated]:
        """Batches of rows, read for an evaluation."""
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
        return _check(loader)

    def close(self) -> None:
        """End the processes that read."""
        self._next, self._batches = (), iter(())

    def keys(self, epoch: int, index: int, share: list[int]) -> Iterator[list[Key]]:
        """The items ``share`` of this batch and of those after it, without end."""
        size, count = self.batch_size, self.batches_per_epoch
        return _keys(self.rows, self.seed, size, count, epoch, index, share)


# Functions, so that no generator holds the `ItemReader` that holds it: torch waits five seconds for each
# process of a loader that is collected as part of a cycle.


def _check(loader: DataLoader[Any]) -> Iterator[Collated]:
    with signals.blocked_while_forking():
        batches = iter(loader)
    for *batch, problem in batches:
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
