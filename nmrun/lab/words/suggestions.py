"""The line for a key or option that there is not: what was probably meant, by meaning first."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nmrun.lab.keys import options
from nmrun.oneshot import METHODS
from nmrun.registry import did_you_mean, nearest, no_such

RATIOS = "sparsity.overrides"
# What others call it, by the last part of the key.
ELSEWHERE = {
    "recipe": ("method", "algorithm", "algo", "pruner", "sparsifier"),
    "dataset": ("data", "ds"),
    "model": ("network", "net", "arch", "architecture"),
    "optimizer": ("optim", "opt"),
    "schedule": ("scheduler", "lr_scheduler"),
    "track": ("logger", "loggers", "logging", "tracking"),
    "sparsity": ("pattern", "ratio", "nm", "sparse"),
    "sparsity=2:4": ("n", "m", "density", "amount", "prune_ratio"),
    "output_dir": ("outdir", "output", "out", "save_dir", "log_dir"),
    "seed": ("random_seed", "rng"),
    "dry": ("dry_run",),
    "optimizer.lr": ("learning_rate", "lrate"),
    "optimizer.weight_decay": ("wd", "l2"),
    "optimizer.betas": ("beta1", "beta2"),
    "recipe.decay": ("lambda", "lambda_w", "lam"),
    "schedule.warmup": ("warm_up", "warmup_ratio"),
    "trainer.steps": ("max_steps", "iterations", "iters", "num_steps"),
    "trainer.epochs": ("max_epochs", "num_epochs"),
    "trainer.batch_size": ("bs", "batch", "batchsize"),
    "trainer.device=cuda": ("gpu", "gpus", "cuda", "accelerator", "use_gpu", "n_gpu"),
    "trainer.precision": ("amp", "fp16", "bf16", "half", "mixed_precision", "dtype"),
    "trainer.accumulate": ("gradient_accumulation", "gradient_accumulation_steps", "grad_accum"),
    "trainer.clip": ("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip_val"),
    "dataset.workers": ("num_workers",),
}
MEANT = {word: key for key, words in ELSEWHERE.items() for word in words}


def line(key: str, keys: Iterable[str]) -> str:
    """The line for an unknown key, beside the keys and groups that there are."""
    keys = set(keys)
    if key.startswith(f"{RATIOS}."):
        layer = key.removeprefix(f"{RATIOS}.")
        return f"{key}: no such key; ratios by layer are one value: '{RATIOS}={{{layer}: 1:8}}'"
    group, _, leaf = key.rpartition(".")
    beside, place = {name for name in keys if name.rpartition(".")[0] == group}, key
    if not beside:  # there is no such group
        beside, place = {name for name in keys if "." not in name}, leaf
    return f"{key}: no such key{_hint(key, group, leaf, keys, beside)} ({listed(place, beside)})"


def _hint(key: str, group: str, leaf: str, keys: set[str], beside: set[str]) -> str:
    if group and (having := owners(group, leaf)):
        return _belongs(leaf, group, having)
    meant = MEANT.get(leaf.lower(), "")
    if meant and (meant.partition("=")[0] in keys or " or " in meant):
        return f"; did you mean {meant}?"
    leaf = meant.rpartition(".")[2] or leaf
    if same := sorted(name for name in keys if name.rpartition(".")[2] == leaf and "." in name):
        return f"; did you mean {' or '.join(same)}?"
    for other in () if group else options.NAMED:
        if having := owners(other, leaf):
            return _belongs(f"{other}.{leaf}" if meant else leaf, other, having)
    others = {name.rpartition(".")[2]: name for name in keys}
    near = nearest(key, {name for name in beside if not name.endswith(".name")})
    if near is None and not group:
        near = others.get(nearest(leaf, others) or "")
    return f"; did you mean {near}?" if near else ""


def _belongs(what: str, group: str, having: list[str]) -> str:
    names = ", ".join(having[:3]) + (", ..." if len(having) > 3 else "")
    return f"; {what} belongs to {group}={names}"


def option(group: str, name: str, names: Collection[str]) -> str:
    """The line for an option that a group does not have, beside those that there are."""
    if name.startswith("["):
        listed_values = name.strip("[]").replace("'", "").replace('"', "").replace(" ", "")
        return f"{group}={name}: several are written without brackets: {group}={listed_values}"
    if group == "recipe" and name in METHODS:
        how = f"nmrun prune RUN method={name}"
        return f"recipe={name}: it prunes a trained network, without training: {how}"
    if group in ("dataset", "model", "recipe") and re.fullmatch(r"\w+(\.\w+)+", name):
        alone = f"alone it is recipe._target_={name}; " if group == "recipe" else ""
        return (
            f"{group}={name}: {alone}beside others it has a name, by a file DIR/{group}/NAME.yaml with the lines "
            f"name: NAME and _target_: {name}, and --config-dir DIR"
        )
    line = f"{group}={name}: {no_such(group, name, names)}"
    more = "; nmrun.sparsify takes any in your own loop" if group == "optimizer" else ""
    return line + more


def owners(group: str, leaf: str) -> list[str]:
    """The options of a group that have a key."""
    names = options.names(group) if group in options.GROUPS else []
    return [name for name in names if leaf in options.keys(group, name)]


def wrong_keys(group: str, keys: Iterable[str], content: Mapping[str, Any]) -> dict[str, str]:
    """The keys that a group lacks or should not have: each problem with its key."""
    names, present = [f"{group}.{key}" for key in keys], [f"{group}.{key}" for key in content]
    lacks = [name for name in names if name not in present]
    brings = f"defaults: [{content.get('name', 'default')}] in a file of yours brings what it lacks"
    line = f"{', '.join(lacks)}: missing; a run needs it ({brings})"
    wrong = {line: group} if lacks else {}
    return wrong | {no_key(name, names): name for name in present if name not in names}


def no_key(key: str, keys: Iterable[str]) -> str:
    """The line for a key that does not exist; ``keys`` are those beside it."""
    keys = list(keys)
    return f"{key}: no such key{did_you_mean(key, keys)} ({listed(key, keys)})"


def listed(key: str, keys: Iterable[str]) -> str:
    """The keys beside one, in words: ``optimizer has lr, name``."""
    group = key.rpartition(".")[0]
    has = ", ".join(name.rpartition(".")[2] for name in sorted(keys))
    return f"{group} has {has}" if group else f"there are {has}"
