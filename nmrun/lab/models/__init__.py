"""The models by name. Each is built from its config and facts of the data, such as the classes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from nmrun.errors import ConfigError
from nmrun.lab.keys.options import find_builder
from nmrun.registry import find

MODELS = {
    "small_conv": "nmrun.lab.models.images.small_conv",
    "small_conv_bn": "nmrun.lab.models.images.small_conv_bn",
    "mlp": "nmrun.lab.models.images.MLPNetwork",
    **dict.fromkeys(("resnet20", "resnet32"), "nmrun.lab.models.images.CifarResNet"),
    **dict.fromkeys(
        (
            "resnet18",
            "resnet34",
            "resnet50",
            "densenet121",
            "vgg16_bn",
            "mobilenet_v2",
            "swin_v2_t",
            "swin_v2_b",
        ),
        "nmrun.lab.models.images.of_torchvision",
    ),
    **dict.fromkeys(
        ("vit_tiny", "vit_small", "vit_base", "deit_tiny", "deit_small"),
        "nmrun.lab.models.images.vit",
    ),
    "timm": "nmrun.lab.models.images.of_timm",
    "text_encoder": "nmrun.lab.models.texts.TextEncoderNetwork",
    "hf_encoder": "nmrun.lab.models.hugging_face.encoder",
    **dict.fromkeys(
        ("gpt_tiny", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"),
        "nmrun.lab.models.texts.GPTNetwork",
    ),
    "gpt_classifier": "nmrun.lab.models.texts.gpt_classifier",
    "hf_gpt2": "nmrun.lab.models.hugging_face.gpt2",
    "hf_causal": "nmrun.lab.models.hugging_face.causal",
}


def build(config: dict[str, Any], inputs: dict[str, Any]) -> nn.Module:
    """Build the model of the ``model:`` group of a config, by its builder or the function that
    ``_target_`` names.

    ``inputs`` are facts of the data by the builder's argument names; of images ``shape`` (channels,
    height, width) and ``classes``. Raises ConfigError for an unknown name, and for a model that is
    made for other data.
    """
    name, target = config["name"], config.get("_target_")
    builder = (
        find("model._target_", target, {}) if target else find_builder("model", str(name), MODELS)
    )
    parameters = inspect.signature(builder).parameters
    unasked = {"_target_", "include", "exclude"} | ({"name"} - set(parameters))
    options = {key: value for key, value in config.items() if key not in unasked}
    needed = [key for key in parameters if key not in options]
    if set(needed) != set(inputs):
        raise ConfigError(
            f"model={name} is made from {' and '.join(needed)}, where this data set has {' and '.join(inputs) or 'none of these'}"
        )
    shape = inputs.get("shape", ())
    if len(shape) == 1 and name != "mlp" and name in MODELS:
        raise ConfigError(
            f"model={name} takes images, and this data set has {shape[0]} features an item: "
            "model=mlp takes these"
        )
    model: nn.Module = builder(**inputs, **options)
    return model
