"""The identity of a run: a short hash of everything that can change its result, and the folder with
that name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nmrun.lab.keys import fields, options
from nmrun.lab.keys.config import SOURCE, Config
from nmrun.lab.runs.run_folder import FINAL, weights_in
from nmrun.oneshot import METHODS

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
# by key: other keys that have no effect while it is null
DEPENDENT = {
    "distill": {"distill_weight", "distill_temperature"},
    "activations": {"activations_dense_start", "activations_dense_end"},
}
# by key: other keys that have no effect unless it is null
REPLACED = {"steps": {"epochs"}}
# what decides how many steps a budget of seconds buys
SPEED = {"device", "deterministic", "threads", "distributed", "acceleration"}


def identity(config: Config) -> str:
    """Ten hexadecimal digits, which two commands share exactly when they ask for the same training.

    Of the keys, those count that are not at their default: a new key changes no id.
    """
    relevant = {}
    for group in GROUPS:
        value = config.plain[group]
        if isinstance(value, dict):
            defaults, ignored = _defaults(group, value), {SOURCE, *IRRELEVANT.get(group, ())}
            if str(value.get("budget")).startswith("seconds:"):
                ignored -= SPEED
            for key, others in DEPENDENT.items():
                ignored |= others if value.get(key) is None else set()
            for key, others in REPLACED.items():
                ignored |= others if value.get(key) is not None else set()
            value = {
                key: item
                for key, item in value.items()
                if key not in ignored and not (key in defaults and defaults[key] == item)
            }
        relevant[group] = value
    for key, place in options.weights_named(config.plain).items():
        group, _, leaf = key.rpartition(".")
        (relevant[group] if group else relevant)[leaf] = _weights_of(place)
    overrides = config.sparsity.overrides
    if overrides and len(overrides) > 1:  # the first that matches counts
        relevant["order"] = list(overrides)
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]


def is_in_id(key: str) -> bool:
    """Whether a key of a config, such as ``optimizer.lr``, is part of a run's id."""
    group, _, leaf = key.partition(".")
    return group in SETTINGS and leaf not in IRRELEVANT.get(group, ())


def _weights_of(place: str) -> str:
    """The id of the run whose weights ``place`` names, wherever it lies, with the file unless that
    is the last weights'; without a run, the text itself."""
    folder, name = weights_in(place)
    run = folder.result.get("id")
    if run is None:
        return str(Path(place).expanduser())
    return str(run) if name == FINAL else f"{run}/{name}"


def title(config: Config) -> str:
    """A run in one line: recipe, ratio, data set, model, optimizer (or calibration samples), seed."""
    what = "dense" if config.is_dense else f"{config.recipe.name} {config.pattern}"
    how = config.optimizer.name
    if config.recipe.name in METHODS:
        how = f"{config.recipe.options['samples']} calibration samples"
    return f"{what} on {config.dataset.name} with {config.model.name}, {how}, seed {config.seed}"


def _defaults(group: str, value: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a group's keys, without its name and without keys of the user's own."""
    name = str(value.get("name"))
    if "_target_" in value or (group not in options.UNNAMED and name not in options.names(group)):
        return {}
    return fields.defaults(options.keys(group, name))


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
