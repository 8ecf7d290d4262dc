"""Models, each built from its config and facts of the data, such as the classes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from nmrun.errors import ConfigError, RunError, first_line
from nmrun.lab.keys.options import CLASSES, find_builder
from nmrun.registry import find


def build(config: dict[str, Any], inputs: dict[str, Any]) -> nn.Module:
    """Build the model of the ``model:`` group of a config, by its builder or the function that
    ``_target_`` names.

    ``inputs`` are facts of the data by the builder's argument names; of images ``shape`` (channels,
    height, width) and ``classes``. Raises ConfigError for an unknown name, and for a model that is
    made for other data; RunError for one that memory does not hold.
    """
    name, target = config["name"], config.get("_target_")
    builder = find("model._target_", target, {}) if target else find_builder("model", str(name))
    signature = inspect.signature(builder)
    unasked = {"_target_", "include", "exclude"} | ({"name"} - set(signature.parameters))
    options = {key: value for key, value in config.items() if key not in unasked}
    try:
        signature.bind(**inputs, **options)
    except TypeError as error:
        takes, has = ", ".join(signature.parameters), " and ".join(inputs) or "none of these"
        raise ConfigError(
            f"model={name}: {error}; it is made from {takes}, where this data set has {has}"
        ) from None
    shape = inputs.get("shape", ())
    if len(shape) == 1 and name != "mlp" and name in CLASSES["model"]:
        raise ConfigError(
            f"model={name} takes images, and this data set has {shape[0]} features an item: "
            "model=mlp takes these"
        )
    try:
        model = builder(**inputs, **options)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise RunError(f"model={name}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        returned = type(model).__name__
        raise ConfigError(f"model={name}: its builder returned a {returned}, no torch.nn.Module")
    return model
