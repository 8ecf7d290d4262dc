"""The trials of one cell of a comparison, and which settings to try next.

``trials.jsonl`` lists the settings that were tried, in order. Only the ``result.json`` of each run,
whose hash is checked, says how it ended. Optuna proposes. Its study is made anew for each proposal,
with a seed that follows from the trial's number. So a comparison that was cut off goes on with the
same proposals."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nmrun import atomic
from nmrun.errors import ConfigError, needs
from nmrun.lab.keys.config import flatten
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.ranges import Search

SEED = 1000  # of the trials' runs: the reported seeds must not decide
FINALISTS = 2  # the best trials, which are repeated with each of
AGAIN = (1001, 1002)
TRIALS, RUNS = "trials.jsonl", "runs"
ENDED = ("finished", "failed")  # statuses after which nothing is left to do


@dataclass(frozen=True)
class Trial:
    """A run that ended: its settings by key, and the validation metric of its last weights; None
    where it failed or the metric was not finite. A failed run says nothing of the metric."""

    params: dict[str, Any]
    seed: int
    metric: str
    value: float | None
    seconds: float
    higher_is_better: bool = False

    @property
    def loss(self) -> float:
        """The value, so that less is better."""
        assert self.value is not None
        return -self.value if self.higher_is_better else self.value


def ended(folder: Path, space: Mapping[str, Search]) -> list[Trial]:
    """The runs of a cell's tuning that ended, and whose results are as they were written."""
    trials = []
    for file in sorted((folder / RUNS).glob("*/*/*/*/*/result.json")):
        run = RunFolder(file.parent)
        result = {} if run.broken() else run.result
        if result and result.get("status") in ENDED and not result.get("of_machine"):
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # written by hand
                trials.append(of_result(result, space))
    return trials


def of_result(result: Mapping[str, Any], space: Mapping[str, Search]) -> Trial:
    """How a run ended, by its ``result.json``. ConfigError where it has no metric of a validation
    split."""
    flat = flatten(result["config"])
    params, seconds = {key: flat[key] for key in space if key in flat}, result["seconds"] or 0.0
    if result["status"] == "failed":
        return Trial(params, flat["seed"], "", None, seconds)
    metric, final = f"eval/{result['metric']}", result["metrics"]["final"]
    if metric not in final:
        raise ConfigError(f"{flat['dataset.name']} has no validation split to tune by")
    value, higher = final[metric], result["higher_is_better"]
    return Trial(params, flat["seed"], metric, value, seconds, higher)


class Study:
    """The trials of one cell: ``trials.jsonl`` in its folder, and the ``runs`` that ended. The
    first trial has the ``defaults``."""

    def __init__(
        self,
        folder: Path,
        space: Mapping[str, Search],
        defaults: Mapping[str, Any],
        runs: Sequence[Trial],
    ) -> None:
        self.folder, self.space, self.defaults, self.runs = folder, space, defaults, runs

    def settings(self) -> list[dict[str, Any]]:
        """What ``trials.jsonl`` lists, up to its first damaged line."""
        lines, damaged = documents.read_lines(self.folder / TRIALS)
        whole = lines[: damaged[0] - 1] if damaged else lines
        listed: list[Any] = [line.get("params") for line in whole]
        return [*itertools.takewhile(lambda params: {*(params or ())} == {*self.space}, listed)]

    def trials(self) -> list[Trial]:
        """List the trials in order, up to the first whose run has not ended."""
        ended = []
        for params in self.settings():
            run = self.run(params, SEED)
            if run is None:
                break
            ended.append(run)
        return ended

    def _distinct(self, count: int) -> list[Trial]:
        """The first ``count`` trials without repetitions, which lists of values lead to."""
        trials = self.trials()[:count]
        return [trial for number, trial in enumerate(trials) if trial not in trials[:number]]

    def run(self, params: Mapping[str, Any], seed: int) -> Trial | None:
        return next((run for run in self.runs if (run.params, run.seed) == (params, seed)), None)

    def add(self, params: Mapping[str, Any]) -> None:
        """List the settings of the next trial. They replace a damaged line and all after it."""
        listed, number = self.settings(), len(self.trials())
        listed[number : number + 1] = [dict(params)]
        lines = "".join(json.dumps({"params": each}) + "\n" for each in listed)
        atomic.write(self.folder / TRIALS, lines, shared=True)

    def ranked(self, count: int) -> list[Trial]:
        """Order the first ``count`` trials, without those that failed, the best first."""
        scored = [trial for trial in self._distinct(count) if trial.value is not None]
        return sorted(scored, key=lambda trial: trial.loss)

    def to_repeat(self, count: int) -> list[tuple[dict[str, Any], int]]:
        """List the finalists' settings with the seeds that they have not been repeated with."""
        finalists = self.ranked(count)[:FINALISTS]
        repeats = [(trial.params, seed) for trial in finalists for seed in AGAIN]
        return [(params, seed) for params, seed in repeats if self.run(params, seed) is None]

    def has_ended(self, count: int) -> bool:
        """Whether ``count`` trials and the repeats of the finalists have ended."""
        return len(self.trials()) >= count and not self.to_repeat(count)

    def best(self, count: int) -> Trial | None:
        """The trial whose mean over the tuning seeds is best, with that mean; None before the end, and
        where every finalist failed with some seed.

        One lucky seed must not win: near the largest learning rate that works at all, the seed
        decides whether a run succeeds."""
        means = []
        for trial in self.ranked(count)[:FINALISTS] if self.has_ended(count) else ():
            every = self.values(trial.params)
            values = [value for value in every if value is not None]
            if len(values) == len(every):
                means.append(replace(trial, value=sum(values) / len(values)))
        return min(means, key=lambda trial: trial.loss, default=None)

    def seconds(self, count: int) -> float:
        return sum(run.seconds for run in [*self._distinct(count), *self.repeats()])

    def values(self, params: dict[str, Any]) -> list[float | None]:
        """The metric by tuning seed, for runs that have ended."""
        runs = [self.run(params, seed) for seed in (SEED, *AGAIN)]
        return [run.value for run in runs if run is not None]

    def repeats(self) -> list[Trial]:
        return [run for run in self.runs if run.seed in AGAIN]

    def propose(self, count: int) -> dict[str, Any]:
        """The settings of the next of ``count`` trials: those that are listed, then the defaults,
        then by Optuna's TPE, half of all at random; numbers have three digits."""
        optuna = import_optuna()
        optuna.logging.set_verbosity(logging.WARNING)
        listed, trials = self.settings(), self.trials()
        if len(trials) < len(listed):
            return listed[len(trials)]
        # each trial its own stream of random numbers, the same whoever goes on after an interrupt
        sampler = optuna.samplers.TPESampler(seed=len(trials), n_startup_trials=max(2, count // 2))
        study = optuna.create_study(sampler=sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls enqueueing experimental
            for past in trials:
                study.enqueue_trial(past.params)
                trial = study.ask()
                self._suggested(trial)
                if past.value is None:  # TPE gets a value worse than any that a run had
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    study.tell(trial, past.loss)
            if not trials and all(_within(self.defaults[key], s) for key, s in self.space.items()):
                study.enqueue_trial({key: self.defaults[key] for key in self.space})
            proposed = self._suggested(study.ask())
        return {key: _short(value, self.space[key]) for key, value in proposed.items()}

    def _suggested(self, trial: Any) -> dict[str, Any]:
        return {
            key: trial.suggest_categorical(key, list(search.values))
            if search.values
            else trial.suggest_float(key, search.low, search.high, log=search.log)
            for key, search in self.space.items()
        }


def import_optuna() -> Any:
    with needs("nmrun tune", "tune"):
        import optuna
    return optuna


def _within(value: Any, search: Search) -> bool:
    if search.values:
        return value in search.values
    return isinstance(value, int | float) and search.low <= value <= search.high


def _short(value: Any, search: Search) -> Any:
    return value if search.values else min(max(float(f"{value:.3g}"), search.low), search.high)
