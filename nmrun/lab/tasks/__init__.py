"""The task of a config: which data set, with which objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import OwnDataset
from nmrun.lab.keys.options import find_builder
from nmrun.registry import find

if TYPE_CHECKING:  # what a mistake needs of this package is found without torch
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.base import Task


def build(config: Config, device: torch.device) -> Task:
    """The task of a run: what ``build(config, device)`` of its data set gives, or what
    ``dataset._target_`` names. Without a test split where ``trainer.test`` is false.

    Raises ConfigError for an unknown data set, and for data that are missing or unusable.
    """
    if isinstance(config.dataset, OwnDataset):
        task = _own_task(config.dataset.target, config, device)
    else:
        task = find_builder("dataset", config.dataset.name)(config, device)
    if not isinstance(getattr(task, "higher_is_better", None), bool):
        raise ConfigError(
            f"dataset={config.dataset.name}: its task needs higher_is_better, True or False: whether "
            "higher values of its metric are better"
        )
    if not config.trainer.test:
        task.has_test = False
    return task


def _own_task(target: str, config: Config, device: torch.device) -> Task:
    from nmrun.lab.tasks.base import own_task

    builder = find("dataset._target_", target, {})
    try:
        made = builder(config, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not hasattr(made, "micro_batches"):
        raise ConfigError(
            f"dataset._target_={target} returned a {type(made).__name__}, and no task as "
            "nmrun.lab.tasks.base.Task is"
        )
    task: Task = own_task(made)
    return task
