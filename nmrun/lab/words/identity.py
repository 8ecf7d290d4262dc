"""Which run this is: a short hash of all that changes its result, and the folder that follows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, Config
from nmrun.lab.runs.run_folder import FINAL, weights_in
from nmrun.oneshot import METHODS

GROUPS = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "seed")
SETTINGS = (*GROUPS, "init")  # what can change a result
OF_COMMAND = {"output_dir", "resume", "force", "dry"}  # and not of the training
# where and how it runs and what it tells
IRRELEVANT = {
    "dataset": {"workers"},
    "trainer": {
        *("device", "deterministic", "threads", "on_oom", "distributed", "acceleration"),
        *("log_every", "diagnose_every", "checkpoint_every"),
    },
}
GPTS = ("gpt_tiny", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl")
# keys that came later, with the values at which a run is what it was before: there they are no part
# of an id, so that finished runs are found again
LATER: dict[str, dict[str, Any]] = {
    "optimizer": {"decay": "all"},
    "sparsity": {"v": 1},
    "track": {"tags": [], "also": []},
    "track=wandb": {"notes": None, "git": False, "console": False, "system": False},
    "trainer": {
        **{"evaluate": "sparse", "test": True, "limit_evaluation": None, "steps": None},
        **{"distill": None, "distill_weight": 0.67, "distill_temperature": 2.0},
        **{"activations": None, "activations_dense_start": 0.0, "activations_dense_end": 0.0},
    },
    **{f"schedule={name}": {"cycles": 1} for name in ("constant", "cosine", "linear")},
    **{f"model={name}": {"bias": True} for name in GPTS},
    # of those data sets and models that have them
    "dataset": {"stride": None},
    "model": {"activation": "gelu"},
    "recipe=maskllm": {"masks": None},
    "recipe=step": {
        "window": "full",
        "threshold": None,
        "second_moment": "frozen",
        "lr_factor": 1.0,
    },
    "recipe=sdgf_geometric": {"densify": False},
    "recipe=s_ste": {"gamma": 0.0, "fit": "mse", "beta": None, "interval": None},
}
# by key: other keys that change nothing while it is null
DEPENDENT = {
    "distill": {"distill_weight", "distill_temperature"},
    "activations": {"activations_dense_start", "activations_dense_end"},
}
# by key: other keys that change nothing unless it is null
REPLACED = {"steps": {"epochs"}}
# what decides how many steps a budget of seconds buys
SPEED = {"device", "deterministic", "threads", "distributed", "acceleration"}


def identity(config: Config) -> str:
    """Ten hexadecimal digits. Equal for two commands exactly when they ask for the same training."""
    relevant = {}
    for group in GROUPS:
        value = config.plain[group]
        if isinstance(value, dict):
            later, ignored = _later(group, value), {SOURCE, *IRRELEVANT.get(group, ())}
            if str(value.get("budget")).startswith("seconds:"):
                ignored -= SPEED
            for key, others in DEPENDENT.items():
                ignored |= others if value.get(key) is None else set()
            for key, others in REPLACED.items():
                ignored |= others if value.get(key) is not None else set()
            value = {
                key: item
                for key, item in value.items()
                if key not in ignored and not (key in later and later[key] == item)
            }
        relevant[group] = value
    for key, place in options.weights_named(config.plain).items():
        group, _, leaf = key.rpartition(".")
        (relevant[group] if group else relevant)[leaf] = _weights_of(place)
    overrides = config.sparsity.overrides
    if overrides and len(overrides) > 1:  # the first that matches counts
        relevant["order"] = list(overrides)
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]


def _weights_of(place: str) -> str:
    """The id of the run whose weights ``place`` names, wherever that lies, and the file where it is
    not the last one's; without a run the text as it is."""
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


def completed(plain: dict[str, Any]) -> dict[str, Any]:
    """A run's config as its folder has it, with the keys that came after the run."""
    whole = {
        group: {**_later(group, value), **value} if isinstance(value, dict) else value
        for group, value in plain.items()
    }
    return {"init": None, **whole}


def _later(group: str, value: dict[str, Any]) -> dict[str, Any]:
    if "_target_" in value:  # the user's own, whose keys are no business of ours
        return {}
    name = str(value.get("name"))
    later = {**LATER.get(group, {}), **LATER.get(f"{group}={name}", {})}
    if group in ("dataset", "model"):
        has = options.keys(group, name) if name in options.names(group) else {}
        later = {key: value for key, value in later.items() if key in has}
    return later


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
