"""The task of a config: which data set, with which objective."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch

from nmrun.errors import ConfigError
from nmrun.registry import imported
from nmrun.tasks.base import Adopted, Task

DATASETS = {
    "digits": "nmrun.data.digits",
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), "nmrun.data.images"),
    "image_folder": "nmrun.data.image_folder",
    "imagenet": "nmrun.data.imagenet",
    "generated_text": "nmrun.data.generated_text",
    "glue": "nmrun.data.glue",
    "stdlib_text": "nmrun.data.stdlib_text",
    "text": "nmrun.data.text",
    "shakespeare": "nmrun.data.shakespeare",
    "wikitext2": "nmrun.data.wikitext",
    "wikitext103": "nmrun.data.wikitext",
    "token_bin": "nmrun.data.token_bin",
    "copy_reverse": "nmrun.data.copy_reverse",
    "multi30k": "nmrun.data.multi30k",
    "fairseq": "nmrun.data.translation",
}


def build(config: Any, device: torch.device) -> Task:
    """The task for a run's whole config (``nmrun.config.schema.Config``): ``build(config, device)`` of the data set's module, or the function
    that ``dataset._target_`` names.

    Raises ConfigError for an unknown data set, and for data that is missing or unusable.
    """
    name, target = config.dataset["name"], config.dataset.get("_target_")
    if target is not None:
        try:
            own: Any = imported(target, f"dataset._target_={target}")(config, device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        knows_shares = isinstance(own, Task) and "mine" in inspect.signature(own.micro_batches).parameters
        return own if knows_shares else Adopted(own)
    if name not in DATASETS:
        near = difflib.get_close_matches(str(name), DATASETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"dataset.name={name}: no such data set; {hint}There are {', '.join(DATASETS)}")
    task: Task = importlib.import_module(DATASETS[name]).build(config, device)
    return task
