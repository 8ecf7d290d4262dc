"""The task of a config: which data set, with which objective."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from nmrun.errors import ConfigError
from nmrun.tasks.vision import Classification

DATASETS = ("digits",)


def build(config: Any, device: torch.device) -> Classification:
    """The task for a run's whole config (``nmrun.schema.Config``). Raises ConfigError for an unknown data set."""
    name, options = config.dataset["name"], {key: value for key, value in config.dataset.items() if key != "name"}
    if name not in DATASETS:
        near = difflib.get_close_matches(str(name), DATASETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"dataset.name={name}: no such data set; {hint}There are {', '.join(DATASETS)}")
    from nmrun.data import digits

    return Classification(
        digits.load(**options),
        digits.CLASSES,
        batch_size=config.trainer["batch_size"],
        seed=config.seed,
        label_smoothing=config.trainer["label_smoothing"],
        limit_batches=config.trainer["limit_batches"],
        device=device,
    )
