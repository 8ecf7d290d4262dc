"""The composed config, checked before torch is imported. All problems are found at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.errors import ConfigError, first_line, raise_all
from nmrun.lab.config import rules
from nmrun.lab.config.suggestions import no_key, wrong_keys
from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, Config
from nmrun.lab.keys.fields import defaults, fields
from nmrun.lab.keys.groups import ratio
from nmrun.lab.keys.models import Model
from nmrun.lab.keys.options import NAMED, UNNAMED
from nmrun.lab.keys.ranges import is_path
from nmrun.patterns import Pattern, written
from nmrun.ranges import Check, converted, value_text, wrong_values
from nmrun.recipes import RECIPES, installed
from nmrun.registry import no_such

# a recipe without conditions: a config must have one, also where none trains
STAND_IN = "ste"
EVERY = ("", *NAMED, *UNNAMED)  # the groups of keys, the empty one of those in none
Checks = dict[str, Mapping[str, Check | None]]  # by group and key
NO_SPARSITY = {**ratio(None), "overrides": None, "pad": False}
RECIPE_CLASS = "package.Class, a subclass of nmrun.recipes.base.Recipe"


def check(composed: DictConfig, unsure: Collection[str] = ()) -> Config:
    """Resolve and check a composed config. Raises ConfigError with every problem, one line each;
    nothing is concluded from keys and groups that are ``unsure``.

    The dense recipe ignores the ratio, and ``sparsity=dense`` makes any recipe the dense run, so
    both are the same run.
    """
    plain = resolve(composed)
    checks = ranges(plain)
    raise_all(problems(plain, checks, unsure))
    for group, its_checks in checks.items():
        holder = plain[group] if group else plain
        holder |= converted(its_checks, holder)
    plain["optimizer"]["decay"] = _decay(plain["optimizer"], plain["model"])
    plain["recipe"]["name"] = _recipe_name(plain["recipe"])
    if plain["sparsity"]["n"] is None or plain["recipe"] == {"name": "dense"}:
        return Config({**plain, "recipe": {"name": "dense"}, "sparsity": dict(NO_SPARSITY)}, None)
    pattern = Pattern.parse(written(plain["sparsity"]))
    return Config({**plain, "sparsity": {**plain["sparsity"], **ratio(pattern)}}, pattern)


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
    _read_texts(OmegaConf.to_container(composed, resolve=False), plain)
    for group in plain.values():
        if isinstance(group, dict):
            group.pop(SOURCE, None)  # a fact of an earlier run, whose config this was
    model = plain.get("model")
    if isinstance(model, dict) and "_target_" in model:
        plain["model"] = {
            **defaults(fields(Model)),
            **model,
        }  # those of its keys that all models have
    return dict(plain)


def _read_texts(written: Any, plain: dict[str, Any]) -> None:
    """Read a text that an interpolation gave, as ``${oc.env:LR}`` does, as on the command line: where
    the key takes no such text."""
    for group, checks in ranges(plain).items() if "${" in str(written) else ():
        before, after = (tree[group] if group else tree for tree in (written, plain))
        for key, check in checks.items() if isinstance(before, dict) else ():
            text, value = before.get(key), after.get(key)
            given = isinstance(text, str) and "${" in text and isinstance(value, str)
            if given and check is not None and not check.holds(value):
                with contextlib.suppress(HydraException):
                    after[key] = OverridesParser.create().parse_override(f"{key}={value}").value()


def problems(
    plain: dict[str, Any], checks: Checks | None = None, unsure: Collection[str] = ()
) -> list[str]:
    """Everything that is wrong with a resolved config, one line each. Keys and groups that are
    ``unsure`` are known to be wrong already and are not checked."""
    checks = ranges(plain) if checks is None else checks
    groups, keys = (*NAMED, *UNNAMED), checks[""]
    errors = {no_key(key, (*keys, *groups)): key for key in plain if key not in (*keys, *groups)}
    if "experiment" in plain:  # Hydra's own way is a package of the group's name
        errors = {"experiment=: its file begins with the line # @package _global_": "experiment"}
    errors |= {f"{key}: missing; a run needs it": key for key in keys if key not in plain}
    values = dict(wrong_values(keys, plain, ""))
    for group in groups:
        content = plain.get(group)
        if not isinstance(content, dict):
            errors[f"{group}: missing; a run needs it"] = group
            continue
        errors |= _wrong_group(group, content, checks.get(group))
        values |= wrong_values(checks.get(group, {}), content, f"{group}.")
    errors |= values
    return [*errors, *rules.broken(plain, {*unsure, *errors.values()})]


def ranges(plain: Mapping[str, Any]) -> Checks:
    """By group (empty: the keys in none), the keys with their ranges. A group with something of the
    user's own or with an unknown option is left out."""
    checks: Checks = {}
    for group in EVERY:
        content = plain.get(group) if group else plain
        if isinstance(content, dict) and (group in UNNAMED or "_target_" not in content):
            with contextlib.suppress(KeyError):
                keys = options.keys(group, str(content.get("name")))
                checks[group] = {key: field.check for key, field in keys.items()}
    return checks


def _decay(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Which parameters decay: the setting, or what is usual for the model. Without weight decay the
    answer is always the same, so that the runs are one."""
    if optimizer["weight_decay"] == 0:
        return "all"
    kind = Model if "_target_" in model else options.kind("model", model["name"])
    return str(optimizer["decay"] or kind.decays)


def _wrong_group(
    group: str, content: dict[str, Any], keys: Collection[str] | None
) -> dict[str, str]:
    """The problems of a group, such as unknown or missing keys, each with the key that is wrong.
    ``keys`` is None where they are not known."""
    if "_target_" in content and group in ("dataset", "model", "recipe"):
        return _wrong_own(group, content)
    name = content.get("name")
    if group == "recipe" and name == "custom":
        return {f"recipe=custom needs recipe._target_={RECIPE_CLASS}": group}
    if keys is not None and (group != "recipe" or name in RECIPES):
        every = [*keys] if group in UNNAMED else ["name", *keys]
        return {} if content.keys() == {*every} else wrong_keys(group, every, content)
    if name is None:
        own = ", or name: and _target_: of your own" if group in ("dataset", "model") else ""
        how = f"its file needs defaults: [OPTION], what it builds on{own}"
        return {f"{group}.name: missing; {how}": group}
    names = [*RECIPES, "custom"] if group == "recipe" else options.names(group)
    line = f"{group}.name={value_text(name)}: "
    line += no_such(group, value_text(name), names, f"nmrun help {group}")
    if "name_in_timm" in content:
        line += "; timm's networks are named by model.name_in_timm"
    elif group in ("dataset", "model", "recipe"):
        line += "; a file of yours has _target_: module.name or defaults: [OPTION]"
    return {line: group}


def _wrong_own(group: str, content: dict[str, Any]) -> dict[str, str]:
    """Likewise of something of the user's own."""
    target, errors = str(content["_target_"]), {}
    if not is_path(target):
        takes = RECIPE_CLASS if group == "recipe" else "package.function"
        errors[f"{group}._target_={target}: it takes {takes}"] = f"{group}._target_"
    if group == "recipe":
        return errors or _wrong_name(group, _recipe_name(content))
    if content.get("name") is None:
        line = f"{group}.name: missing; write name: NAME beside _target_: {target} in its file"
        return errors | {line: f"{group}.name"}
    return errors | _wrong_name(group, str(content["name"]))


def _wrong_name(group: str, name: str) -> dict[str, str]:
    if re.fullmatch(r"[\w.-]+", name) and name.strip("."):
        return {}
    takes = "it names a folder: letters, digits, and . _ -, and not points alone"
    return {f"{group}.name={name}: {takes}": f"{group}.name"}


def _recipe_name(recipe: dict[str, Any]) -> str:
    """The name of a recipe; of a class of the user's own its dotted path, unless it has another."""
    name, target = str(recipe.get("name") or ""), str(recipe.get("_target_", ""))
    unnamed = name in ("", "custom") or name in RECIPES
    if not target or not unnamed:
        return name
    return next((given for given, path in installed().items() if path == target), target)
