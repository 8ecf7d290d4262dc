"""The composed config, typed and checked before torch is imported. All problems are found at once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern, PatternError

Check = Callable[[Any], str | None]  # what is allowed, if the value is not


def whole(low: int, optional: bool = False) -> Check:
    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        return (
            None
            if good or (optional and value is None)
            else f"a whole number, {low} or more" + (", or null" if optional else "")
        )

    return check


def number(
    low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False, optional: bool = False
) -> Check:
    def check(value: Any) -> str | None:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        good = good and (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
        span = f"{'above' if open_low else 'at least'} {low:g}"
        span += "" if math.isinf(high) else f" and {'below' if open_high else 'at most'} {high:g}"
        return None if good or (optional and value is None) else f"a number {span}" + (", or null" if optional else "")

    return check


def one_of(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def betas(value: Any) -> str | None:
    good = isinstance(value, list) and len(value) == 2 and not any(number(0, 1, open_high=True)(b) for b in value)
    return None if good else "two numbers from 0 to below 1"


def widths(value: Any) -> str | None:
    good = isinstance(value, list) and len(value) >= 2 and not any(whole(1)(v) for v in value)
    return None if good else "a list of at least two whole numbers, 1 or more"


def expressions(value: Any) -> str | None:
    good = value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    return None if good else "a regular expression or a list of them"


def switch(value: Any) -> str | None:
    good = value in ("auto", "auto_geometric") or number(0, 1, open_low=True, open_high=True)(value) is None
    return None if good else "auto, auto_geometric or a fraction of all steps above 0 and below 1"


def text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a text"


FRACTION = number(0, 1, open_high=True)
CHECKS: dict[str, Check] = {
    "seed": whole(0),
    "output_dir": text,
    "resume": flag,
    "force": flag,
    "dry": flag,
    "dataset.split_seed": whole(0),
    "dataset.val_fraction": number(0, 0.5, open_low=True),
    "dataset.test_fraction": number(0, 0.5, open_low=True),
    "model.channels": widths,
    "model.hidden": widths,
    "model.include": expressions,
    "model.exclude": expressions,
    "recipe.prune_at": FRACTION,
    "recipe.decay": number(0),
    "recipe.switch": switch,
    "recipe.t_min": number(0, 1),
    "recipe.t_max": number(0, 1),
    "recipe.eps_mode": one_of("inside", "outside", "floor"),
    "recipe.bias_correction": flag,
    "optimizer.name": one_of("adam", "adamw", "sgd"),
    "optimizer.lr": number(0, open_low=True),
    "optimizer.weight_decay": number(0),
    "optimizer.betas": betas,
    "optimizer.eps": number(0, open_low=True),
    "optimizer.momentum": FRACTION,
    "optimizer.nesterov": flag,
    "schedule.name": one_of("constant", "linear", "cosine"),
    "schedule.warmup": FRACTION,
    "schedule.final": number(0, 1),
    "trainer.epochs": whole(1),
    "trainer.batch_size": whole(1),
    "trainer.accumulate": whole(1),
    "trainer.clip": number(0, open_low=True, optional=True),
    "trainer.precision": one_of("auto", "fp32", "bf16", "fp16"),
    "trainer.device": one_of("auto", "cpu", "cuda"),
    "trainer.compile": flag,
    "trainer.label_smoothing": FRACTION,
    "trainer.eval_every": whole(1),
    "trainer.log_every": whole(1),
    "trainer.checkpoint_every": whole(1),
    "trainer.limit_batches": whole(1, optional=True),
    "trainer.threads": whole(1, optional=True),
    "track.name": one_of("wandb", "local"),
    "track.mode": one_of("auto", "online", "offline"),
    "track.project": text,
}

# Inputs of the layers that may be sparse in the built-in models, known without building them (the runner asks the model itself).
SPARSE_INPUTS: dict[str, Callable[[dict[str, Any]], list[int]]] = {
    "small_conv": lambda model: model["channels"][:-1],
    "mlp": lambda model: model["hidden"][:-1],
    "resnet18": lambda model: [64, 128, 256, 512],
}


@dataclass(frozen=True)
class Config:
    """A checked config. ``plain`` is the whole of it as plain data, in canonical form; ``pattern`` is None for a dense run."""

    plain: dict[str, Any]
    pattern: Pattern | None

    def __getattr__(self, group: str) -> Any:
        try:
            return self.plain[group]
        except KeyError:
            raise AttributeError(group) from None

    @property
    def is_dense(self) -> bool:
        return self.pattern is None


def check(composed: DictConfig) -> Config:
    """Resolve and check a composed config. Raises ConfigError with every problem, one line each.

    Canonical form: the dense recipe ignores the ratio, and ``sparsity=dense`` makes any recipe the dense run, so both are the same run.
    """
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    plain.pop("hydra", None)
    problems = [
        f"{key}={_shown(value)}: it takes {allowed}"
        for key, value in flatten(plain).items()
        if key in CHECKS and (allowed := CHECKS[key](value)) is not None
    ]
    pattern = None
    if plain["sparsity"]["n"] is not None or plain["sparsity"]["m"] is not None:
        n, m = plain["sparsity"]["n"], plain["sparsity"]["m"]
        try:
            pattern = Pattern.parse(f"{n}:{m}")
        except PatternError as error:
            problems.append(f"sparsity={n}:{m}: {error}")
    if problems:
        raise ConfigError(problems)

    recipe = plain["recipe"]
    recipe.setdefault("name", str(recipe.get("_target_", "")).rpartition(".")[2].lower())
    if pattern is None or recipe["name"] == "dense":
        pattern, plain["recipe"], plain["sparsity"] = None, {"name": "dense"}, {"n": None, "m": None}
    problems = _combinations(plain, pattern)
    if problems:
        raise ConfigError(problems)
    return Config(plain, pattern)


def _combinations(plain: dict[str, Any], pattern: Pattern | None) -> list[str]:
    problems = []
    recipe, optimizer, model, trainer = plain["recipe"], plain["optimizer"], plain["model"], plain["trainer"]
    if recipe["name"] == "step":
        if optimizer["name"] not in ("adam", "adamw"):
            problems.append(
                f"recipe=step freezes Adam's second moment, which {optimizer['name']} has not: use optimizer=adam or adamw"
            )
        if recipe["t_min"] > recipe["t_max"]:
            problems.append(f"recipe.t_min={recipe['t_min']} is above recipe.t_max={recipe['t_max']}")
    if optimizer.get("nesterov") and not optimizer["momentum"]:
        problems.append("optimizer.nesterov=true needs optimizer.momentum above 0")
    if trainer["batch_size"] % trainer["accumulate"]:
        problems.append(
            f"trainer.batch_size={trainer['batch_size']} cannot be split into trainer.accumulate={trainer['accumulate']} equal micro-batches"
        )
    if pattern is not None and model["name"] in SPARSE_INPUTS:
        inputs = SPARSE_INPUTS[model["name"]](model)
        if not any(width % pattern.m == 0 for width in inputs):
            problems.append(
                f"sparsity={pattern}: model {model['name']} has no layer whose inputs are a multiple of {pattern.m} "
                f"(its inner layers have {', '.join(map(str, dict.fromkeys(inputs)))} inputs)"
            )
    folder = Path(plain["output_dir"])
    existing = next((p for p in [folder, *folder.absolute().parents] if p.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"output_dir={folder}: {existing} is not a folder that can be written to")
    return problems


def flatten(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).replace(" ", "")
