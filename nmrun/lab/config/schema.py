"""The composed config, checked before torch is imported: each value, keys that depend on each
other, and what the run itself would refuse. All problems are found at once.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.errors import ConfigError, extra, first_line, raise_all
from nmrun.lab.config import command_line, sources
from nmrun.lab.config.suggestions import no_key, wrong_keys
from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, Config, flatten
from nmrun.lab.keys.datasets import RUNNING_TEXT
from nmrun.lab.keys.models import Model
from nmrun.lab.keys.options import NAMED, UNNAMED, Field, recipe_facts
from nmrun.lab.runs import run_folder
from nmrun.lab.runs.run_folder import expanded, own_weights, weights_in
from nmrun.patterns import Pattern, PatternError, written
from nmrun.ranges import AS_DENSE, START, TEXT, Check, converted, is_path, value_text, wrong_values
from nmrun.recipes import RECIPES, installed
from nmrun.registry import no_such

# a recipe without conditions: a config must have one, also where none trains
STAND_IN = "ste"
RECIPE_CLASS = "package.Class, a subclass of nmrun.recipes.base.Recipe"
# the package that an option needs, and the extra of nmrun that it comes with
PACKAGES = {
    "track=tensorboard": ("tensorboard", "tensorboard"),
    "track=mlflow": ("mlflow", "mlflow"),
    "model=timm": ("timm", "timm"),
    **dict.fromkeys(("dataset=hub_text", "dataset=labelled_text"), ("datasets", "texts")),
    **dict.fromkeys(
        ("model=hf_encoder", "model=hf_gpt2", "model=hf_causal"), ("transformers", "transformers")
    ),
}
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/nvmap")  # CUDA, WSL, ROCm, Jetson


def check(composed: DictConfig, unsure: Collection[str] = ()) -> Config:
    """Resolve and check a composed config. Raises ConfigError with every problem, one line each;
    nothing is concluded from keys and groups that are ``unsure``.

    The dense recipe ignores the ratio, and ``sparsity=dense`` makes any recipe the dense run, so
    both are the same run.
    """
    plain = resolve(composed)
    if isinstance(plain.get("output_dir"), str):
        plain["output_dir"] = str(expanded(plain["output_dir"]))
    raise_all(problems(plain, unsure))
    for key, value in converted(*_checked(plain)).items():
        _put(plain, key, value)
    plain["optimizer"]["decay"] = _decay(plain["optimizer"], plain["model"])
    plain["recipe"]["name"] = _recipe_name(plain["recipe"])
    for group in ("dataset", "model"):  # of one's own, a number may be a name
        plain[group]["name"] = str(plain[group]["name"])
    if plain["sparsity"]["n"] is None or plain["recipe"] == {"name": "dense"}:
        no_ratio = options.defaults(options.keys("sparsity"))
        return Config({**plain, "recipe": {"name": "dense"}, "sparsity": no_ratio}, None)
    pattern = Pattern.parse(written(plain["sparsity"]))
    plain["sparsity"] |= options.ratio(pattern)  # numbers, also where a variable gave a text
    return Config(plain, pattern)


def resolve(composed: DictConfig) -> dict[str, Any]:
    """The config as plain data. Raises ConfigError where a value is missing or refers to nothing."""
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        message, place = first_line(error), error.full_key
        raise ConfigError(
            message if not place or place in message else f"{place}: {message}"
        ) from None
    plain.pop("hydra", None)
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    if "${" in str(unresolved):
        _read_texts(flatten(unresolved), plain)
    for group in plain.values():
        if isinstance(group, dict):
            group.pop(SOURCE, None)  # a fact of an earlier run, whose config this was
    if "_target_" in _group(plain, "model"):  # has those of its keys that all models have
        plain["model"] = options.defaults(options.fields(Model)) | plain["model"]
    return dict(plain)


def _read_texts(unresolved: Mapping[str, Any], plain: dict[str, Any]) -> None:
    """Read a text that an interpolation gave, as ``${oc.env:LR}`` does, as on the command line: where
    the key takes no such text."""
    checks, values = _checked(plain)
    for key, value in values.items():
        interpolated = "${" in str(unresolved.get(key)) and isinstance(value, str)
        if interpolated and not checks[key].holds(value):
            with contextlib.suppress(HydraException):
                _put(plain, key, command_line.parse(f"{key}={value}").value())


def _checked(
    plain: Mapping[str, Any], known: Mapping[str, Mapping[str, Field]] | None = None
) -> tuple[dict[str, Check], dict[str, Any]]:
    """The ranges of a config's keys, and their values; ``known`` is as of ``options.of_config``."""
    checks, values = dict[str, Check](), dict[str, Any]()
    for group, keys in (known or options.of_config(plain)).items():
        content = plain[group] if group else plain
        for key, field in keys.items():
            if field.check is not None and key in content:
                name = f"{group}.{key}" if group else key
                checks[name], values[name] = field.check, content[key]
    return checks, values


def _put(plain: dict[str, Any], key: str, value: Any) -> None:
    group, _, leaf = key.rpartition(".")
    (plain[group] if group else plain)[leaf] = value


def _group(plain: Mapping[str, Any], group: str) -> dict[str, Any]:
    content = plain.get(group)
    return content if isinstance(content, dict) else {}


def problems(plain: dict[str, Any], unsure: Collection[str] = ()) -> list[str]:
    """Everything that is wrong with a resolved config, one line each. Keys and groups that are
    ``unsure`` are known to be wrong already and are not checked."""
    known, groups = options.of_config(plain), (*NAMED, *UNNAMED)
    keys = known[""]
    errors = {no_key(key, (*keys, *groups)): key for key in plain if key not in (*keys, *groups)}
    if "experiment" in plain:  # Hydra's own way is a package of the group's name
        errors = {"experiment=: its file begins with the line # @package _global_": "experiment"}
    errors |= {f"{key}: missing; a run needs it": key for key in keys if key not in plain}
    for group in groups:
        content = plain.get(group)
        if isinstance(content, dict):
            errors |= _wrong_group(group, content, known.get(group))
        else:
            errors[f"{group}: missing; a run needs it"] = group
    errors |= wrong_values(*_checked(plain, known), "")
    return [*errors, *broken(plain, {*unsure, *errors.values()})]


def _decay(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Which parameters decay: the setting, or what is usual for the model. Without weight decay the
    answer is always the same, so that the runs are one."""
    if optimizer["weight_decay"] == 0:
        return "all"
    kind = Model if "_target_" in model else options.kind("model", model["name"])
    return str(optimizer["decay"] or kind.decays)


def _wrong_group(
    group: str, content: dict[str, Any], keys: Collection[str] | None
) -> Iterator[tuple[str, str]]:
    """The problems of a group, such as unknown or missing keys, each with the key that is wrong.
    ``keys`` is None where they are not known."""
    own, name = group in ("dataset", "model", "recipe"), content.get("name")
    if own and "_target_" in content:
        yield from _wrong_own(group, content)
    elif group == "recipe" and name == "custom":
        yield f"recipe=custom needs recipe._target_={RECIPE_CLASS}", group
    elif keys is not None and (group != "recipe" or name in RECIPES):
        every = [*keys] if group in UNNAMED else ["name", *keys]
        if content.keys() != {*every}:
            yield from wrong_keys(group, every, content)
    elif name is None:
        how = "its file needs defaults: [OPTION], what it builds on"
        how += ", or name: and _target_: of your own" if own and group != "recipe" else ""
        yield f"{group}.name: missing; {how}", group
    else:
        names = [*RECIPES, "custom"] if group == "recipe" else options.names(group)
        line = no_such(group, value_text(name), names, f"nmrun help {group}")
        if "name_in_timm" in content:
            line += "; timm's networks are named by model.name_in_timm"
        elif own:
            line += "; a file of yours has _target_: module.name or defaults: [OPTION]"
        yield f"{group}.name={value_text(name)}: {line}", group


def _wrong_own(group: str, content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Likewise of something of the user's own."""
    target, name = str(content["_target_"]), content.get("name")
    if not is_path(target):
        takes = RECIPE_CLASS if group == "recipe" else "package.function"
        yield f"{group}._target_={target}: it takes {takes}", f"{group}._target_"
    elif group == "recipe":
        name = _recipe_name(content)
    if name is None and group != "recipe":
        line = f"{group}.name: missing; write name: NAME beside _target_: {target} in its file"
        yield line, f"{group}.name"
    elif name is not None and not re.fullmatch(r"(?!\.+$)[\w.-]+", str(name)):
        takes = "it names a folder: letters, digits, and . _ -, and not points alone"
        yield f"{group}.name={name}: {takes}", f"{group}.name"
    for key, value in content.items():
        try:
            json.dumps(value, sort_keys=True)  # as an id is made
        except TypeError:
            takes = "numbers, texts, true, false, null, and lists and dictionaries of them"
            yield f"{group}.{key}: it takes {takes}, with keys of one kind", f"{group}.{key}"


def _recipe_name(recipe: dict[str, Any]) -> str:
    """The name of a recipe; of a class of the user's own its dotted path, unless it has another."""
    name, target = str(recipe.get("name") or ""), str(recipe.get("_target_", ""))
    unnamed = name in ("", "custom") or name in RECIPES
    if not target or not unnamed:
        return name
    return next((given for given, path in installed().items() if path == target), target)


# --- keys that depend on each other -----------------------------------------------------------------


def broken(plain: dict[str, Any], bad: Collection[str]) -> Iterator[str]:
    """One line for each rule that a resolved config breaks. A rule ends where it asks for a key that
    is not there: one that the run does not have, or that is ``bad``, alone or with its group."""
    unused = {*bad, *(group for group in NAMED if "_target_" in _group(plain, group))}
    known = {
        key: value
        for key, value in flatten(plain).items()
        if key not in bad and key.partition(".")[0] not in unused
    }
    if {"sparsity.n", "sparsity.m", "sparsity.v"} <= known.keys():
        text = written(plain["sparsity"])
        if text == "dense":  # what the recipe says does not matter
            known = {key: value for key, value in known.items() if not key.startswith("recipe.")}
        elif known.get("recipe.name") != "dense":
            try:
                known["pattern"] = Pattern.parse(text)
            except PatternError as error:
                yield f"sparsity={text}: {error}"
    for rule in RULES:
        with contextlib.suppress(KeyError):
            yield from rule(known)


def _of_step(config: Mapping[str, Any]) -> Iterator[str]:
    recipe, optimizer = config["recipe.name"], config["optimizer.name"]
    if recipe == "step" and optimizer not in ("adam", "adamw"):
        yield (
            f"recipe=step freezes Adam's second moment, which {optimizer} has not: "
            "use optimizer=adam or adamw"
        )


def _phases(config: Mapping[str, Any]) -> Iterator[str]:
    for low, high in (("recipe.t_min", "recipe.t_max"), ("recipe.t_i", "recipe.t_f")):
        if config.get(low, 0) > config.get(high, 1):
            yield f"{low}={config[low]} is above {high}={config[high]}"
    if config["recipe.dense"] + config["recipe.final"] > 1:
        yield (
            f"recipe.dense={config['recipe.dense']} and recipe.final={config['recipe.final']} are "
            "fractions of one run: at most 1 together"
        )


def _blocks(config: Mapping[str, Any]) -> Iterator[str]:
    name, pattern = config["recipe.name"], config["pattern"]
    if pattern.v == 1:
        return
    taking = [each for each, path in RECIPES.items() if recipe_facts(path).takes_blocks]
    if name not in taking:
        yield (
            f"recipe={name} sparsity={pattern}: V:N:M masks are for recipes that keep the "
            f"largest weights ({', '.join(taking)})"
        )


def _equal_parts(config: Mapping[str, Any]) -> Iterator[str]:
    for size, parts, what in (
        ("model.width", "model.heads", "heads of the same size"),
        ("trainer.batch_size", "trainer.accumulate", "equal micro-batches"),
    ):
        if config.get(size, 0) % config.get(parts, 1):
            yield f"{size}={config[size]} cannot be split into {parts}={config[parts]} {what}"


def _nesterov(config: Mapping[str, Any]) -> Iterator[str]:
    if config["optimizer.nesterov"] and not config["optimizer.momentum"]:
        yield "optimizer.nesterov=true needs optimizer.momentum above 0"


def _length(config: Mapping[str, Any]) -> Iterator[str]:
    steps, budget = config["trainer.steps"], config["trainer.budget"]
    if steps is not None and budget not in (None, *AS_DENSE):
        yield (
            f"trainer.steps={steps} and trainer.budget={budget} each say how long the run is: "
            "give one of them"
        )
    average, epochs = config["trainer.average"], config["trainer.epochs"]
    if steps is None and budget is None and average > epochs:
        yield f"trainer.average={average}: there are trainer.epochs={epochs} to average over"


def _patience(config: Mapping[str, Any]) -> Iterator[str]:
    if config["trainer.patience"] is None:
        return
    patience = f"trainer.patience={config['trainer.patience']}"
    if config.get("trainer.average", 1) > 1:
        yield f"{patience}: trainer.average={config['trainer.average']} needs to know the last epochs"
    if config["trainer.evaluate"] == "dense":
        yield f"{patience}: with trainer.evaluate=dense no evaluation is the best"


def _parts_of_data(config: Mapping[str, Any]) -> Iterator[str]:
    val, test = config["dataset.val_fraction"], config["dataset.test_fraction"]
    if val + test >= 1:
        yield f"dataset.val_fraction={val} and dataset.test_fraction={test} leave nothing to train with"


def _acceleration(config: Mapping[str, Any]) -> Iterator[str]:
    way = config["trainer.acceleration"]
    products = f"trainer.acceleration={way}: 2:4 products"
    if way in ("auto", "off"):
        return
    if way != "force" and config["trainer.fp8"]:
        yield f"{products} by it go with trainer.fp8=false"
    elif not config["pattern"].fits_2_4 and not config["sparsity.overrides"]:
        yield (
            f"{products} take 2:4 weights and sparser ones whose groups fit in "
            f"(1:M, 2:M with M a multiple of 4), not {config['pattern']}"
        )


def _activations(config: Mapping[str, Any]) -> Iterator[str]:
    pattern, start = config["trainer.activations"], config["trainer.activations_dense_start"]
    end = config["trainer.activations_dense_end"]
    if pattern is not None and config.get("model.activation") == "gelu":
        yield (
            f"trainer.activations={pattern} prunes the outputs of squared ReLUs: it goes with "
            "model.activation=relu2"
        )
    if start + end >= 1:
        yield (
            f"trainer.activations_dense_start={start} and trainer.activations_dense_end={end} are "
            "shares of one run: less than 1 together"
        )


def _writable(config: Mapping[str, Any]) -> Iterator[str]:
    folder = Path(config["output_dir"])
    parents = [folder, *folder.absolute().parents]
    # os.path says no to a name that is too long for the file system
    existing = next((path for path in parents if os.path.exists(path)), Path("/"))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield f"output_dir={folder}: {existing} is not a folder that can be written to"


RULES = (
    *(_of_step, _phases, _blocks, _equal_parts, _nesterov, _length, _patience),
    *(_parts_of_data, _acceleration, _activations, _writable),
)


# --- what the run itself would refuse ---------------------------------------------------------------


def refusals(plain: dict[str, Any], on_this_machine: bool = True) -> Iterator[str]:
    """What the run itself would refuse after seconds, as far as a config, the names of files and
    this machine show it. A line each.

    Nothing else is wrong in ``plain``. ``on_this_machine``: whether the run is for it, not for one
    that a launcher finds.
    """
    builtin = {group for group in ("dataset", "model") if "_target_" not in plain[group]}
    for group, key in sources.OWN.items():
        yield from _unknown_package(f"{group}.{key}", plain[group].get(key))
    yield from _not_installed(plain, builtin)
    yield from _no_teacher(plain)
    if len(builtin) == 2:
        yield from _other_data(plain["dataset"]["name"], plain["model"]["name"])
    if on_this_machine:
        yield from _no_weights(plain)
        if "dataset" in builtin:
            yield from _no_files(plain["dataset"])
        yield from _no_pretrained(plain["dataset"], plain["model"])
        if no_gpu():
            yield from _needs_gpu(plain["trainer"])


def _unknown_package(key: str, target: Any) -> Iterator[str]:
    package = str(target).partition(".")[0]
    if target is None or (Path.cwd() / f"{package}.py").exists() or Path(package).is_dir():
        return
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        yield (
            f"{key}={target} cannot be imported: there is no {package}.py here and no "
            f"such package installed; PYTHONPATH=FOLDER lets nmrun look in another folder"
        )


def _not_installed(plain: dict[str, Any], builtin: Collection[str]) -> Iterator[str]:
    chosen = [f"track={name}" for name in (plain["track"]["name"], *plain["track"]["also"])]
    chosen += [f"{group}={plain[group]['name']}" for group in builtin]
    for option in dict.fromkeys(chosen):
        package, its_extra = PACKAGES.get(option, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            yield f"{option} needs {package}, which is not installed: {extra(its_extra)}"


def _no_weights(plain: dict[str, Any]) -> Iterator[str]:
    for key, place in options.weights_named(plain).items():
        path, of_recipe = expanded(place), key.startswith("recipe.")
        folder, name = weights_in(place)
        files: tuple[str, ...] = run_folder.OWN
        taken = own_weights(place) is not None
        if of_recipe:  # which takes a file of one kind, of a run or not
            files = files[:1]
            taken = path.suffix in files and path.is_file()
        if not taken and (why := folder.without(name)):
            if run_folder.is_checkpoint(path):
                theirs = ", ".join(run_folder.WEIGHTS)
                why = f"a run's checkpoint; it takes the run's folder, or one of its {theirs}"
            elif path.suffix not in files and path.is_file():
                why = f"a file of weights is {', '.join(files)}"
            elif path.suffix in files and path.name not in run_folder.WEIGHTS and not path.exists():
                why = "there is no such file"
            yield f"{key}={place}: {why}"


def _no_teacher(plain: dict[str, Any]) -> Iterator[str]:
    model = plain["model"]
    if plain["trainer"]["distill"] != START or plain["init"] is not None or "_target_" in model:
        return
    if not options.kind("model", model["name"]).trained:
        yield (
            f"trainer.distill=start: model={model['name']} begins with random weights in its "
            "head or everywhere, which teach nothing; take the folder of a finished run"
        )


def _other_data(dataset: str, model: str) -> Iterator[str]:
    has, takes = options.kind("dataset", dataset).data, options.kind("model", model).data
    if has != takes:
        names = options.names("model")
        fitting = ", ".join(name for name in names if options.kind("model", name).data == has)
        what = "a language model" if takes == RUNNING_TEXT else f"for {takes}"
        yield (f"model={model} is {what}, and dataset={dataset} has {has}: these take {fitting}")


def _no_pretrained(dataset: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    named = {"model.pretrained": model.get("pretrained")}
    if dataset.get("tokenizer") != model.get("pretrained"):  # the model's own by default
        named["dataset.tokenizer"] = dataset.get("tokenizer")
        if isinstance(dataset.get("tokenizer"), bool):
            yield f"dataset.tokenizer={str(dataset['tokenizer']).lower()}: it takes {TEXT.allowed}"
    for key, place in named.items():
        folder = str(place).startswith(("/", "./", "../", "~"))
        file = key == "dataset.tokenizer" and expanded(str(place)).is_file()  # tokenizer.json
        if folder and not file and not expanded(str(place)).is_dir():
            yield f"{key}={place}: there is no such folder"


def _no_files(dataset: dict[str, Any]) -> Iterator[str]:
    kind = options.kind("dataset", dataset["name"])
    if not kind.places and not kind.within:
        return
    from nmrun.lab.tasks import storage  # numpy

    here = f"neither in {storage.data_folder()} (NMRUN_DATA) nor here"
    for key in kind.places:
        if dataset[key] is not None and not storage.path_of(dataset[key]).exists():
            yield f"dataset.{key}={dataset[key]}: there is no such file or folder, {here}"
    if kind.within and not storage.path_of(path := dataset["path"]).exists():
        yield f"dataset.path={path}: there is no such folder, {here}; it has {kind.within}"


def _needs_gpu(trainer: dict[str, Any]) -> Iterator[str]:
    if trainer["device"] in ("cuda", "free"):
        yield (
            f"trainer.device={trainer['device']}: there is no CUDA device here; "
            "auto takes what there is"
        )
    elif trainer["precision"] == "fp16":
        yield "trainer.precision=fp16 is for GPUs, and a CPU is many times slower by it; take fp32"


def no_gpu() -> bool:
    """Whether this machine certainly has no GPU for torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return True
    return sys.platform.startswith("linux") and not any(map(glob.glob, DEVICES))
