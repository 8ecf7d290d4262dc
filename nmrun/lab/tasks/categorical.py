"""Tasks whose loss is one of logits over classes or tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from nmrun.lab.tasks.base import Batch, Task


class Categorical(Task):
    """A task whose loss is one of logits over classes, so that a teacher can say them too."""

    @abstractmethod
    def logits(self, model: Any, batch: Batch) -> Tensor:
        """What a model says of a batch.

        Args:
            model: the module or its compiled form.
            batch: a micro-batch.

        Returns:
            Numbers before the softmax, (..., classes), of as many items as :meth:`Task.size`.
        """

    @abstractmethod
    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean training loss of a batch, a scalar with gradient.

        Args:
            logits: as of :meth:`logits`.
            batch: a micro-batch.
        """

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return self.loss_of(self.logits(model, batch), batch)
