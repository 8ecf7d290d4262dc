"""What a data set of one's own has from the class that all are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nmrun.lab.tasks.base import Task


class Lengths(Task):
    """Batches of 1, 2, 3 ... items, of which it remembers which were prepared."""

    batches_per_epoch = 9
    inputs: dict[str, Any] = {}

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def micro_batches(self, epoch: int, index: int, parts: int, mine: range | None = None) -> Any:
        self.prepared.append(index)
        return [torch.zeros(index + 1)]

    def size(self, batch: Any) -> int:
        return len(batch)

    def loss(self, model: Any, batch: Any) -> Any: ...
    def example(self) -> Any: ...


@pytest.mark.parametrize(("equal", "mean", "prepared"), [(True, 1, [0]), (False, 5, [*range(9)])])
def test_a_plan_prepares_one_batch_unless_they_are_unequal(equal, mean, prepared):
    task = Lengths()
    task.equal_batches = equal
    assert task.mean_size() == mean
    assert task.prepared == prepared
