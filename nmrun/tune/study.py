"""The trials of one cell of a comparison, and which settings to try next.

Optuna proposes. Its study is made anew from ``trials.jsonl`` for each proposal, with a seed that
follows from the trial's number, so a comparison that was cut off goes on with the same proposals.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmrun.config.metric import higher_is_better
from nmrun.errors import ConfigError
from nmrun.files import jsonl
from nmrun.ranges import Search

SEED = 1000  # of the trials' runs: the seeds that are reported decide nothing
TRIALS = "trials.jsonl"


class Study:
    """The trials of one cell.

    Args:
        folder: where ``trials.jsonl`` is.
        space: the search spaces by key.
        defaults: the settings that the first trial has, by key.
    """

    def __init__(
        self, folder: Path, space: Mapping[str, Search], defaults: Mapping[str, Any]
    ) -> None:
        self.file, self.space, self.defaults = folder / TRIALS, space, defaults

    def trials(self) -> list[dict[str, Any]]:
        """List the trials that ended: ``params``, ``metric``, ``value`` (None where the run failed),
        and what else :meth:`add` was given.
        """
        return jsonl.read(self.file)[0]

    def add(self, params: Mapping[str, Any], metric: str, value: float | None, **rest: Any) -> None:
        """Note the end of a trial."""
        line = json.dumps({"params": dict(params), "metric": metric, "value": value, **rest})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def best(self, count: int) -> dict[str, Any] | None:
        """Find the best of the first ``count`` trials; None where all of them failed."""
        good = [trial for trial in self.trials()[:count] if trial["value"] is not None]
        choose = max if good and higher_is_better(good[0]["metric"]) else min
        return choose(good, key=lambda trial: trial["value"]) if good else None

    def propose(self, count: int) -> dict[str, Any]:
        """Choose the settings of the next trial: first the defaults, then by Optuna's TPE.

        Args:
            count: the number of trials in all; half of them are random.

        Returns:
            The settings by key, numbers with three digits.

        Raises:
            ConfigError: where Optuna is missing.
        """
        try:
            import optuna
        except ImportError:
            raise ConfigError("nmrun tune needs Optuna: pip install 'nmrun[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        done = self.trials()
        # each trial its own stream of random numbers, the same whoever goes on after an interrupt
        sampler = optuna.samplers.TPESampler(seed=len(done), n_startup_trials=max(2, count // 2))
        metrics = [trial["metric"] for trial in done if trial["value"] is not None]
        higher = bool(metrics) and higher_is_better(metrics[0])
        directions = optuna.study.StudyDirection
        direction = directions.MAXIMIZE if higher else directions.MINIMIZE
        study = optuna.create_study(direction=direction, sampler=sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls enqueueing experimental
            for past in done:
                study.enqueue_trial(past["params"])
                trial = study.ask()
                self._suggested(trial)
                if past["value"] is None:  # to TPE, worse than any that ended
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    study.tell(trial, past["value"])
            if not done and all(_within(self.defaults[key], s) for key, s in self.space.items()):
                study.enqueue_trial({key: self.defaults[key] for key in self.space})
            found = self._suggested(study.ask())
        return {key: _short(value, self.space[key]) for key, value in found.items()}

    def _suggested(self, trial: Any) -> dict[str, Any]:
        return {
            key: trial.suggest_categorical(key, list(search.values))
            if search.values
            else trial.suggest_float(key, search.low, search.high, log=search.log)
            for key, search in self.space.items()
        }


def _within(value: Any, search: Search) -> bool:
    if search.values:
        return value in search.values
    return isinstance(value, int | float) and search.low <= value <= search.high


def _short(value: Any, search: Search) -> Any:
    return value if search.values else min(max(float(f"{value:.3g}"), search.low), search.high)
