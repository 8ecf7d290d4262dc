"""Tasks whose items are read, and prepared for training, one by one as they are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nmrun.errors import ConfigError
from nmrun.lab.tasks.ahead import Ahead, Collated
from nmrun.lab.tasks.base import Batch, Task, chunks, limited, picked, turns, watched

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

Place = tuple[Any, int]  # a source, and the row of an item in it


@dataclass(frozen=True)
class Split:
    """Some of the items that a source has: their rows in it."""

    source: Any
    rows: list[int]


def in_order(source: Any, size: int, held_out: int) -> dict[str, Split]:
    """The splits of a generated source.

    Args:
        source: of ``size + 2 * held_out`` items.
        size: of the training split, which comes first.
        held_out: of the validation split, and as many of the test split.

    Returns:
        The splits ``train``, ``val`` and ``test``.
    """
    rows, ends = list(range(size + 2 * held_out)), (size, size + held_out)
    return {
        "train": Split(source, rows[: ends[0]]),
        "val": Split(source, rows[ends[0] : ends[1]]),
        "test": Split(source, rows[ends[1] :]),
    }


class Streamed(Task):
    """A task of items that files are read for; see :class:`nmrun.lab.tasks.base.Task`.

    A batch is ``trainer.batch_size`` items, and so is one of an evaluation.

    Args:
        config: the run's config.
        splits: ``train``, ``val`` and ``test``.
        device: where batches go.
        about: a line on the data for the plan.
        workers: processes that read; 0: the training's own; None: one for each core.

    Raises:
        ConfigError: for fewer training items than a batch takes, and label smoothing.
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
        count, size = len(splits["train"].rows), trainer.batch_size
        if size > count:
            raise ConfigError(
                f"trainer.batch_size={size}: there are only {count} {self.items} for training"
            )
        self.device, self.about, self.batch_size = device, about, size
        self.batches_per_epoch = min(count // size, trainer.limit_batches or count)
        self.splits = limited(splits, trainer.limit_evaluation, _thinned)
        places = [(split.source, row) for split in self.splits.values() for row in split.rows]
        ends = np.cumsum([len(split.rows) for split in self.splits.values()]).tolist()
        self.numbers = {
            name: list(range(end - len(split.rows), end))
            for (name, split), end in zip(self.splits.items(), ends, strict=True)
        }
        self.ahead = Ahead(
            self.files(config, places),
            self.collate,
            torch.tensor(self.numbers["train"]),
            config.seed,
            size,
            self.batches_per_epoch,
            workers,
            device.type == "cuda",
        )

    @abstractmethod
    def files(self, config: Config, places: Sequence[Place]) -> Dataset[Any]:
        """What gives the item of a key (epoch, number).

        Args:
            config: the run's config.
            places: of all items; a key's number is a place in them.
        """

    collate: Callable[[list[Any]], Collated]
    """Makes a micro-batch of items: its tensors, and what is wrong with one of them or nothing."""

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        pieces = picked(chunks(self.batch_size, parts), mine)
        if not pieces:
            return []
        share = list(range(pieces[0].start, pieces[-1].stop))
        batch = self._on_device(self.ahead.training(epoch, index, share))
        sizes = [len(piece) for piece in pieces]
        return list(zip(*(part.split(sizes) for part in batch), strict=True))

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        return [len(piece) for piece in chunks(self.batch_size, parts)]

    def size(self, batch: Batch) -> int:
        return len(batch[0])

    def example(self) -> Batch:
        items = [self.ahead.files[0, number] for number in self.numbers["train"][:2]]
        *batch, problem = self.collate(items)
        if problem:
            raise ConfigError(problem)
        return self._on_device(batch)

    def evaluated(self, split: str, rank: int, world: int) -> Iterator[tuple[range, Batch, bool]]:
        """A rank's batches of a split.

        Args:
            split: its name.
            rank, world: whose, and of how many, as of :func:`nmrun.lab.tasks.base.turns`.

        Yields:
            Which items of the split, the batch, and whether it counts.
        """
        numbers, size = self.numbers[split], self.batch_size
        starts = range(0, len(numbers), size)
        pieces = [range(start, min(start + size, len(numbers))) for start in starts]
        mine = turns(len(pieces), rank, world)
        read = self.ahead.evaluated([[numbers[at] for at in pieces[n]] for n, _ in mine])
        for batch, (number, counts) in zip(read, watched(mine), strict=True):
            yield pieces[number], self._on_device(batch), counts

    def close(self) -> None:
        self.ahead.close()

    def _on_device(self, batch: Sequence[Tensor]) -> Batch:
        return tuple(part.to(self.device, non_blocking=True) for part in batch)


def _thinned(split: Split, most: int) -> Split:
    return Split(split.source, split.rows[:: -(-len(split.rows) // most)])
