"""The config of a run, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nmrun.lab.keys import datasets, models
from nmrun.lab.keys.data_groups import Dataset
from nmrun.lab.keys.groups import (
    OPTIMIZERS,
    SCHEDULES,
    TRACKS,
    Optimizer,
    Recipe,
    Schedule,
    Sparsity,
    Track,
    Trainer,
)
from nmrun.lab.keys.reader import built
from nmrun.patterns import Pattern


@dataclass(frozen=True)
class Config:
    """A checked config, with the groups as typed attributes: ``config.trainer.epochs``.

    Args:
        plain: the whole of it as plain data, in canonical form.
        pattern: None for a dense run.
    """

    plain: dict[str, Any]
    pattern: Pattern | None

    @functools.cached_property
    def dataset(self) -> Dataset:
        return datasets.read(self.plain["dataset"])

    @functools.cached_property
    def model(self) -> models.Model:
        return models.read(self.plain["model"])

    @functools.cached_property
    def recipe(self) -> Recipe:
        given = self.plain["recipe"]
        options = {key: value for key, value in given.items() if key not in ("name", "_target_")}
        return Recipe(given["name"], given.get("_target_"), options)

    @functools.cached_property
    def sparsity(self) -> Sparsity:
        return built(Sparsity, self.plain["sparsity"], "sparsity")

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        given = self.plain["optimizer"]
        return built(OPTIMIZERS[given["name"]], given, "optimizer")

    @functools.cached_property
    def schedule(self) -> Schedule:
        given = self.plain["schedule"]
        return built(SCHEDULES[given["name"]], given, "schedule")

    @functools.cached_property
    def trainer(self) -> Trainer:
        return built(Trainer, self.plain["trainer"], "trainer")

    @functools.cached_property
    def track(self) -> Track:
        given = self.plain["track"]
        return built(TRACKS[given["name"]], given, "track")

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
