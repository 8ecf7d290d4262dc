"""The trials of one cell of a comparison, and which settings to try next.

Optuna proposes. Its study is made anew from ``trials.jsonl`` for each proposal, with a seed that
follows from the trial's number, so a comparison that was cut off goes on with the same proposals.
"""

from __future__ import annotations

import json
import logging
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
FINALISTS = 2  # the best trials, which are repeated with each of
AGAIN = (1001, 1002)
TRIALS, REPEATS = "trials.jsonl", "repeats.jsonl"


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
        self.folder, self.space, self.defaults = folder, space, defaults

    def trials(self) -> list[dict[str, Any]]:
        """List the trials that ended: ``params``, ``metric``, ``value`` (None where the run failed),
        and what else :meth:`add` was given.
        """
        return jsonl.read(self.folder / TRIALS)[0]

    def add(self, params: Mapping[str, Any], metric: str, value: float | None, **rest: Any) -> None:
        """Note the end of a trial."""
        self._append(TRIALS, {"params": dict(params), "metric": metric, "value": value, **rest})

    def ranked(self, count: int) -> list[dict[str, Any]]:
        """Order the first ``count`` trials, without those that failed, the best first."""
        good = [trial for trial in self.trials()[:count] if trial["value"] is not None]
        higher = bool(good) and higher_is_better(good[0]["metric"])
        return sorted(good, key=lambda trial: trial["value"], reverse=higher)

    def to_repeat(self, count: int) -> list[tuple[dict[str, Any], int]]:
        """List the finalists' settings with the seeds that they have not been repeated with."""
        done = [(again["params"], again["seed"]) for again in self.repeats()]
        return [
            (trial["params"], seed)
            for trial in self.ranked(count)[:FINALISTS]
            for seed in AGAIN
            if (trial["params"], seed) not in done
        ]

    def repeated(
        self, params: Mapping[str, Any], seed: int, value: float | None, **rest: Any
    ) -> None:
        """Note the end of a finalist's run with another seed."""
        self._append(REPEATS, {"params": dict(params), "seed": seed, "value": value, **rest})

    def best(self, count: int) -> dict[str, Any] | None:
        """Find the settings whose mean over the tuning seeds is best.

        One lucky seed makes no winner: near the largest learning rate that trains at all, a run
        may go well or badly by its seed.

        Args:
            count: the number of trials that count.

        Returns:
            The trial, with the mean as ``value``; None where every finalist failed with some seed.
        """
        means = []
        for trial in self.ranked(count)[:FINALISTS]:
            own = [again for again in self.repeats() if again["params"] == trial["params"]]
            values = [trial["value"], *(again["value"] for again in own)]
            if None not in values:
                means.append({**trial, "value": sum(values) / len(values)})
        choose = max if means and higher_is_better(means[0]["metric"]) else min
        return choose(means, key=lambda trial: trial["value"]) if means else None

    def seconds(self, count: int) -> float:
        """Add up the seconds of the trials that count and of the finalists' repeats."""
        return sum(run["seconds"] for run in [*self.trials()[:count], *self.repeats()])

    def repeats(self) -> list[dict[str, Any]]:
        """List the finalists' runs with other seeds: ``params``, ``seed``, ``value``, ``seconds``."""
        return jsonl.read(self.folder / REPEATS)[0]

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())

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
        optuna.logging.set_verbosity(logging.WARNING)
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
