"""The loss with a teacher's term, ``trainer.distill``: a network that is trained already says more of
a batch than its labels.

After Hinton et al. 2015 (arXiv 1503.02531, section 2). With the student's logits z, the teacher's v
and the temperature T::

    (1 - weight) * loss(z) + weight * T^2 * KL(softmax(v / T) || softmax(z / T))

T^2 keeps the size of the second term's gradient when T changes. The Adaptive Sparse Trainer (arXiv
2407.20584) retrains sparse networks so, with the dense network that it begins with as the teacher:
its code has a weight of 0.67 and a T of 2, the defaults.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.run_folder import activations_of, weights_in
from nmrun.lab.tasks.base import Batch, Categorical, Task
from nmrun.lab.train import weights
from nmrun.ranges import START
from nmrun.step.activations import SparseActivations


@dataclass(frozen=True)
class Distilled:
    """A task's loss with a teacher's term: of a network like the one that is trained, frozen."""

    task: Categorical
    teacher: nn.Module
    weight: float
    temperature: float

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        logits = self.task.logits(model, batch)
        with torch.no_grad():
            teacher_logits = self.task.logits(self.teacher, batch)
        term = divergence(logits, teacher_logits, self.temperature)
        return (1 - self.weight) * self.task.loss_of(logits, batch) + self.weight * term


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """``T^2 * KL(softmax(teacher / T) || softmax(student / T))`` in float32, of logits (...,
    classes)."""
    log_student, log_teacher = (
        functional.log_softmax(each.flatten(0, -2).float() / temperature, -1)
        for each in (student, teacher)
    )
    term = functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return temperature**2 * term


def loss_of(config: Config, task: Task, model: nn.Module) -> Distilled:
    """The loss with a teacher's term. ``model`` is as it begins; it is copied for a teacher.

    ConfigError for a task without logits over classes, and for a teacher that is not there or of
    another architecture.
    """
    trainer = config.trainer
    assert trainer.distill is not None
    setting = f"trainer.distill={trainer.distill}"
    if trainer.distributed == "fsdp":
        raise ConfigError(
            f"{setting} keeps a whole teacher in every process, and trainer.distributed=fsdp keeps "
            "shards: use trainer.distributed=ddp"
        )
    if not isinstance(task, Categorical) or task.inputs.get("classes") == 1:
        raise ConfigError(
            f"{setting} compares distributions over classes or tokens, and the task of "
            f"dataset={config.dataset.name} has none"
        )
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if trainer.distill != START:
        weights.load(teacher, trainer.distill, setting)
        weights.check_alike(config, trainer.distill, setting, ("heads", "activation", "pooling"))
        SparseActivations(teacher, activations_of(weights_in(trainer.distill)[0].config))
    return Distilled(task, teacher, trainer.distill_weight, trainer.distill_temperature)
