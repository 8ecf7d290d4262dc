"""The identity of a run: a short hash of everything that can change its result, and the folder with
that name."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmrun.lab.config import sources
from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, Config
from nmrun.lab.runs.run_folder import FINAL, expanded, own_weights, weights_in
from nmrun.oneshot import METHODS
from nmrun.ranges import value_text

GROUPS = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "seed")
SETTINGS = (*GROUPS, "init")  # what can change a result
OF_COMMAND = {"output_dir", "resume", "force", "dry", "detach"}  # and not of the training
# where and how it runs, and what it reports
IRRELEVANT = {
    "dataset": {"workers"},
    "trainer": {
        *("device", "deterministic", "threads", "distributed", "acceleration"),
        *("log_every", "checkpoint_every"),
    },
}
# by key of the trainer: other keys that have no effect while it is null
DEPENDENT = {
    "distill": {"distill_weight", "distill_temperature"},
    "activations": {"activations_dense_start", "activations_dense_end"},
}
# by key of the trainer: other keys that have no effect unless it is null
REPLACED = {"steps": {"epochs"}}
# what decides how many steps a budget of seconds buys
SPEED = {"device", "deterministic", "threads", "distributed", "acceleration"}
# the keys of the trainer that decide which of its others have an effect
DECIDING = ("budget", *DEPENDENT, *REPLACED)


def identity(config: Config) -> str:
    """Ten hexadecimal digits, which two commands share exactly when they ask for the same training.

    Of the keys, those count that are not at their default: a new key changes no id.
    """
    relevant, known = {}, options.of_config(config.plain)
    for group in GROUPS:
        value = config.plain[group]
        if isinstance(value, dict):
            defaults = options.defaults(known.get(group, {}))
            value = {
                key: item
                for key, item in _counted(group, value).items()
                if not (key in defaults and defaults[key] == item)
            }
        relevant[group] = value
    for key, place in options.weights_named(config.plain).items():
        group, _, leaf = key.rpartition(".")
        (relevant[group] if group else relevant)[leaf] = _weights_of(place)
    overrides = config.sparsity.overrides
    if overrides and len(overrides) > 1:  # the first that matches counts
        relevant["order"] = list(overrides)
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]


def changed(before: Mapping[str, Any], config: Config) -> list[str]:
    """What is different in ``before``, the config of an earlier run with the same id: defaults, which
    an id leaves out, as in ``optimizer.lr (0.001, now 0.002)``; and the user's own code, by its path.
    """
    places = options.weights_named(config.plain)  # a run may have moved
    lines = []
    for group in GROUPS:
        if isinstance(config.plain[group], dict):
            then = _counted(group, before.get(group, {}))
            lines += [
                f"{group}.{key} ({value_text(then[key])}, now {value_text(now)})"
                for key, now in _counted(group, config.plain[group]).items()
                if key in then and then[key] != now and f"{group}.{key}" not in places
            ]
    return [*lines, *sources.changed(before, config).values()]


def _counted(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a group that can change a result, with their values."""
    ignored = {SOURCE}
    if group == "trainer":
        ignored |= without_effect(values)
    elif "_target_" not in values:  # keys of these names in a group of the user's own are others
        ignored |= IRRELEVANT.get(group, set())
    return {key: item for key, item in values.items() if key not in ignored}


def without_effect(trainer: Mapping[str, Any]) -> set[str]:
    """The keys of a trainer that change no result, given its values of ``DECIDING``."""
    idle = set(IRRELEVANT["trainer"])
    if str(trainer.get("budget")).startswith("seconds:"):
        idle -= SPEED
    for key, others in DEPENDENT.items():
        if trainer.get(key) is None:
            idle |= others
    for key, others in REPLACED.items():
        if trainer.get(key) is not None:
            idle |= others
    return idle


def is_in_id(key: str) -> bool:
    """Whether a key of a config, such as ``optimizer.lr``, is part of a run's id."""
    group, _, leaf = key.partition(".")
    return group in SETTINGS and leaf not in IRRELEVANT.get(group, ())


def _weights_of(place: str) -> str:
    """The id of the run whose weights ``place`` names, wherever it lies, with the file unless that
    is the last weights'; of a file of the user's own its SHA-256; without any, the text itself."""
    if (own := own_weights(place)) is not None:
        stat = own.stat()
        return _sha256(own, stat.st_mtime_ns, stat.st_size)
    folder, name = weights_in(place)
    run = folder.result.get("id")
    if run is None:
        return str(expanded(place))
    return str(run) if name == FINAL else f"{run}/{name}"


@functools.cache
def _sha256(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def title(config: Config) -> str:
    """A run in one line: recipe, ratio, data set, model, optimizer (or calibration samples), seed."""
    what = "dense" if config.is_dense else f"{config.recipe.name} {config.pattern}"
    how = config.optimizer.name
    if config.recipe.name in METHODS:
        how = f"{config.recipe.options['samples']} calibration samples"
    return f"{what} on {config.dataset.name} with {config.model.name}, {how}, seed {config.seed}"


def run_folder(config: Config) -> Path:
    """``<output_dir>/<dataset>/<model>/<recipe>/<ratio>/s<seed>-<id>``; no colon, space, backslash."""
    slug = "dense" if config.pattern is None else config.pattern.slug
    place = (
        Path(config.output_dir)
        / config.dataset.name
        / config.model.name
        / config.recipe.name
        / slug
    )
    return place / f"s{config.seed}-{identity(config)}"
