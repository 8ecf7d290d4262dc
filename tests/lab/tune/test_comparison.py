"""A comparison from nothing to its table: equal trials, seeds with what was found, and what stops it."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from runs import TINY, result_of, rewrite

from nmrun.errors import ConfigError, RunError
from nmrun.lab.api.reports import table
from nmrun.lab.compare.runs import collect
from nmrun.lab.config import schema
from nmrun.lab.config.composition import composed, composing
from nmrun.lab.config.identity import run_folder
from nmrun.lab.keys.config import flatten
from nmrun.lab.runs import locks
from nmrun.lab.sweeps import jobs
from nmrun.lab.train import results
from nmrun.lab.tune import comparison, main, plan
from nmrun.lab.tune.study import Study, Trial, ended
from nmrun.ranges import among

pytestmark = pytest.mark.slow

SWEEP = [
    *(word for word in TINY if not word.startswith("sparsity")),
    *("recipe=dense,sr_ste", "sparsity=1:4,1:8", "seed=0,1", "trainer.epochs=1"),
]
PLACE = Path("outputs/.tune/try")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tune(*words: str) -> int:
    return main(["try", "--trials", "3", *SWEEP, *words])


def studies(place: Path = PLACE) -> dict[str, Study]:
    by_cell = {}
    for file in sorted(place.rglob("study.json")):
        space = dict.fromkeys(json.loads(file.read_text())["space"], among())
        by_cell[file.parent.name] = Study(file.parent, space, {}, ended(file.parent, space))
    return by_cell


def trials(place: Path = PLACE) -> dict[str, list[Trial]]:
    return {name: study.trials() for name, study in studies(place).items() if study.trials()}


def values(tried: dict[str, list[Trial]]) -> dict[str, list[Any]]:
    return {cell: [(trial.params, trial.value) for trial in each] for cell, each in tried.items()}


def cells_here() -> list[plan.TuningCell]:
    return plan.cells(PLACE.absolute(), jobs.checked(SWEEP, multirun=True).jobs, {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the comparison, which tests leave as it is, and what was printed."""
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def trained_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("dense"), "recipe=dense")[0]


@pytest.fixture
def dense(trained_dense: Path, _here: None) -> None:
    """In the current folder, a comparison of dense alone."""
    shutil.copytree(trained_dense, Path(), dirs_exist_ok=True)


def trained(folder: Path, *words: str) -> tuple[Path, str]:
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tune(*words) == 0
    return folder, printed.getvalue()


def test_every_cell_gets_the_same_trials_and_its_seeds_have_the_best(whole, monkeypatch):
    monkeypatch.chdir(whole[0])
    by_cell, runs = trials(), collect(["outputs"])
    assert by_cell.keys() == {"dense", "sr_ste-1-4", "sr_ste-1-8"}  # dense has no ratio
    assert {len(lines) for lines in by_cell.values()} == {3}
    assert sorted(runs["seed"]) == [0, 0, 0, 1, 1, 1]
    for cell, tried in by_cell.items():
        repeats = studies()[cell].repeats()
        assert sorted(again.seed for again in repeats) == [1001, 1001, 1002, 1002]

        def mean(trial, repeats=repeats):
            values = [again.value for again in repeats if again.params == trial.params]
            return (trial.value + sum(values)) / 3

        best = max(sorted(tried, key=lambda trial: -trial.value)[:2], key=mean)
        name, _, ratio = cell.partition("-")
        of_cell = (runs["recipe"] == name) & (runs["sparsity"] == (ratio.replace("-", ":") or name))
        for key, value in best.params.items():
            assert set(runs[of_cell][key]) == {value}
        results = map(result_of, PLACE.glob(f"{cell}/runs/**/s1000-*"))
        (of_trial,) = [
            result["metrics"]["final"]["eval/accuracy"]
            for result in results
            if best.params.items() <= flatten(result["config"]).items()
        ]
        assert of_trial == best.value
    printed = whole[1]
    assert "each cell tuned before by 3 trials by validation accuracy, the best two" in printed
    assert set(pd.read_csv(PLACE / "trials.csv")["cell"]) == {"dense", "sr_ste 1:4", "sr_ste 1:8"}
    assert re.search(r"sr_ste 1:8\s+\| 3\s+\| validation accuracy", printed)


def test_trials_leave_the_test_split_alone(whole):
    expected = {f"{PLACE}/*/runs": (3 * (3 + 4), False), "outputs/digits": (3 * 2, True)}
    for place, (count, tested) in expected.items():
        folders = [file.parent for file in whole[0].glob(f"{place}/**/result.json")]
        assert len(folders) == count
        for folder in folders:
            assert ("test/accuracy" in result_of(folder)["metrics"]["final"]) == tested


def test_the_command_of_each_run_asks_for_it(whole, monkeypatch):
    """With its settings, seed and folder, for trials, their repeats and the seeds."""
    monkeypatch.chdir(whole[0])
    folders = [file.parent for file in Path("outputs").rglob("result.json")]
    assert len(folders) == 3 * (3 + 4 + 2)
    for folder in folders:
        nmrun, *words = shlex.split(result_of(folder)["environment"]["command"])
        assert nmrun == "nmrun"
        with composing():
            asked = schema.check(composed(words, {}))
        assert run_folder(asked).absolute() == folder.absolute()


def test_its_csv_has_every_cell_of_the_table(whole, monkeypatch):
    monkeypatch.chdir(whole[0])
    keys = ["recipe", "sparsity", "mean", "sd", "n"]
    pd.testing.assert_frame_equal(table(PLACE / "runs.csv")[keys], table("outputs")[keys])
    assert str(Path.cwd()) not in (PLACE / "runs.csv").read_text()


def test_each_run_has_a_line(whole):
    """Of three cells: three trials, four repeats and two seeds."""
    lines = [line for line in whole[1].splitlines() if re.search(r"  \d+ s$", line)]
    assert Counter(line.split("  ")[0] for line in lines) == dict.fromkeys(
        ("dense", "sr_ste 1:4", "sr_ste 1:8"), 3 + 4 + 2
    )
    assert lines[0].startswith("dense  trial 1/3  lr=0.001  validation accuracy ")


def test_given_again_it_does_nothing_and_prints_the_table(whole, capsys, monkeypatch):
    monkeypatch.chdir(whole[0])
    first = whole[1].splitlines()
    monkeypatch.setattr(jobs, "one", None)
    assert tune() == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [line for line in first if not re.search(r"  (trial|seed) \d", line)]


def test_a_dry_one_says_what_it_would_do_and_writes_nothing(capsys):
    assert tune("dry=true") == 0
    *cells, total, folder = capsys.readouterr().out.splitlines()
    rate = "optimizer.lr 0.0002 to 0.005 (log)"
    decay = "recipe.decay 1e-06 to 0.01 (log)"
    assert [line.strip() for line in cells] == [
        f"dense       {rate}", f"sr_ste 1:4  {rate}; {decay}", f"sr_ste 1:8  {rate}; {decay}"
    ]  # fmt: skip
    # of each cell 3 trials, the best two again with two seeds, and the seeds 0 and 1
    assert total.endswith(
        "3 cells, in each 3 trials and 4 repeats of the best; 6 runs of seeds: 27 runs"
    )
    assert folder.strip() == str(PLACE.absolute())
    assert not list(Path().iterdir())


def test_without_optuna_nothing_is_begun(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="needs optuna"):
        tune()
    assert not capsys.readouterr().out
    assert not list(Path().iterdir())


def test_other_swept_keys_are_rows(capsys):
    words = "recipe=dense,step trainer.epochs=1,2 seed=0,1 --over recipe.switch=0.5,0.6"
    assert main(["other", "--trials", "1", *TINY, *words.split()]) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^\| (dense|step) +\| (\d) ", output, re.MULTILINE)
    assert rows == [(recipe, epochs) for recipe in ("dense", "step") for epochs in ("1", "2")]
    place = PLACE.with_name("other")
    assert (place / "table.md").read_text() in output
    runs = pd.read_csv(place / "runs.csv")
    assert sorted(zip(runs["tuned.cell"], runs["seed"], strict=True)) == [
        (f"{cell} {n}", seed) for cell in ("dense", "step 2:4") for n in (1, 2) for seed in (0, 1)
    ]  # fmt: skip


def test_a_data_set_without_a_test_split_is_shown_on_its_validation_split():
    alike = {"model": "m", "optimizer": "adam", "recipe": "ste", "sparsity": "2:4", "seed": 0,
             "status": "finished", "metric": "accuracy", "folder": "f"}  # fmt: skip
    runs = pd.DataFrame([
        {**alike, "dataset": "a", "test/accuracy": 0.5, "eval/accuracy": 0.6},
        {**alike, "dataset": "b", "eval/accuracy": 0.7},
    ])  # fmt: skip
    text = comparison.outcome_text(comparison.Outcome([], runs.to_dict("records")))
    assert re.findall(r"^(\w+) accuracy", text, re.M) == ["test", "validation"]
    assert re.findall(r"\| ste +\| ([\d.]+) ", text) == ["50.0", "70.0"]


def test_rows_of_other_cells_stay(dense):
    assert tune("recipe=ste", "sparsity=1:4") == 0
    runs, tried = (pd.read_csv(PLACE / name) for name in ("runs.csv", "trials.csv"))
    assert [*runs["tuned.cell"]] == ["dense"] * 2 + ["ste 1:4"] * 2
    assert [*tried["cell"]] == ["dense"] * 7 + ["ste 1:4"] * 7
    assert set(table(PLACE / "runs.csv")["recipe"]) == {"dense", "ste"}
    # its own lines are written anew, and those of others are as they were; a spreadsheet saves a
    # file with a mark of UTF-8
    for name in ("runs.csv", "trials.csv"):
        (PLACE / name).write_bytes(codecs.BOM_UTF8 + (PLACE / name).read_bytes())
    assert tune("recipe=dense") == 0
    again, tried = (pd.read_csv(PLACE / name) for name in ("runs.csv", "trials.csv"))
    assert [*again["tuned.cell"]] == ["ste 1:4"] * 2 + ["dense"] * 2
    assert [*tried["cell"]] == ["ste 1:4"] * 7 + ["dense"] * 7
    by_id = [frame.set_index("id").sort_index(axis=1).sort_index() for frame in (again, runs)]
    pd.testing.assert_frame_equal(*by_id, check_dtype=False)


def test_cut_off_anywhere_it_ends_with_the_same(whole, monkeypatch):
    expected, runs = trials(whole[0] / PLACE), table(whole[0] / PLACE / "runs.csv")
    do, left = jobs.one, [0]

    def stopping(*args, **kwargs):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return do(*args, **kwargs)

    monkeypatch.setattr(jobs, "one", stopping)
    for _ in range(13):  # of 27 runs two in each sitting
        left[0] = 2
        with pytest.raises(KeyboardInterrupt):
            tune("output_dir=cut")
    left[0] = 1
    assert tune("output_dir=cut") == 0
    cut = trials(Path("cut/.tune/try"))
    assert values(cut) == values(expected)
    pd.testing.assert_frame_equal(table("cut/.tune/try/runs.csv"), runs)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_cell_that_another_process_has(leaves, capsys, monkeypatch):
    """It is left to it; and taken in the end, where the other leaves it."""
    cells, run = cells_here(), comparison.run
    cells[1].folder.mkdir(parents=True)
    with contextlib.ExitStack() as other:
        other.enter_context(locks.hold(cells[1].folder))

        def leaving(cell, *rest):
            done = run(cell, *rest)
            if leaves and cell.name == cells[2].name:
                other.close()
            return done

        monkeypatch.setattr(comparison, "run", leaving)
        assert tune() == 0
    said = f"at work in other processes: {cells[1].name}; the same command goes on"
    assert (said in capsys.readouterr().out) != leaves
    assert (cells[1].folder.name in trials()) == leaves
    assert {cells[0].folder.name, cells[2].folder.name} <= trials().keys()


def test_the_run_of_a_seed_that_another_process_has_is_left_to_it(dense, capsys):
    """Two comparisons with one recipe in common come to the same run."""
    folder = Path(collect(["outputs"])["folder"].iloc[0])
    (folder / "result.json").unlink()
    with locks.hold(folder):
        assert tune("recipe=dense") == 0
    assert "at work in other processes: dense; the same command goes on" in capsys.readouterr().out
    assert tune("recipe=dense") == 0
    assert len(collect(["outputs"])) == 2


def test_a_run_that_cannot_begin_is_said(dense, monkeypatch):
    folder = Path(collect(["outputs"])["folder"].iloc[0])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics\.jsonl of this finished run: .*force=true"):
        tune("recipe=dense")


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_it_with_a_line(number, ends, capsys, monkeypatch):
    def cut_off(config, **_):
        return {"status": "interrupted", "signal": int(number)}

    monkeypatch.setattr(jobs, "one", cut_off)
    with pytest.raises(ends):
        tune()
    assert capsys.readouterr().out.endswith("\ninterrupted; the same command goes on\n")
    assert not trials()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.epochs=3"], "was tuned with trainer.epochs=1, and now 3 is asked for"),
        (["trainer.epochs=2,1"], "dense 1 was tuned as dense, and its seeds would count twice"),
        (
            ["--over", "optimizer.lr=interval(0.1,0.2)"],
            r"was tuned with optimizer.lr=0.0002 to 0.005 \(log\), and now 0.1 to 0.2",
        ),
    ],
)
def test_other_trials_under_the_same_name_are_refused(words, message, dense):
    before = {file: file.read_bytes() for file in PLACE.rglob("*.json*")}
    with pytest.raises(ConfigError, match=message):
        tune("recipe=dense", *words)
    assert before == {file: file.read_bytes() for file in PLACE.rglob("*.json*")}


def test_a_key_of_a_later_version_changes_no_cell(dense):
    file = PLACE / "dense" / "study.json"
    record = json.loads(file.read_text())
    assert record["settings"].pop("trainer.input_gradient") == "exact"
    file.write_text(json.dumps(record))
    assert tune("recipe=dense") == 0


def test_more_trials_go_on_from_those_that_are_there(dense):
    three = trials()["dense"]
    assert main(["try", "--trials", "5", *SWEEP, "recipe=dense"]) == 0
    five = trials()["dense"]
    assert five[:3] == three
    assert len(five) == 5


def test_a_recipe_of_which_all_trials_fail_is_named(capsys):
    failing = ["recipe=dense", "seed=0", "--over", "optimizer.lr=interval(1e30,2e30)"]
    assert tune(*failing) == 1
    said = capsys.readouterr().out
    assert "failed: dense" in said
    assert "nmrun table" not in said  # there is no run to show
    assert [file.name for file in PLACE.glob("*.csv")] == ["trials.csv"]


def test_a_process_that_finds_every_cell_taken_writes_no_runs(capsys):
    with contextlib.ExitStack() as other:
        for cell in cells_here():
            cell.folder.mkdir(parents=True)
            other.enter_context(locks.hold(cell.folder))
        assert tune() == 0
    assert "at work in other processes: dense, sr_ste 1:4, sr_ste 1:8;" in capsys.readouterr().out
    assert not [*PLACE.glob("*.csv")]


def test_while_a_repeat_is_not_done_nobody_has_won(dense):
    runs = (PLACE / "runs.csv").read_bytes()
    next(PLACE.glob("dense/runs/**/s1001-*/result.json")).unlink()
    with locks.hold(PLACE / "dense"):
        assert tune("recipe=dense") == 0
    text = (PLACE / "table.md").read_text()
    assert re.search(r"^\| dense +\| 3 +\| - +\| +\|", text, re.M)
    assert "failed" not in text
    assert not (PLACE / "runs.csv").exists()
    assert tune("recipe=dense") == 0
    assert len((PLACE / "runs.csv").read_bytes().splitlines()) == len(runs.splitlines())


def test_an_outcome_is_written_before_another_process_looks(dense, monkeypatch):
    """Or it would be written over one that is newer."""
    done, cells = list[str](), [cell for cell in cells_here() if cell.name == "dense"]

    def told(name: str) -> None:
        of = getattr(comparison, name)

        def call(*arguments: Any) -> Any:
            done.append(name)
            time.sleep(0.2)
            return of(*arguments)

        monkeypatch.setattr(comparison, name, call)

    told("outcome_of")
    told("write_outcome")
    with ThreadPoolExecutor(2) as pool:  # the lock is of open files, so of threads too
        found = pool.map(lambda _: comparison.record_outcome(PLACE, cells, 3), range(2))
    assert [len(each.runs) for each in found] == [2, 2]
    assert done == ["outcome_of", "write_outcome"] * 2


def test_a_file_without_runs_is_no_damage(dense):
    runs = (PLACE / "runs.csv").read_bytes()
    (PLACE / "runs.csv").write_text("\n")
    assert tune("recipe=dense") == 0
    assert (PLACE / "runs.csv").read_bytes() == runs


def test_a_full_disk_is_no_trial_that_failed(monkeypatch, dense):
    three, asked = trials()["dense"], ["try", "--trials", "4", *SWEEP, "recipe=dense"]
    with monkeypatch.context() as patch:

        def full(path, weights):
            raise OSError(28, "No space left on device")

        patch.setattr(results, "save_weights", full)
        with pytest.raises(RunError, match=r"No space left on device; no trial is lost"):
            main(asked)
    assert trials()["dense"] == three
    assert main(asked) == 0
    four = trials()["dense"]
    assert [one.value is None for one in four] == [False] * 4


def test_trials_leave_no_checkpoints(dense):
    assert len([*PLACE.rglob("model.safetensors")]) > 3
    assert not [*PLACE.rglob("checkpoint*")]
    of_seeds = [path.parent for path in Path("outputs/digits").rglob("result.json")]
    assert of_seeds
    assert all((folder / "checkpoint.pt").exists() for folder in of_seeds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "recipe=dense --over recipe.decay=1,2",
            "^--over recipe.decay: no such key; decay belongs to",
        ),
        ("recipe=sr_ste recipe.decay=1e-4,1e-3", r"searched in 1e-06 to 0.01 \(log\); give it one"),
        ("recipe=dense hydra/launcher=joblib", "^launcher=joblib: nmrun tune launches nothing"),
    ],
)
def test_what_is_searched_fits_the_runs(words, message):
    with pytest.raises(ConfigError, match=message):
        main(["try", *TINY, *words.split()])


def test_settings_and_folders_of_any_value_are_tried(tmp_path, monkeypatch):
    """What a trial is given is what the study says, whatever has to be quoted."""
    place = tmp_path / 'it\'s, "a" $place'
    place.mkdir()
    monkeypatch.chdir(place)
    words = (*TINY, "recipe=step", "trainer.epochs=1", "--over", "recipe.threshold=null,0.1")
    assert main(["try", "--trials", "1", *words]) == 0
    (study,) = trials().values()
    assert [trial.params["recipe.threshold"] for trial in study] == [None]


def test_settings_that_are_another_run_get_a_line():
    """Without weight decay it is one run, whatever decays."""
    words = (*TINY, "recipe=dense", "trainer.epochs=1", "optimizer=adamw")
    over = ("optimizer.lr=0.01,0.02", "optimizer.weight_decay=0,1", "optimizer.decay=matrices,all")
    with pytest.raises(RunError, match=r"weight_decay=0 decay=matrices it is the run of other"):
        main(["try", "--trials", "9", *words, *(word for o in over for word in ("--over", o))])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"space": 3, "settings": {}, "identity": ""}'])
def test_a_record_that_is_not_whole_gets_a_line(text, dense):
    file = PLACE / "dense" / "study.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"study.json is not whole: "):
        tune("recipe=dense")


def changed(file: Path, was: str, now: str) -> None:
    text = file.read_text()
    assert was in text
    file.write_text(text.replace(was, now, 1))


@pytest.mark.parametrize("now", ["106.3", "NaN", '"a text"'])
def test_no_file_but_the_runs_own_results_decides(now, dense):
    """A value that was written into the list counts for nothing; a result that was changed is no
    result, and its run is done again with the same bits.
    """
    before, runs = trials(), pd.read_csv(PLACE / "runs.csv").drop(columns="tuned.seconds")
    changed(PLACE / "dense/trials.jsonl", '{"params"', f'{{"value": {now}, "params"')
    assert trials() == before
    worst = min(before["dense"], key=lambda trial: trial.value)
    rate = worst.params["optimizer.lr"]
    folders = (PLACE / "dense/runs").glob("*/*/*/*/s1000-*")
    (folder,) = [each for each in folders if result_of(each)["config"]["optimizer"]["lr"] == rate]
    was = f'"eval/accuracy": {worst.value!r}'
    changed(folder / "result.json", was, f'"eval/accuracy": {now}')
    assert tune("recipe=dense") == 0
    assert values(trials()) == values(before)
    again = pd.read_csv(PLACE / "runs.csv").drop(columns="tuned.seconds")
    pd.testing.assert_frame_equal(again, runs)


def test_a_file_of_runs_that_is_damaged_gets_a_line(dense):
    (PLACE / "runs.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"runs.csv is damaged: "):
        tune("recipe=dense")


@pytest.mark.parametrize("part", [0.85, None])
def test_a_seed_that_fails_with_the_best_settings_is_said(part, dense, capsys):
    """A seed in five may fail though three tuning seeds did not."""
    assert tune("recipe=dense") == 0
    assert "seeds failed" not in capsys.readouterr().out
    spoil("outputs/digits/**/s1-*/result.json", part)
    assert tune("recipe=dense") == 0
    text = capsys.readouterr().out
    said = "dense: 0 of 3 tuning seeds and 1 of 2 seeds failed with the best settings"
    assert said in text
    assert said in (PLACE / "table.md").read_text()
    if part:
        spoil(f"{PLACE}/**/s1001-*/result.json", part)  # of both finalists
        assert tune("recipe=dense") == 0
        assert "dense: 1 of 3 tuning seeds and " in capsys.readouterr().out


def spoil(pattern: str, part: float | None) -> None:
    """Give runs a part of the tuning's worst validation accuracy, or none."""
    (study,) = studies().values()
    worst = min(trial.value for trial in [*study.trials(), *study.repeats()] if trial.value)
    for file in Path().glob(pattern):
        metrics = result_of(file.parent)["metrics"]
        metrics["final"]["eval/accuracy"] = part and part * worst
        rewrite(file.parent, metrics=metrics)


def test_a_best_value_at_the_end_of_its_range_is_said(capsys):
    """Of two learning rates that hardly train, the higher one trains more."""
    asked = ["--over", "optimizer.lr=tag(log,interval(1e-5,1e-4))", "optimizer.lr=1e-4"]
    assert tune("recipe=dense", "seed=0", *asked) == 0
    output = capsys.readouterr().out
    assert "dense: the best optimizer.lr is at the upper end of 1e-05 to 0.0001 (log);" in output


def test_seeds_of_tuning_are_refused_in_a_file_too(tmp_path):
    (tmp_path / "more/debug").mkdir(parents=True)
    (tmp_path / "more/debug/ours.yaml").write_text("# @package _global_\nseed: 1001\n")
    with pytest.raises(ConfigError, match="seed=1001: the seeds 1000 to 1002 are those of tuning"):
        main(["cmp", "--config-dir", "more", "recipe=ste", "debug=ours", "dry=true"])
