"""Which settings are tried next, and which were best."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmrun.lab.tune.study import SEED, Study, Trial
from nmrun.ranges import among, between, log

SPACE = {"optimizer.lr": log(1e-4, 1e-1), "recipe.switch": among("auto", 0.2, 0.5)}
DEFAULTS = {"optimizer.lr": 1e-3, "recipe.switch": "auto"}


class Runs:
    """Trials, whose runs end as ``value`` says."""

    def __init__(self, folder: Path, higher_is_better: bool = False) -> None:
        self.folder, self.higher, self.ended = folder, higher_is_better, []
        folder.mkdir(exist_ok=True)

    def study(self) -> Study:
        return Study(self.folder, SPACE, DEFAULTS, self.ended)

    def run(self, params, value, seed: int = SEED, seconds: float = 1.0) -> None:
        self.ended.append(Trial(params, seed, "eval/score", value, seconds, self.higher))

    def tried(self, params, value, seconds: float = 1.0) -> None:
        self.study().add(params)
        self.run(params, value, seconds=seconds)


def rate(value: float) -> dict:
    return {"optimizer.lr": value, "recipe.switch": "auto"}


def tuned(folder: Path, trials: int, value, sittings: int = 1) -> Study:
    """Do the trials with ``value(params)``, in so many processes' lives."""
    runs = Runs(folder)
    for sitting in range(1, sittings + 1):
        while len(runs.study().trials()) < trials * sitting // sittings:
            params = runs.study().propose(trials)
            runs.tried(params, value(params))
    return runs.study()


def test_proposals_lie_in_the_space_and_the_first_one_is_the_defaults(tmp_path):
    first, *others = tuned(tmp_path, 12, lambda params: params["optimizer.lr"]).trials()
    assert first.params == DEFAULTS
    for trial in others:
        assert 1e-4 <= trial.params["optimizer.lr"] <= 1e-1
        assert trial.params["recipe.switch"] in ("auto", 0.2, 0.5)
    space = SPACE | {"optimizer.lr": between(0.5, 0.9)}  # without the defaults
    (tmp_path / "other").mkdir()
    other = Study(tmp_path / "other", space, DEFAULTS, []).propose(8)
    assert 0.5 <= other["optimizer.lr"] <= 0.9


def test_numbers_have_three_digits(tmp_path):
    rates = [t.params["optimizer.lr"] for t in tuned(tmp_path, 5, lambda params: 1.0).trials()]
    assert rates == [float(f"{rate:.3g}") for rate in rates]
    assert len(set(rates)) == 5


def test_a_study_that_was_cut_off_goes_on_with_the_same_proposals(tmp_path):
    def bowl(params):
        return (params["optimizer.lr"] - 0.01) ** 2

    whole = tuned(tmp_path / "whole", 10, bowl).trials()
    assert tuned(tmp_path / "cut", 10, bowl, sittings=5).trials() == whole


def test_it_finds_the_bottom_of_a_bowl(tmp_path):
    """The learning rate's error at the best of 24 trials, in decades; 0.5 would be the expected one of 3 random ones."""
    from math import log10

    study = tuned(tmp_path, 24, lambda params: abs(log10(params["optimizer.lr"] / 0.02)))
    assert study.ranked(24)[0].value < 0.2


@pytest.mark.parametrize(("higher", "best"), [(False, 2.0), (True, 7.0)])
def test_the_best_is_by_the_metrics_own_direction(tmp_path, higher, best):
    runs = Runs(tmp_path, higher)
    last = 9.0 if higher else 1.0
    for number, value in enumerate((5.0, None, 2.0, 7.0, last), 1):
        runs.tried(rate(number / 100), value)
    assert runs.study().ranked(4)[0].value == best  # the fifth does not count
    assert runs.study().ranked(5)[0].value == last
    assert len(runs.study().ranked(5)) == 4  # one failed


def test_the_best_two_are_repeated_and_the_better_mean_wins(tmp_path):
    runs = Runs(tmp_path)
    for lr, value in ((0.001, 3.0), (0.02, 1.0), (0.01, 2.0)):
        runs.tried(rate(lr), value, seconds=10.0)
    expected = [(rate(lr), seed) for lr in (0.02, 0.01) for seed in (1001, 1002)]
    assert runs.study().to_repeat(3) == expected
    for (params, seed), value in zip(expected, (1.0, 7.0, 2.0, 2.5), strict=True):
        assert (params, seed) in runs.study().to_repeat(3)
        assert runs.study().best(3) is None  # the last repeat may decide
        runs.run(params, value, seed)
    assert runs.study().to_repeat(3) == []
    # the mean of 1, 1 and 7 is 3; that of 2, 2 and 2.5 is 6.5 / 3
    best = runs.study().best(3)
    assert best.params == rate(0.01)
    assert best.value == pytest.approx(6.5 / 3)
    assert runs.study().seconds(3) == 34.0
    assert runs.study().best(4) is None


def test_settings_that_come_again_are_one_finalist(tmp_path):
    """Of a list of values, the best one is soon proposed a second time."""
    runs = Runs(tmp_path)
    for lr, value in ((0.02, 1.0), (0.02, 1.0), (0.03, 3.0), (0.01, 2.0)):
        runs.study().add(rate(lr))
        if runs.study().run(rate(lr), SEED) is None:
            runs.run(rate(lr), value, seconds=10.0)
    assert len(runs.study().trials()) == 4
    repeats = [(rate(lr), seed) for lr in (0.02, 0.01) for seed in (1001, 1002)]
    assert runs.study().to_repeat(4) == repeats
    for (params, seed), value in zip(repeats, (4.0, 4.0, 2.0, 2.0), strict=True):
        runs.run(params, value, seed)
    assert runs.study().best(4).params == rate(0.01)
    assert runs.study().seconds(4) == 34.0


def test_a_finalist_that_fails_with_another_seed_does_not_win(tmp_path):
    runs = Runs(tmp_path)
    runs.tried(rate(0.02), 1.0)
    runs.tried(rate(0.01), 2.0)
    for lr, seed in ((0.02, 1001), (0.02, 1002), (0.01, 1001), (0.01, 1002)):
        runs.run(rate(lr), None if (lr, seed) == (0.02, 1001) else 1.5, seed)
    assert runs.study().best(2).params == rate(0.01)


@pytest.mark.parametrize("damage", ["{", '{"params": {}}', '{"value": 1.0}', "[]", "\0"])
def test_the_trials_from_a_damaged_line_on_are_the_same_again(tmp_path, damage):
    """Their runs ended, so nothing is lost but the line."""
    whole = tuned(tmp_path, 6, lambda params: params["optimizer.lr"])
    file = tmp_path / "trials.jsonl"
    before = file.read_bytes()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], f"{damage}\n", *lines[3:]]))
    assert len(whole.trials()) == 2
    while len(whole.trials()) < 6:
        whole.add(whole.propose(6))  # no run: it is found
    assert file.read_bytes() == before


def test_a_trial_whose_run_is_gone_is_proposed_again(tmp_path):
    study = tuned(tmp_path, 4, lambda params: params["optimizer.lr"])
    lost = study.trials()[1]
    fewer = Study(tmp_path, SPACE, DEFAULTS, [run for run in study.runs if run != lost])
    assert fewer.trials() == study.trials()[:1]
    assert fewer.propose(4) == lost.params
    fewer.add(lost.params)
    assert study.trials() == study.runs  # the later ones are still listed


def test_failed_trials_count_and_are_never_the_best(tmp_path):
    study = tuned(tmp_path, 6, lambda params: None)
    assert len(study.trials()) == 6
    assert study.best(6) is None
    assert study.to_repeat(6) == []


def test_after_failures_at_high_rates_it_looks_lower(tmp_path):
    def diverges(params):
        return None if params["optimizer.lr"] > 1e-3 else 1.0

    rates = [t.params["optimizer.lr"] for t in tuned(tmp_path, 24, diverges).trials()]
    early, late = rates[:12], rates[12:]  # random, then TPE's
    assert sum(rate <= 1e-3 for rate in late) > sum(rate <= 1e-3 for rate in early)
