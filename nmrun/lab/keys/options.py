"""The options of each group of the config by name, and the class of each one's keys.

Another installed package adds a data set or model by an entry point of the group ``nmrun.datasets``
or ``nmrun.models``, such as ``tumours = "mypkg.keys:Tumours"``. A name of nmrun's own is not theirs
to take. A user's folder of YAML files adds presets.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nmrun import recipes, registry
from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.fields import Field, fields
from nmrun.lab.keys.ranges import START
from nmrun.lab.keys.recipe_facts import recipe_facts
from nmrun.lab.runs import documents
from nmrun.patterns import USUAL
from nmrun.ranges import WEIGHTS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = (
    "dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "track",
)  # fmt: skip
UNNAMED = {"sparsity": "groups.Sparsity", "trainer": "groups.Trainer"}  # without a key ``name``
NAMED = tuple(group for group in GROUPS if group not in UNNAMED)
ADDED = ("dataset", "model")  # groups to which other packages add options
# the class of each option's keys, in this package; those of recipes are their own
CLASSES: dict[str, dict[str, str]] = {
    "dataset": {
        "digits": "datasets.Digits",
        "cifar10": "datasets.Cifar10",
        "cifar100": "datasets.Cifar100",
        "fashion_mnist": "datasets.FashionMNIST",
        "image_folder": "datasets.ImageFolder",
        "imagenet": "datasets.ImageNet",
        "generated_text": "datasets.GeneratedText",
        "glue": "datasets.Glue",
        "labelled_text": "datasets.LabelledText",
        "stdlib_text": "datasets.StdlibText",
        "stdlib_text_all": "datasets.StdlibTextAll",
        "text": "datasets.TextFiles",
        "hub_text": "datasets.HubText",
        "shakespeare": "datasets.Shakespeare",
        "wikitext2": "datasets.WikiText2",
        "wikitext103": "datasets.WikiText103",
        "token_bin": "datasets.TokenBin",
    },
    "model": {
        "small_conv": "models.SmallConv",
        "small_conv_bn": "models.SmallConvBN",
        "mlp": "models.MLP",
        "resnet20": "models.ResNet20",
        "resnet32": "models.ResNet32",
        "resnet18": "models.ResNet18",
        "resnet34": "models.ResNet34",
        "resnet50": "models.ResNet50",
        "densenet121": "models.DenseNet121",
        "vgg16_bn": "models.VGG16",
        "mobilenet_v2": "models.MobileNetV2",
        "swin_v2_t": "models.SwinT",
        "swin_v2_b": "models.SwinB",
        "vit_tiny": "models.ViTTiny",
        "vit_small": "models.ViTSmall",
        "vit_base": "models.ViTBase",
        "deit_tiny": "models.DeiTTiny",
        "deit_small": "models.DeiTSmall",
        "timm": "models.Timm",
        "text_encoder": "models.TextEncoder",
        "gpt_tiny": "models.GPTTiny",
        "gpt2": "models.GPT2",
        "gpt2_medium": "models.GPT2Medium",
        "gpt2_large": "models.GPT2Large",
        "gpt2_xl": "models.GPT2XL",
        "gpt_classifier": "models.GPTClassifier",
        "hf_encoder": "models.HFEncoder",
        "hf_gpt2": "models.HFGPT2",
        "hf_causal": "models.HFCausal",
    },
    "optimizer": {
        "adam": "groups.AdamKeys",
        "adamw": "groups.AdamWKeys",
        "sgd": "groups.SGDKeys",
        "custom": "groups.CustomOptimizer",
    },
    "schedule": {
        "constant": "groups.Constant",
        "cosine": "groups.Cosine",
        "linear": "groups.Linear",
        "inverse_sqrt": "groups.InverseSqrt",
        "multistep": "groups.MultiStep",
        "custom": "groups.CustomSchedule",
    },
    "track": {
        "local": "groups.Local",
        "wandb": "groups.WandB",
        "tensorboard": "groups.TensorBoard",
        "mlflow": "groups.MLflow",
    },
}


def names(group: str) -> list[str]:
    """The options of a group; of ``sparsity``, which takes any ratio, the usual ones."""
    if group == "recipe":
        return [*recipes.RECIPES, "custom", *recipes.installed()]
    if group in UNNAMED:
        return ["dense", *USUAL] if group == "sparsity" else ["default"]
    return list(CLASSES[group] | dict.fromkeys(points(group)))


def kind(group: str, name: str = "") -> Any:
    """The class of an option's keys; ``trainer``, ``sparsity`` and the keys in no group (empty)
    have one for all.

    Raises KeyError for recipes and for a name that there is not, ConfigError where another
    package's class cannot be imported or is none of keys.
    """
    path = UNNAMED.get(group) or CLASSES.get(group, {}).get(name) if group else "groups.Run"
    if path is None:
        return _load(group, name)
    module, _, leaf = path.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), leaf)


def keys(group: str, name: str = "") -> Mapping[str, Field]:
    """The keys of an option beside its name; none of a recipe of others, which knows its keys.

    Raises as :func:`kind`, of recipes as well.
    """
    if group != "recipe":
        return fields(kind(group, name))
    if name not in names(group):
        raise KeyError(name)
    return recipe_facts(recipes.RECIPES[name]).keys if name in recipes.RECIPES else {}


def weights_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Where the weights are that a run reads, by the keys that name them (``nmrun.ranges.WEIGHTS``):
    ``init``, ``trainer.distill``, and hyperparameters such as ``recipe.masks``."""
    name = config["recipe"].get("name")
    groups = {"": keys(""), "trainer": keys("trainer")}
    groups |= {"recipe": keys("recipe", name)} if name in recipes.RECIPES else {}
    named = {
        f"{group}.{key}".lstrip("."): (config.get(group, {}) if group else config).get(key)
        for group, fields in groups.items()
        for key, field in fields.items()
        if field.check is WEIGHTS
    }
    if named["trainer.distill"] == START:
        named["trainer.distill"] = None
    return {key: place for key, place in named.items() if place is not None}


def points(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; none is imported."""
    return registry.installed(f"nmrun.{group}s") if group in ADDED else {}


@functools.cache
def _load(group: str, name: str) -> Any:
    from nmrun.lab.keys.groups import Named

    point = points(group)[name]
    missing = f"{group}={name}: {point.value} cannot be imported: "
    with refused(missing, ImportError, AttributeError):
        cls = point.load()
    built_by = getattr(cls, "builder", "")
    if not (built_by and isinstance(cls, type) and issubclass(cls, Named)):
        raise ConfigError(f"{group}={name}: {point.value} is no class of keys with a builder")
    return cls


def find_builder(group: str, name: str) -> Any:
    """What builds ``group=name``: the ``builder`` of its class. Raises ConfigError for an unknown
    name.
    """
    registry.choose(f"{group}.name", name, names(group))
    return registry.find(f"{group}.name", name, {name: kind(group, name).builder})


def read_yaml(file: Path | Traversable, what: str) -> Any:
    """The content of a file, which errors call ``what``. Raises ConfigError where it cannot be
    read.
    """
    try:
        return documents.yaml_value(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(unreadable(error, what)) from None


def unreadable(error: OSError | UnicodeDecodeError | yaml.YAMLError, what: str = "") -> str:
    """The line for a file that could not be read, called ``what`` or as the error calls it."""
    if isinstance(error, OSError):
        return f"{what or error.filename}: {error.strerror or error}"
    if isinstance(error, UnicodeDecodeError):
        return f"{what}: not a text in UTF-8: {error.reason} at byte {error.start}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{what}: not YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark
    message = ", ".join(filter(None, (error.context, error.problem)))
    return f"{what or mark.name}, line {mark.line + 1}: not YAML: {message}"


def in_folder(config_dir: str | None) -> dict[str, list[Path]]:
    """The configs in a folder of the user's own, by group. Raises ConfigError where there is no
    such folder.
    """
    if config_dir is None:
        return {}
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    folders = sorted(folder for folder in Path(config_dir).iterdir() if folder.is_dir())
    by_group = {folder.name: sorted(folder.glob("*.yaml")) for folder in folders}
    return {
        group: [file for file in files if file.is_file()]
        for group, files in by_group.items()
        if files
    }
