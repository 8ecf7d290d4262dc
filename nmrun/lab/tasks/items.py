"""Tasks whose items are read from files as they are needed, by processes beside the training."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nmrun.errors import ConfigError, RunError
from nmrun.lab import ranks, signals
from nmrun.lab.tasks.base import Batch, ItemBatches, generator, limited, turns, watched

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

Key = tuple[int, int]  # epoch and row of an item; epoch -1 is an evaluation
Collated = tuple[Any, ...]
Place = tuple[Any, int]  # a source, and the row of an item in it


@dataclass(frozen=True)
class Split:
    """Some of the items that a source has: their rows in it."""

    source: Any
    rows: list[int]


def in_order(source: Any, size: int, held_out: int) -> dict[str, Split]:
    """The splits of a generated source of ``size + 2 * held_out`` items: train, val and test."""
    rows, ends = list(range(size + 2 * held_out)), (size, size + held_out)
    return {
        "train": Split(source, rows[: ends[0]]),
        "val": Split(source, rows[ends[0] : ends[1]]),
        "test": Split(source, rows[ends[1] :]),
    }


class ItemReader:
    """Batches of items that are read while the training is at earlier ones.

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


class ItemTask(ItemBatches):
    """A task of items that files are read for. A batch, of an evaluation too, is
    ``trainer.batch_size`` items.

    Raises ConfigError for fewer training items than a batch takes, and label smoothing.
    """

    items: str
    """What they are called."""

    def __init__(
        self,
        config: Config,
        splits: Mapping[str, Split],
        device: torch.device,
        about: str = "",
        workers: int | None = 0,
    ) -> None:
        trainer = config.trainer
        if trainer.label_smoothing:
            raise ConfigError(
                f"trainer.label_smoothing={trainer.label_smoothing} is for classes, which this data set has not"
            )
        count, items = len(splits["train"].rows), f"{self.items} for training"
        self.cut(count, items, trainer.batch_size, trainer.limit_batches)
        self.device, self.about = device, about
        self.splits = limited(splits, trainer.limit_evaluation, _thin)
        places = [(split.source, row) for split in self.splits.values() for row in split.rows]
        ends = np.cumsum([len(split.rows) for split in self.splits.values()]).tolist()
        self.numbers = {
            name: list(range(end - len(split.rows), end))
            for (name, split), end in zip(self.splits.items(), ends, strict=True)
        }
        self.reader = ItemReader(
            self.files(config, places),
            self.collate,
            torch.tensor(self.numbers["train"]),
            config.seed,
            self.batch_size,
            self.batches_per_epoch,
            workers,
            device.type == "cuda",
        )

    @abstractmethod
    def files(self, config: Config, places: Sequence[Place]) -> Dataset[Any]:
        """What gives the item of a key (epoch, number); ``number`` is a place in ``places``."""

    collate: Callable[[list[Any]], Collated]
    """Makes a micro-batch of items: its tensors, and what is wrong with one of them or nothing."""

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        pieces = self.pieces(parts, mine)
        if not pieces:
            return []
        share = list(range(pieces[0].start, pieces[-1].stop))
        batch = self._on_device(self.reader.training(epoch, index, share))
        sizes = [len(piece) for piece in pieces]
        return list(zip(*(part.split(sizes) for part in batch), strict=True))

    def example(self) -> Batch:
        items = [self.reader.files[0, number] for number in self.numbers["train"][:2]]
        *batch, problem = self.collate(items)
        if problem:
            raise ConfigError(problem)
        return self._on_device(batch)

    def evaluated(self, split: str, rank: int, world: int) -> Iterator[tuple[range, Batch, bool]]:
        """A rank's batches of a split: which of its items, the batch, and whether it counts."""
        numbers, size = self.numbers[split], self.batch_size
        starts = range(0, len(numbers), size)
        pieces = [range(start, min(start + size, len(numbers))) for start in starts]
        share = turns(len(pieces), rank, world)
        read = self.reader.evaluated([[numbers[place] for place in pieces[n]] for n, _ in share])
        for batch, (number, counts) in zip(read, watched(share), strict=True):
            yield pieces[number], self._on_device(batch), counts

    def close(self) -> None:
        self.reader.close()

    def _on_device(self, batch: Sequence[Tensor]) -> Batch:
        return tuple(part.to(self.device, non_blocking=True) for part in batch)


def _thin(split: Split, most: int) -> Split:
    return Split(split.source, split.rows[:: -(-len(split.rows) // most)])
