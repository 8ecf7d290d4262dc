"""The config of a run, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import Dataset, OwnDataset
from nmrun.lab.keys.fields import built
from nmrun.lab.keys.groups import Optimizer, RecipeKeys, Schedule, Sparsity, Track, Trainer
from nmrun.lab.keys.models import Model, OwnModel
from nmrun.patterns import Pattern


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
        given = self.plain["dataset"]
        if "_target_" not in given:
            return self._built("dataset")
        return OwnDataset(given["name"], given["_target_"], _beside(given))

    @functools.cached_property
    def model(self) -> Model:
        given = self.plain["model"]
        if "_target_" not in given:
            return self._built("model")
        rest = _beside(given)
        layers = {key: rest.pop(key) for key in ("include", "exclude")}
        return OwnModel(name=given["name"], **layers, target=given["_target_"], options=rest)

    @functools.cached_property
    def recipe(self) -> RecipeKeys:
        given = self.plain["recipe"]
        return RecipeKeys(given["name"], given.get("_target_"), _beside(given))

    @functools.cached_property
    def sparsity(self) -> Sparsity:
        return self._built("sparsity")

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        return self._built("optimizer")

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self._built("schedule")

    @functools.cached_property
    def trainer(self) -> Trainer:
        return self._built("trainer")

    @functools.cached_property
    def track(self) -> Track:
        return self._built("track")

    def _built(self, group: str) -> Any:
        given = self.plain[group]
        return built(options.kind(group, str(given.get("name"))), given, group)

    @property
    def seed(self) -> int:
        return self.plain["seed"]

    @property
    def init(self) -> str | None:
        return self.plain.get("init")  # older runs have no such key

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
    def is_dense(self) -> bool:
        return self.pattern is None


def _beside(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of the user's own, which its class or function knows."""
    return {key: value for key, value in given.items() if key not in ("name", "_target_")}
