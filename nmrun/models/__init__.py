"""The models by name. Each is built from its config, the shape of one input and the number of classes."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from torch import nn

from nmrun.errors import ConfigError

MODELS = {
    "small_conv": "nmrun.models.small_conv",
    "mlp": "nmrun.models.mlp",
    "resnet18": "nmrun.models.resnet",
}


def build(config: dict[str, Any], shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model of a ``model:`` config for inputs of ``shape`` (channels, height, width). ConfigError for an unknown name."""
    name = config["name"]
    if name not in MODELS:
        near = difflib.get_close_matches(str(name), MODELS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"model.name={name}: no such model; {hint}There are {', '.join(MODELS)}")
    options = {key: value for key, value in config.items() if key not in ("name", "include", "exclude")}
    model: nn.Module = importlib.import_module(MODELS[name]).build(shape, classes, **options)
    return model
