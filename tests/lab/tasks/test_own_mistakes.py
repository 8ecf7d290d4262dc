"""What the user's own code gives wrong: one line that says what it should be, before anything trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import models
from nmrun.lab.tasks.base import Task, as_logits, own_task
from nmrun.lab.tasks.vision import Classification
from nmrun.recipes.base import Recipe
from nmrun.sparsity import nm_mask

IMAGES, LABELS = torch.randn(20, 1, 4, 4), torch.arange(20) % 10


def classification(images, labels) -> Classification:
    return Classification({"train": (images, labels), "val": (images, labels)}, 10, 4, seed=0)


@pytest.mark.parametrize(
    "output",
    [(torch.zeros(4, 10),), None, np.zeros((4, 10)), torch.zeros(4), torch.zeros(4, 3), torch.zeros(5, 10)],
)  # fmt: skip
def test_a_network_that_gives_no_logits(output):
    task = classification(IMAGES, LABELS)
    with pytest.raises(ConfigError, match=r"logits, \(4, 10\)"):
        task.loss(lambda _: output, (IMAGES[:4], LABELS[:4]))


def test_logits_of_more_classes_and_of_each_token_are_taken():
    logits = torch.zeros(4, 5, 12)
    assert as_logits(logits, (4, 5), 10) is logits


@pytest.mark.parametrize(
    "labels", [LABELS.float(), LABELS.int(), LABELS + 1, LABELS - 1, LABELS[:9], LABELS.numpy(), torch.eye(10)[LABELS]],
)  # fmt: skip
def test_labels_that_are_no_classes(labels):
    with pytest.raises(ConfigError, match="int64, 0 to 9"):
        classification(IMAGES, labels)


class Own(Task):
    metric, batches_per_epoch, inputs = "accuracy", 5, {"classes": 10}
    higher_is_better = True

    def __init__(self, batch):
        self.batch = batch

    def micro_batches(self, epoch, index, parts, mine=None):
        return [self.batch]

    def size(self, batch):
        return len(batch[0])

    def loss(self, model, batch):
        return model(batch[0]).sum()

    def example(self):
        return self.batch


def test_batches_are_tuples_of_tensors():
    for batch in (IMAGES, (IMAGES.numpy(), LABELS.numpy()), {"x": IMAGES}, (IMAGES, [0, 1])):
        with pytest.raises(ConfigError, match="tuple of tensors"):
            own_task(Own(batch))


def test_what_is_no_whole_task():
    class Without(Own):
        metric = property()

    for other in (Without((IMAGES, LABELS)), None, nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match=r"base\.Task with .*metric"):
            own_task(other)


def test_what_a_result_has_of_a_task_is_plain_data():
    for name in ("signature", "notes"):
        for value in ({"mean": np.float32(0.5)}, {"mean": torch.zeros(())}, {(1, 2): 0}, 3):
            task = Own((IMAGES, LABELS))
            setattr(task, name, value)
            with pytest.raises(ConfigError, match="signature and notes"):
                own_task(task)
    task.notes = {"shape": (1, 4, 4), "std": np.float64(0.5)}
    assert own_task(task) is task


class Lengths(Own):
    """Batches of 1, 2, 3 ... items, of which it remembers which were prepared."""

    batches_per_epoch = 9

    def micro_batches(self, epoch, index, parts, mine=None):
        self.batch.append(index)
        return [(torch.zeros(index + 1),)]


@pytest.mark.parametrize(("equal", "mean", "prepared"), [(True, 1, [0]), (False, 5, [*range(9)])])
def test_a_plan_prepares_one_batch_unless_they_are_unequal(equal, mean, prepared):
    task = Lengths([])
    task.equal_batches = equal
    assert task.mean_size() == mean
    assert task.batch == prepared


def built(shape, classes, width=8):
    return nn.Linear(16, classes)


def test_a_key_that_an_own_builder_does_not_take():
    config = {"name": "mine", "_target_": f"{__name__}.built", "widht": 64}
    with pytest.raises(ConfigError, match=r"model=mine: .*'widht'"):
        models.build(config, {"shape": (1, 4, 4), "classes": 10})


@dataclass
class Choosing(Recipe):
    """Its masks are what ``how`` makes of the right one."""

    how: object = None

    def choose(self, weight):
        mask = nm_mask(weight.dense, weight.pattern, weight.dim)
        return self.how(mask)  # type: ignore[operator]


def sparse(how) -> Tensor:
    model = nn.Linear(8, 8)
    nmrun.sparsify(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Choosing(how), "2:4", exclude=None
    )
    return model.weight.detach()


@pytest.mark.parametrize(
    "how", [lambda mask: None, Tensor.numpy, Tensor.tolist, Tensor.float, lambda mask: mask[:1]]
)
def test_a_mask_that_is_none(how):
    with pytest.raises(ConfigError, match=r"choose gave .*bool \(8, 8\)"):
        sparse(how)


def test_a_mask_of_ones_own_is_taken():
    assert (sparse(torch.clone) != 0).sum() == 32


def test_an_error_of_ones_own_stays_its_own():
    def full(mask):
        raise MemoryError("mine")

    with pytest.raises(MemoryError, match="mine"):
        sparse(full)


@pytest.mark.parametrize("value", [torch.zeros(3, 4), np.zeros((3, 2)), object, nn.Linear(1, 1)])
def test_what_no_override_can_have(value):
    with pytest.raises(ConfigError, match="dataset"):
        nmrun.run(dataset=value)
