"""The config of a run, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import Dataset, OwnDataset
from nmrun.lab.keys.groups import Optimizer, RecipeKeys, Schedule, Sparsity, Track, Trainer
from nmrun.lab.keys.models import Model, OwnModel
from nmrun.patterns import Pattern

# in a group with something of the user's own, the hash of its source (nmrun.lab.config.sources)
SOURCE = "_source_"


@dataclass(frozen=True)
class Config:
    """A checked config, with the groups as typed attributes: ``config.trainer.epochs``.

    ``plain`` is the whole of it as plain data, in canonical form; ``pattern`` is None for a dense
    run.
    """

    plain: dict[str, Any]
    pattern: Pattern | None

    @functools.cached_property
    def dataset(self) -> Dataset:
        values = self.plain["dataset"]
        if "_target_" not in values:
            return self._group("dataset")
        return OwnDataset(values["name"], values["_target_"], _own_keys(values))

    @functools.cached_property
    def model(self) -> Model:
        values = self.plain["model"]
        if "_target_" not in values:
            return self._group("model")
        rest = _own_keys(values)
        layers = {key: rest.pop(key) for key in ("include", "exclude")}
        return OwnModel(name=values["name"], **layers, target=values["_target_"], options=rest)

    @functools.cached_property
    def recipe(self) -> RecipeKeys:
        values = self.plain["recipe"]
        return RecipeKeys(values["name"], values.get("_target_"), _own_keys(values))

    @functools.cached_property
    def sparsity(self) -> Sparsity:
        return self._group("sparsity")

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        return self._group("optimizer")

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self._group("schedule")

    @functools.cached_property
    def trainer(self) -> Trainer:
        return self._group("trainer")

    @functools.cached_property
    def track(self) -> Track:
        return self._group("track")

    def _group(self, group: str) -> Any:
        values = self.plain[group]
        return options.kind(group, str(values.get("name"))).of(values, group)

    @property
    def seed(self) -> int:
        return self.plain["seed"]

    @property
    def init(self) -> str | None:
        return self.plain["init"]

    @property
    def output_dir(self) -> str:
        return self.plain["output_dir"]

    @property
    def resume(self) -> bool:
        return self.plain["resume"]

    @property
    def force(self) -> bool:
        return self.plain["force"]

    @property
    def dry(self) -> bool:
        return self.plain["dry"]

    @property
    def detach(self) -> bool:
        return self.plain["detach"]

    @property
    def is_dense(self) -> bool:
        return self.pattern is None


def _own_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of the user's own, which its class or function knows."""
    return {key: value for key, value in values.items() if key not in ("name", "_target_", SOURCE)}


def flatten(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config with dotted keys. The regular expressions in ``sparsity.overrides`` are not keys."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        nested = isinstance(value, dict) and key != "overrides"
        below = flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
        flat.update(below)
    return flat
