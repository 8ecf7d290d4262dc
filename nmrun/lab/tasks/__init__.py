"""The task of a config: which data set, with which objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmrun.errors import refused
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
        from nmrun.lab.tasks.base import own_task

        builder = find("dataset._target_", config.dataset.target, {})
        with refused("", ValueError):
            made = builder(config, device)
        task = own_task(made)
    else:
        task = find_builder("dataset", config.dataset.name)(config, device)
    if not config.trainer.test:
        task.has_test = False
    return task
