"""What the training loop needs from a task. A task knows data, loss and metrics, but nothing about
training."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, refused
from nmrun.lab import ranks

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

Batch = tuple[Tensor, ...]
Tally = dict[str, Any]
"""What one rank found in its share of a split: plain data and CPU tensors, small enough to be sent."""
Loss = Callable[[Any, Batch], Tensor]
"""The mean training loss of a micro-batch by a model: :meth:`Task.loss`, or more."""
T = TypeVar("T")
S = TypeVar("S")


class Task(ABC):
    """One data set with one objective, on one device.

    Batches are addressed by ``(epoch, index)`` and depend on nothing else but the run's seed. So a
    resumed run finds its place by counting: no state of a data loader is saved and nothing is
    replayed.

    A task evaluates in one of two ways. With :meth:`tally` and :meth:`metrics_of` each rank
    evaluates its share of a split. With an :meth:`evaluate` of its own each rank evaluates it all.
    """

    batches_per_epoch: int
    inputs: dict[str, Any]
    """What a model has to know of the data: keyword arguments of its ``build``, such as ``shape`` and ``classes`` of images."""
    metric: str
    """The metric of :meth:`evaluate` that epochs and recipes are compared by."""
    higher_is_better: bool
    """Whether higher values of :attr:`metric` are better, as of an accuracy, or lower ones, as of a loss."""
    has_test: bool = True
    """Whether there is a test split to evaluate. Without one, results have metrics of the validation split alone."""
    equal_batches: bool = True
    """Whether batches have as many items as the first one. Else a plan looks at the :meth:`sizes` of more."""
    about: str = ""
    """The line of the plan on the data."""
    left_out: str = ""
    """The line of the plan on items that an epoch leaves out."""
    batches_of: str = ""
    """Words for the plan on what a batch is, if not ``trainer.batch_size`` items."""
    notes: Mapping[str, str] = MappingProxyType({})
    """Texts for ``result.json`` on how the metrics were computed."""
    signature: Mapping[str, Any] = MappingProxyType({})
    """For ``result.json`` and exports, as plain data: what the network takes and gives, see
    ``nmrun.lab.tasks.vision``."""

    @abstractmethod
    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        """A batch in ``parts`` micro-batches of about the same size; fewer where it has fewer
        items.

        ``epoch`` and ``index`` count from 0. ``mine`` has the numbers of the micro-batches that are
        wanted, from 0; None: all. No work is done for the others, and these are the same to the bit
        whatever ``mine`` is.
        """

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        """The :meth:`size` of each micro-batch of a whole batch, without preparing any if possible."""
        return [self.size(batch) for batch in self.micro_batches(epoch, index, parts)]

    def mean_size(self) -> float:
        """The items of a whole batch. If batches differ, the mean over the first epoch's, or over
        the first hundred."""
        batches = range(1 if self.equal_batches else min(self.batches_per_epoch, 100))
        return sum(sum(self.sizes(0, index, 1)) for index in batches) / len(batches)

    @abstractmethod
    def size(self, batch: Batch) -> int:
        """How many items (images, tokens) the mean in :meth:`loss` is over."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean training loss of a micro-batch, a scalar with gradient. ``model`` is the module
        or its compiled form, in training or evaluation mode.
        """

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """``loss``, ``metric`` and other metrics of the split ``val`` or ``test``, on every rank.
        All ranks have to call, with the same model in evaluation mode.
        """
        return self.metrics_of(
            split, ranks.gathered(self.tally(model, split, ranks.rank(), ranks.world()))
        )

    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """What :meth:`metrics_of` needs from a rank's share of a split.

        Every rank makes the same number of passes through the model (see :func:`batches_of_rank`), as models
        in shards need it.
        """
        raise NotImplementedError

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        """The metrics of a split, as of :meth:`evaluate`."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Called at the end of the run: end the processes that read data, if there are any."""

    @abstractmethod
    def example(self) -> Batch:
        """Two training items, so that batch normalisation accepts them, for counting FLOPs."""


class Categorical(Task):
    """A task whose loss is computed from logits over classes, so that a teacher can give them too."""

    @abstractmethod
    def logits(self, model: Any, batch: Batch) -> Tensor:
        """Numbers before the softmax, (..., classes), of as many items as :meth:`Task.size`."""

    @abstractmethod
    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean training loss of a batch, a scalar with gradient, by its :meth:`logits`."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return self.loss_of(self.logits(model, batch), batch)


class ItemBatches(Task):
    """A task whose batches are ``batch_size`` items. Their first tensor has a row an item."""

    batch_size: int

    def cut(self, count: int, items: str, batch_size: int, limit: int | None) -> None:
        """Cut an epoch of ``count`` items into at most ``limit`` batches; a smaller last one is
        left out. ConfigError for fewer items than a batch takes."""
        if batch_size > count:
            raise ConfigError(f"trainer.batch_size={batch_size}: there are only {count} {items}")
        self.batch_size = batch_size
        self.batches_per_epoch = min(count // batch_size, limit or count)
        if (rest := count % batch_size) and self.batches_per_epoch == count // batch_size:
            self.left_out = f"each epoch leaves out {rest:,} of {count:,} {items}, others each time: they fill no batch"

    def pieces(self, parts: int, mine: range | None = None) -> list[range]:
        """The places in a batch of its micro-batches, as of :meth:`micro_batches`."""
        return picked(chunks(self.batch_size, parts), mine)

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        return [len(piece) for piece in self.pieces(parts)]

    def size(self, batch: Batch) -> int:
        return len(batch[0])


class InMemory(ItemBatches):
    """A task whose training items are in memory, in a fresh permutation each epoch."""

    @abstractmethod
    def _permutation(self, epoch: int) -> Any:
        """The rows of the training items in an epoch's order; slices of it are rows too."""

    @abstractmethod
    def _batch(self, split: str, rows: Any) -> Batch:
        """The items of some rows of a split, on the device."""

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        return [self._batch("train", rows) for rows in self.rows(epoch, index, parts, mine)]

    def rows(self, epoch: int, index: int, parts: int, mine: range | None = None) -> list[Any]:
        """The rows of each micro-batch, as of :meth:`micro_batches`."""
        first = index * self.batch_size
        rows = self._permutation(epoch)[first : first + self.batch_size]
        return [rows[piece.start : piece.stop] for piece in self.pieces(parts, mine)]


def own_task(task: Any) -> Task:
    """Check what a builder of the user's own has returned. ConfigError where it is no task, or lacks
    what has no default, or its batches are no tuples of tensors, or what ``result.json`` has of it
    is no plain data."""
    needed = ("batches_per_epoch", "higher_is_better", "inputs", "metric")
    if not isinstance(task, Task) or not all(hasattr(task, name) for name in needed):
        raise ConfigError(
            f"dataset._target_ returned a {type(task).__name__}: it takes a subclass of "
            f"nmrun.lab.tasks.base.Task with {', '.join(needed)}"
        )
    batch: Any = task.example()
    if not (isinstance(batch, tuple) and all(isinstance(each, Tensor) for each in batch)):
        raise ConfigError(
            f"example of the task gave a {type(batch).__name__}: a batch is a tuple of tensors"
        )
    with refused("signature and notes of the task are plain data: ", TypeError, ValueError):
        json.dumps([dict(task.signature), dict(task.notes)])
    return task


def settings(config: Config, device: torch.device | str) -> dict[str, Any]:
    """What tasks take of a run, by the names of their arguments."""
    trainer = config.trainer
    return {
        "batch_size": trainer.batch_size,
        "seed": config.seed,
        "label_smoothing": trainer.label_smoothing,
        "limit_batches": trainer.limit_batches,
        "device": device,
    }


def refuse_smoothing(smoothing: float, has: str) -> None:
    """ConfigError for smoothed labels where a data set has none, but ``has`` something else."""
    if smoothing:
        raise ConfigError(
            f"trainer.label_smoothing={smoothing} is for classes; this data set has {has}"
        )


def as_logits(output: Any, items: Sequence[int], classes: int) -> Tensor:
    """Check the output of a network, which may be the user's own. ConfigError where it is no tensor
    (items..., classes), or has more classes."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    if shape[:-1] != tuple(items) or shape[-1] < classes:
        raise ConfigError(
            f"the network gave a {type(output).__name__} {shape}: this task takes a tensor of logits, "
            f"{(*items, classes)}"
        )
    return cast(Tensor, output)


def limited(
    splits: Mapping[str, T], most: int | None, first: Callable[[T, int], T]
) -> dict[str, T]:
    """The splits by name, cut to the ``most`` items that are evaluated (None: all); ``train`` stays
    whole.

    ``first`` makes a split of at most so many items.
    """
    return {
        name: split if name == "train" or most is None else first(split, most)
        for name, split in splits.items()
    }


def thinned(split: Any, most: int) -> Any:
    """At most so many items of a split, evenly spaced, since files may be sorted by class."""
    items, labels = split
    distance = -(-len(labels) // most)
    return items[::distance], labels[::distance]


def picked(pieces: Sequence[T], mine: range | None) -> list[T]:
    """The pieces with these consecutive numbers, from 0; None: all."""
    return list(pieces if mine is None else pieces[mine.start : mine.stop])


def chunks(count: int, parts: int) -> list[range]:
    """``range(count)`` in at most so many parts, as ``torch.chunk`` cuts."""
    size = -(-count // parts)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to the device, without waiting for the device's pending work."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# A function that is told the progress of an evaluation: the batch that begins, from 0, and their
# number.
Progress = Callable[[int, int], None]
evaluating: ContextVar[Progress | None] = ContextVar("evaluating", default=None)


def shared(
    pieces: Sequence[T], read: Callable[[T], S], rank: int, world: int
) -> Iterator[tuple[T, S, bool]]:
    """A rank's pieces of an evaluation, what each is read as, and whether it counts; in step with
    the other ranks. Tells :data:`evaluating` of each."""
    mine, tell = batches_of_rank(len(pieces), rank, world), evaluating.get()

    def own() -> Iterator[tuple[T, S, bool]]:
        for done, (number, counts) in enumerate(mine):
            if tell is not None:
                tell(done, len(mine))
            yield pieces[number], read(pieces[number]), counts

    return ranks.in_step(own())


def batches_of_rank(count: int, rank: int, world: int) -> list[tuple[int, bool]]:
    """Which of ``count`` batches a rank evaluates, each ``world``-th, and whether each counts.

    All ranks get equally many. A rank without a batch left passes the last one through the model
    again, which does not count."""
    numbers = range(rank, -(-count // world) * world, world)
    return [(min(number, count - 1), number < count) for number in numbers]


def generator(*numbers: int) -> torch.Generator:
    """A random generator that depends only on these whole numbers, such as seed, epoch and index."""
    # torch's CPU generator looks at the low 32 bits of a seed only, so they are mixed into them
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


@functools.lru_cache(4)
def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of the items that depends only on seed and epoch. Nobody may change it."""
    # torch's CPU generator looks at the low 32 bits of a seed only, so the pair must be mixed into
    # them; another way than of generator() would change the order of finished runs
    mixed = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(count, generator=mixed)
