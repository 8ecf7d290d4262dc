"""Models, each built from its config and facts of the data, such as the classes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from nmrun.errors import ConfigError, RunError, first_line
from nmrun.lab.keys.options import CLASSES, find_builder
from nmrun.registry import find, no_such


def build(config: dict[str, Any], inputs: dict[str, Any]) -> nn.Module:
    """Build the model of the ``model:`` group of a config, by its builder or the function that
    ``_target_`` names.

    ``inputs`` are facts of the data by the builder's argument names; of images ``shape`` (channels,
    height, width) and ``classes``. Raises ConfigError for an unknown name, and for a model that is
    made for other data; RunError for one that memory does not hold.
    """
    name, target = config["name"], config.get("_target_")
    builder = find("model._target_", target, {}) if target else find_builder("model", str(name))
    parameters = inspect.signature(builder).parameters
    unasked = {"_target_", "include", "exclude"} | ({"name"} - set(parameters))
    options = {key: value for key, value in config.items() if key not in unasked}
    needed = [
        key
        for key, parameter in parameters.items()
        if key not in options
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in options if target and not takes_any else ():
        if key not in parameters:
            of = [each for each in parameters if each not in inputs]
            raise ConfigError(f"model.{key}: {no_such(f'argument of {target}', key, of)}")
    if set(needed) - set(inputs) or (set(inputs) - set(parameters) and not takes_any):
        has = " and ".join(inputs) or "none of these"
        made = f"model={name} is made from {' and '.join(needed)}, where this data set has {has}"
        raise ConfigError(made)
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
