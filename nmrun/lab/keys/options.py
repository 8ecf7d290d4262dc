"""The options of each group of the config by name, and the keys of each: type, range, default and
meaning of a key stand in one field of a dataclass.

::

    lr: Annotated[float, number(0, open_low=True), "learning rate, which the schedule scales"] = 1e-3

A class may give an inherited key another default, another meaning or another range; what it leaves
out is as above it: ``lr: float = 0.05``.

Recipes import torch, and help must not. So what nmrun's own classes say stands in ``recipes.json``,
which ``docs/generate.py`` writes; any other class is imported. Another installed package adds a
data set or model by an entry point of the group ``nmrun.datasets`` or ``nmrun.models``, such as
``tumours = "mypkg.keys:Tumours"``. A name of nmrun's own is not theirs to take. A user's folder of
YAML files adds presets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from nmrun import ranges, recipes, registry
from nmrun.errors import ConfigError, refused
from nmrun.lab.runs import documents
from nmrun.patterns import USUAL, Pattern
from nmrun.ranges import START, WEIGHTS, Check, Search

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = (
    "dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "track",
)  # fmt: skip
UNNAMED = {"sparsity": "groups.Sparsity", "trainer": "groups.Trainer"}  # without a key ``name``
NAMED = tuple(group for group in GROUPS if group not in UNNAMED)
ADDED = ("dataset", "model")  # groups to which other packages add options
RATIO = "sparsity"
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


# --- the keys of a class ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A key: its default as YAML reads it, its range, where ``nmrun tune`` looks for it, its
    meaning.

    ``default`` is None as well where the user has to give a value. Without a ``check`` it takes any
    value, without a ``search`` it is not tuned.
    """

    default: Any
    check: Check | None
    search: Search | None = None
    meaning: str = ""


@functools.cache
def fields(kind: type) -> Mapping[str, Field]:
    """The keys of a class beside ``name``: first its own, then those of each class above it."""
    above = kind.__mro__
    first = {key: place for place, base in enumerate(above) for key in _annotations(base)}
    stated: dict[str, dict[type, Any]] = {}  # a check, a search and a text, by their types
    for base in reversed(above):
        for name, annotation in _annotations(base).items():
            parts = {type(part): part for part in getattr(annotation, "__metadata__", ())}
            stated[name] = stated.get(name, {}) | parts
    keys = {}
    for key in sorted(dataclasses.fields(cast(Any, kind)), key=lambda key: first[key.name]):
        if key.init and key.name != "name":  # else it is state of a recipe
            default = None if key.default is dataclasses.MISSING else _as_yaml(key.default)
            said = stated[key.name]
            keys[key.name] = Field(default, said.get(Check), said.get(Search), said.get(str, ""))
    return keys


@functools.cache
def _annotations(base: type) -> dict[str, Any]:
    return inspect.get_annotations(base, eval_str=True)


def _as_yaml(value: Any) -> Any:
    """A default as YAML has it: a list for a tuple."""
    return [_as_yaml(item) for item in value] if isinstance(value, tuple | list) else value


def defaults(keys: Mapping[str, Field]) -> dict[str, Any]:
    return {key: field.default for key, field in keys.items()}


@dataclass(frozen=True)
class RecipeFacts:
    """What is on a recipe's class. ``about`` and ``module`` are the docstrings of both."""

    title: str
    takes_blocks: bool  # V:N:M patterns
    about: str
    module: str
    keys: Mapping[str, Field]


@functools.cache
def recipe_facts(path: str) -> RecipeFacts:
    """The facts of a class by its dotted path. Raises ValueError where it cannot be imported."""
    if path not in kept():
        return of_class(registry.imported(path, path))
    facts = kept()[path]
    keys = {
        key: Field(each["default"], _made(each["check"]), _made(each["search"]), each["meaning"])
        for key, each in facts["keys"].items()
    }
    return RecipeFacts(**{**facts, "keys": keys})


@functools.cache
def kept() -> dict[str, Any]:
    """What ``recipes.json`` has, by the dotted path of a class."""
    text = (files("nmrun.lab.keys") / "recipes.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _made(call: list[Any] | None) -> Any:
    """A check or a search: a name of ``nmrun.ranges`` with its arguments."""
    if call is None:
        return None
    name, arguments, options = call
    made = getattr(ranges, name)
    return made(*arguments, **options) if callable(made) else made


def of_class(kind: Any) -> RecipeFacts:
    """The facts as the class has them; what a key means is said below ``Args:``."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        about = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", about, re.M)
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
        meanings |= {name: " ".join(text.split()) for name, text in entries}
    return RecipeFacts(
        vars(kind).get("title") or kind.name,  # not that of a class above it
        kind.masks_are_largest and not kind.always_transposable,
        inspect.getdoc(kind) or "",
        inspect.getdoc(inspect.getmodule(kind)) or "",
        {
            key.name: dataclasses.replace(
                fields(kind)[key.name], meaning=meanings.get(key.name, "")
            )
            for key in dataclasses.fields(kind)
            if key.name in fields(kind)
        },
    )


# --- options by name --------------------------------------------------------------------------------


def names(group: str) -> list[str]:
    """The options of a group; of ``sparsity``, which takes any ratio, the usual ones."""
    if group == "recipe":
        return [*recipes.RECIPES, "custom", *recipes.installed()]
    if group in UNNAMED:
        return ["dense", *USUAL] if group == RATIO else ["default"]
    return list(CLASSES[group] | dict.fromkeys(points(group)))


def points(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; none is imported."""
    return registry.installed(f"nmrun.{group}s") if group in ADDED else {}


def kind(group: str, name: str = "") -> Any:
    """The class of an option's keys; ``trainer``, ``sparsity`` and the keys in no group (empty)
    have one for all.

    Raises KeyError for recipes and for a name that there is not, ConfigError where another
    package's class cannot be imported or is none of keys.
    """
    path = UNNAMED.get(group) or CLASSES.get(group, {}).get(name) if group else "groups.Run"
    if path is None:
        return _of_others(group, name)
    module, _, leaf = path.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), leaf)


@functools.cache
def _of_others(group: str, name: str) -> Any:
    from nmrun.lab.keys.groups import Named

    point = points(group)[name]
    missing = f"{group}={name}: {point.value} cannot be imported: "
    with refused(missing, ImportError, AttributeError):
        cls = point.load()
    built_by = getattr(cls, "builder", "")
    if not (built_by and isinstance(cls, type) and issubclass(cls, Named)):
        raise ConfigError(f"{group}={name}: {point.value} is no class of keys with a builder")
    return cls


def keys(group: str, name: str = "") -> Mapping[str, Field]:
    """The keys of an option beside its name; none of a recipe of others, which knows its keys.

    Raises as :func:`kind`, of recipes as well.
    """
    if group != "recipe":
        return fields(kind(group, name))
    if name in recipes.RECIPES:
        return recipe_facts(recipes.RECIPES[name]).keys
    if name not in ("custom", *recipes.installed()):
        raise KeyError(name)
    return {}


def node(group: str, name: str) -> dict[str, Any] | None:
    """The config of an option, ``{name: sgd, lr: 0.05, ...}``, of ``sparsity`` of any ratio; None
    where there is no such option. Raises PatternError for a ratio that is none."""
    if group == RATIO and ":" in name:
        return defaults(keys(group)) | ratio(Pattern.parse(name))
    if group in UNNAMED and name not in names(group):
        return None
    try:
        values = defaults(keys(group, name))
    except KeyError:
        return None
    if not group or group in UNNAMED:
        return values
    target = recipes.installed().get(name) if group == "recipe" else None
    return {"name": name, **values, **({"_target_": target} if target else {})}


def ratio(pattern: Pattern) -> dict[str, int]:
    """The keys of a pattern."""
    return {"n": pattern.n, "m": pattern.m, "v": pattern.v}


def of_config(
    plain: Mapping[str, Any], groups: Iterable[str] = ("", *NAMED, *UNNAMED)
) -> dict[str, Mapping[str, Field]]:
    """The keys of a config by group (empty: those in none). A group with something of the user's
    own or with an unknown option is left out."""
    every = {}
    for group in groups:
        content = plain.get(group) if group else plain
        if isinstance(content, dict) and (group in UNNAMED or "_target_" not in content):
            with contextlib.suppress(KeyError):
                every[group] = keys(group, str(content.get("name")))
    return every


def weights_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Where the weights are that a run reads, by the keys that name them (``nmrun.ranges.WEIGHTS``):
    ``init``, ``trainer.distill``, and hyperparameters such as ``recipe.masks``."""
    named = {
        f"{group}.{key}".lstrip("."): (config[group] if group else config).get(key)
        for group, its_keys in of_config(config, ("", "trainer", "recipe")).items()
        for key, field in its_keys.items()
        if field.check is WEIGHTS
    }
    return {
        key: place
        for key, place in named.items()
        if place is not None and (key, place) != ("trainer.distill", START)
    }


def find_builder(group: str, name: str) -> Any:
    """What builds ``group=name``: the ``builder`` of its class. Raises ConfigError for an unknown
    name.
    """
    registry.choose(f"{group}.name", name, names(group))
    return registry.find(f"{group}.name", name, {name: kind(group, name).builder})


# --- files ------------------------------------------------------------------------------------------


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
