"""The composed config, checked before torch is imported. All problems are found at once.

Which keys there are is said once, by the files in ``conf/``; which values they take, by ``checks.CHECKS``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.config.checks import CHECKS
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError, geometric, stepwise
from nmrun.ranges import near
from nmrun.recipes import RECIPES

NAMED = ("dataset", "model", "recipe", "optimizer", "schedule", "track")  # groups whose file says ``name``
UNNAMED = {"sparsity": "dense", "trainer": "default"}  # and the file that has the keys of the others
PLAIN = tuple(key for key in CHECKS if "." not in key)

# Inputs of the layers that may be sparse in the built-in models, known without building them (the runner asks the model itself).
SPARSE_INPUTS: dict[str, Callable[[dict[str, Any]], list[int]]] = {
    "small_conv": lambda model: model["channels"][:-1],
    "mlp": lambda model: model["hidden"][:-1],
    "resnet18": lambda model: [64, 128, 256, 512],
}
OWN = {"dataset": ("name",), "model": ("name", "include", "exclude")}  # what the user's own in its place has to say


@dataclass(frozen=True)
class Config:
    """A checked config. ``plain`` is the whole of it as plain data, in canonical form; ``pattern`` is None for a dense run.

    The groups are attributes: ``config.trainer["epochs"]``, ``config.seed``.
    """

    plain: dict[str, Any]
    pattern: Pattern | None

    def __getattr__(self, group: str) -> Any:
        try:
            return self.__dict__["plain"][group]
        except KeyError:
            raise AttributeError(group) from None

    @property
    def is_dense(self) -> bool:
        return self.pattern is None


def check(composed: DictConfig) -> Config:
    """Resolve and check a composed config. Raises ConfigError with every problem, one line each.

    Canonical form: the dense recipe ignores the ratio, and ``sparsity=dense`` makes any recipe the dense run, so both are the same run.
    """
    plain = resolve(composed)
    found = problems(plain)
    if found:
        raise ConfigError(found)
    for key, holder, leaf in _places(plain):
        holder[leaf] = CHECKS[key].convert(holder[leaf])
    plain.pop("seeds", None)  # a run has one
    plain["recipe"]["name"] = _recipe_name(plain["recipe"])
    n, m = plain["sparsity"]["n"], plain["sparsity"]["m"]
    if n is None or plain["recipe"] == {"name": "dense"}:
        nothing = {"n": None, "m": None, "overrides": None, "pad": False}
        return Config({**plain, "recipe": {"name": "dense"}, "sparsity": nothing}, None)
    pattern = Pattern.parse(f"{n}:{m}")
    return Config({**plain, "sparsity": {**plain["sparsity"], "n": pattern.n, "m": pattern.m}}, pattern)


def resolve(composed: DictConfig) -> dict[str, Any]:
    """The config as plain data. Raises ConfigError where a value is missing or refers to nothing."""
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    plain.pop("hydra", None)
    return dict(plain)


def problems(plain: dict[str, Any], unsure: Collection[str] = ()) -> list[str]:
    """All that is wrong with a resolved config, one line each. ``unsure`` are keys and groups known to be wrong already:
    nothing is concluded from them."""
    groups = (*NAMED, *UNNAMED)
    found = {no_key(key, (*PLAIN, *groups)): key for key in plain if key not in (*PLAIN, *groups)}
    found |= {f"{key}: missing": key for key in PLAIN if key not in plain}
    for group in groups:
        given = plain.get(group)
        found |= _wrong_keys(group, given) if isinstance(given, dict) else {f"{group}: missing": group}
    for key, holder, leaf in _places(plain):
        value, rule = holder[leaf], CHECKS[key]
        if not rule.holds(value):
            found[f"{key}={_shown(value)}: it takes {rule.allowed}{near(str(value), rule.options)}"] = key
    bad = {*unsure, *found.values()}
    return [*found, *_combinations(plain, lambda *keys: not any(k in bad or k.partition(".")[0] in bad for k in keys))]


def _places(plain: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every key that has a check and is there, with the dictionary that holds it and its name in there.

    What has a ``_target_`` is the user's own, which knows its keys.
    """
    for key in CHECKS:
        group, _, leaf = key.rpartition(".")
        holder = plain.get(group) if group else plain
        if isinstance(holder, dict) and leaf in holder and "_target_" not in holder:
            yield key, holder, leaf


def _wrong_keys(group: str, given: dict[str, Any]) -> dict[str, str]:
    """What a group should not have, lacks, or is: each problem with the key that is wrong."""
    if group == "recipe" and "_target_" in given:
        target, called = str(given["_target_"]), _recipe_name(given)
        if not re.fullmatch(r"\w+(\.\w+)+", target):
            return {
                f"recipe._target_={target}: it takes package.Class, a subclass of nmrun.recipes.base.Recipe": "recipe._target_"
            }
        fits = re.fullmatch(r"[\w.-]+", called)
        return {} if fits else {f"recipe.name={called}: it names a folder: letters, digits, and . _ -": "recipe.name"}
    name = given.get("name") if group in NAMED else UNNAMED[group]
    if group in OWN and "_target_" in given:
        return _wrong_own(group, given)
    if group == "recipe" and name == "custom":
        return {"recipe=custom needs recipe._target_=package.Class, a subclass of nmrun.recipes.base.Recipe": group}
    if name is None:
        return {f"{group}.name: missing": group}
    options = _options(group)
    if name not in options:
        return {no_option(f"{group}.name", group, _shown(name), options): group}
    keys = _keys(group, name)
    wrong = {f"{group}.{key}: missing": f"{group}.{key}" for key in keys if key not in given}
    known = [f"{group}.{key}" for key in keys]
    return wrong | {no_key(key, known): key for name in given if (key := f"{group}.{name}") not in known}


def _wrong_own(group: str, given: dict[str, Any]) -> dict[str, str]:
    """The same for a data set or model of the user's own, whose keys its builder knows."""
    target, name = str(given["_target_"]), str(given.get("name"))
    found = {}
    if not re.fullmatch(r"\w+(\.\w+)+", target):
        found[f"{group}._target_={target}: it takes package.function"] = f"{group}._target_"
    if not re.fullmatch(r"[\w.-]+", name):
        found[f"{group}.name={name}: it names a folder: letters, digits, and . _ -"] = f"{group}.name"
    return found | {f"{group}.{key}: missing": f"{group}.{key}" for key in OWN[group] if key not in given}


def no_option(key: str, group: str, option: str, options: Iterable[str]) -> str:
    """The line for an option that a group does not have."""
    return f"{key}={option}: no such {group}{near(option, options)} (there are {', '.join(options)})"


def no_key(key: str, known: Iterable[str]) -> str:
    """The line for a key that does not exist; ``known`` are those beside it."""
    known = sorted(known)
    group = key.rpartition(".")[0]
    has = ", ".join(name.rpartition(".")[2] for name in known)
    return f"{key}: no such key{near(key, known)} ({f'{group} has' if group else 'there are'} {has})"


@functools.cache
def _options(group: str) -> list[str]:
    names = (file.name for file in (files("nmrun.conf") / group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@functools.cache
def _keys(group: str, name: str) -> list[str]:
    return [str(key) for key in OmegaConf.create((files("nmrun.conf") / group / f"{name}.yaml").read_text())]


def _recipe_name(recipe: dict[str, Any]) -> str:
    """The name of a recipe; of a class of the user's own, that of the class, unless it was given another of its own."""
    name, target = str(recipe.get("name") or ""), str(recipe.get("_target_", ""))
    return target.rpartition(".")[2].lower() if target and (name in ("", "custom") or name in RECIPES) else name


def _combinations(plain: dict[str, Any], good: Callable[..., bool]) -> list[str]:
    found = []
    recipe, optimizer, model, trainer = (plain.get(group) or {} for group in ("recipe", "optimizer", "model", "trainer"))
    builtin = good("recipe") and "_target_" not in recipe
    ratio = {key: plain["sparsity"][key] for key in ("n", "m")} if good("sparsity.n", "sparsity.m") else {}
    pattern, dense = None, (builtin and recipe["name"] == "dense") or (ratio and {*ratio.values()} == {None})
    if ratio and not dense:
        text = f"{ratio['n']}:{ratio['m']}"
        try:
            pattern = Pattern.parse(text)
        except PatternError as error:
            found.append(f"sparsity={text}: {error}")
    if builtin and not dense and recipe["name"] == "step" and good("optimizer.name"):
        name = optimizer["name"]
        line = f"recipe=step freezes Adam's second moment, which {name} has not: use optimizer=adam or adamw"
        found += [line] if name not in ("adam", "adamw") else []
    inputs: list[int] = []
    unpadded = good("sparsity.pad") and not plain["sparsity"]["pad"]
    if (
        pattern is not None
        and unpadded
        and good("model", "model.channels", "model.hidden")
        and model["name"] in SPARSE_INPUTS
        and "_target_" not in model
    ):
        inputs = SPARSE_INPUTS[model["name"]](model)
    if builtin and not dense and good(*(f"recipe.{key}" for key in recipe)):
        found += _schedule(recipe, pattern, inputs)
    if good("optimizer.nesterov", "optimizer.momentum") and optimizer.get("nesterov") and not optimizer.get("momentum"):
        found.append("optimizer.nesterov=true needs optimizer.momentum above 0")
    if good("trainer.batch_size", "trainer.accumulate") and trainer["batch_size"] % trainer["accumulate"]:
        size, parts = trainer["batch_size"], trainer["accumulate"]
        found.append(f"trainer.batch_size={size} cannot be split into trainer.accumulate={parts} equal micro-batches")
    if (
        pattern is not None
        and inputs
        and not plain["sparsity"].get("overrides")
        and not any(width % pattern.m == 0 for width in inputs)
    ):
        found.append(
            f"sparsity={pattern}: model {model['name']} has no layer whose inputs are a multiple of {pattern.m} "
            f"(its inner layers have {', '.join(map(str, dict.fromkeys(inputs)))} inputs); sparsity.pad=true allows that"
        )
    if good("trainer.acceleration", "trainer.fp8") and trainer["acceleration"] not in ("auto", "off"):
        found += _force(trainer, pattern, bool(dense or plain["sparsity"].get("overrides")))
    if good("output_dir"):
        folder = Path(plain["output_dir"])
        existing = next((p for p in [folder, *folder.absolute().parents] if p.exists()), Path("/"))
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            found.append(f"output_dir={folder}: {existing} is not a folder that can be written to")
    return found


def _force(trainer: dict[str, Any], pattern: Pattern | None, unsure: bool) -> list[str]:
    """What no 2:4 product can be made of."""
    what = f"trainer.acceleration={trainer['acceleration']}: 2:4 products"
    named = trainer["acceleration"] != "force"
    if named and trainer["fp8"] != (trainer["acceleration"] == "cusparselt_fp8"):
        return [f"{what} by it go with trainer.fp8={str(not trainer['fp8']).lower()}"]
    if pattern is None or unsure or pattern.fits_2_4:
        return []
    return [f"{what} take 2:4 weights and sparser ones whose groups fit in (1:M, 2:M with M a multiple of 4), not {pattern}"]


def _schedule(recipe: dict[str, Any], pattern: Pattern | None, inputs: list[int]) -> list[str]:
    """Phases that do not fit into a run, or that the pattern and the layers' inputs do not allow."""
    found = []
    for low, high in (("t_min", "t_max"), ("t_i", "t_f")):
        if low in recipe and high in recipe and recipe[low] > recipe[high]:
            found.append(f"recipe.{low}={recipe[low]} is above recipe.{high}={recipe[high]}")
    if recipe.get("dense", 0) + recipe.get("final", 0) > 1:
        found.append(
            f"recipe.dense={recipe['dense']} and recipe.final={recipe['final']} are fractions of one run: at most 1 together"
        )
    if recipe.get("decay") == "auto" and recipe["name"] != "t_sr_ste":
        found.append(f"recipe.decay=auto is for t_sr_ste; {recipe['name']} takes a number")
    if pattern is None:
        return found
    kind = {"sdgf_stepwise": "structure", "decay_structure": "structure", "sdgf_geometric": "structure_geometric"}.get(
        recipe["name"]
    )
    try:
        path = stepwise(pattern) if kind == "structure" else []
        path = geometric(pattern, recipe.get("frames", 4)) if kind == "structure_geometric" else path
    except PatternError as error:
        return [*found, f"recipe={recipe['name']} sparsity={pattern}: {error}"]
    held = [width for width in inputs if width % pattern.m == 0]
    if path and any(width % path[0].m for width in held):
        found.append(
            f"recipe={recipe['name']} sparsity={pattern}: its first pattern, {path[0]}, does not divide all layers' inputs "
            f"({', '.join(map(str, dict.fromkeys(held)))})"
            + ("; fewer recipe.frames start smaller" if "frames" in recipe else "")
            + "; sparsity.pad=true allows that"
        )
    return found


def flatten(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys; ``sparsity.overrides``, whose own keys are regular expressions, stays one value."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        nested = isinstance(value, dict) and key != "overrides"
        flat.update(flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).replace(" ", "")
