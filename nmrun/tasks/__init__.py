"""The task of a config: which data set, with which objective."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from nmrun.errors import ConfigError
from nmrun.registry import find
from nmrun.settings.data_groups import OwnDataset
from nmrun.tasks.base import Adopted, Task

if TYPE_CHECKING:
    from nmrun.settings.config import Config

DATASETS = {
    "digits": "nmrun.data.digits.build",
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), "nmrun.data.images.build"),
    "image_folder": "nmrun.data.image_folder.build",
    "imagenet": "nmrun.data.imagenet.build",
    "generated_shapes": "nmrun.data.generated_shapes.build",
    "coco": "nmrun.data.coco.build",
    "generated_motion": "nmrun.data.generated_motion.build",
    "sintel": "nmrun.data.optical_flow.sintel",
    "flying_chairs": "nmrun.data.optical_flow.flying_chairs",
    "generated_text": "nmrun.data.generated_text.build",
    "glue": "nmrun.data.glue.build",
    "glue_text": "nmrun.data.glue_text.build",
    "generated_questions": "nmrun.data.generated_questions.build",
    "squad": "nmrun.data.squad.build",
    "stdlib_text": "nmrun.data.stdlib_text.build",
    "text": "nmrun.data.text.build",
    "hub_text": "nmrun.data.hub_text.build",
    "shakespeare": "nmrun.data.shakespeare.build",
    "wikitext2": "nmrun.data.wikitext.build",
    "wikitext103": "nmrun.data.wikitext.build",
    "token_bin": "nmrun.data.token_bin.build",
    "copy_reverse": "nmrun.data.copy_reverse.build",
    "multi30k": "nmrun.data.multi30k.build",
    "fairseq": "nmrun.data.translation.build",
}


def build(config: Config, device: torch.device) -> Task:
    """Build the task of a run.

    Args:
        config: the run's whole config; ``dataset`` names the data set.
        device: where batches go.

    Returns:
        What ``build(config, device)`` of the data set's module gives, or the function that
        ``dataset._target_`` names; without a test split where ``trainer.test`` is false.

    Raises:
        ConfigError: for an unknown data set, and for data that is missing or unusable.
    """
    if isinstance(config.dataset, OwnDataset):
        task = _own(config.dataset.target, config, device)
    else:
        task = find("dataset.name", config.dataset.name, DATASETS)(config, device)
    if not config.trainer.test:
        task.has_test = False
    return task


def _own(target: str, config: Config, device: torch.device) -> Task:
    builder = find("dataset._target_", target, {})
    try:
        own: Any = builder(config, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    knows_shares = (
        isinstance(own, Task) and "mine" in inspect.signature(own.micro_batches).parameters
    )
    return own if knows_shares else Adopted(own)
