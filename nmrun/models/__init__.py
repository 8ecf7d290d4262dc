"""The models by name. Each is built from its config and what it has to know of the data, such as the number of classes."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from torch import nn

from nmrun.errors import ConfigError

MODELS = {
    "small_conv": "nmrun.models.small_conv",
    "mlp": "nmrun.models.mlp",
    "resnet18": "nmrun.models.resnet",
}


def build(config: dict[str, Any], inputs: dict[str, Any]) -> nn.Module:
    """The model of a ``model:`` config for a task's ``inputs``: ``shape`` (channels, height, width) and ``classes`` of images.

    Raises ConfigError for an unknown name, and for a model that is made for other data.
    """
    name = config["name"]
    if name not in MODELS:
        near = difflib.get_close_matches(str(name), MODELS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"model.name={name}: no such model; {hint}There are {', '.join(MODELS)}")
    options = {key: value for key, value in config.items() if key not in ("name", "include", "exclude")}
    builder = importlib.import_module(MODELS[name]).build
    needed = [key for key in inspect.signature(builder).parameters if key not in options]
    if set(needed) != set(inputs):
        raise ConfigError(f"model={name} is made from {' and '.join(needed)}, where this data set has {' and '.join(inputs)}")
    model: nn.Module = builder(**inputs, **options)
    return model
