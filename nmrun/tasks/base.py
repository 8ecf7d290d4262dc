"""What the loop needs from a task. A task knows the data, the loss and the metrics, and nothing of training."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

Batch = tuple[Tensor, ...]


class Task(Protocol):
    """One data set with one objective, on one device.

    Batches are addressed by ``(epoch, index)`` and depend on nothing else but the run's seed, so a resumed run finds its place
    by counting: no state of a data loader is saved and nothing is replayed.

    A task may also have ``batches_of``, words for the plan on what a batch is if not ``trainer.batch_size`` items, and ``notes``,
    a dictionary of texts for ``result.json`` on how its metrics were computed.
    """

    batches_per_epoch: int
    inputs: dict[str, Any]
    """What a model has to know of the data: keyword arguments of its ``build``, such as ``shape`` and ``classes`` of images."""
    metric: str
    """The metric of :meth:`evaluate` that epochs and recipes are compared by; see ``nmrun.config.metric`` for which way is better."""

    def micro_batches(self, epoch: int, index: int, parts: int) -> list[Batch]:
        """Batch ``index`` of ``epoch`` (both from 0), cut into ``parts`` micro-batches of about the same size."""

    def size(self, batch: Batch) -> int:
        """How many items (images, tokens) the mean in :meth:`loss` is over: the weight of a micro-batch in its batch."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean training loss of a batch, a scalar with gradient. ``model`` is the module or its compiled form."""

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Metrics on split ``"val"`` or ``"test"``: ``loss``, ``metric`` and others. ``model`` is in evaluation mode."""

    def example(self) -> Batch:
        """A small batch of training items (two, so that batch normalisation accepts it), for counting FLOPs."""
