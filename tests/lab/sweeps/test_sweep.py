"""Sweeps: what is recorded of them and guessed from it, keys that go together, and output that
nobody reads to its end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from lazily import needs
from runs import TINY, at_work, config, finished, mistakes, result_of

from nmrun.errors import ConfigError
from nmrun.lab import cli, output
from nmrun.lab.config import command_line, experiment, precheck
from nmrun.lab.config.identity import run_folder
from nmrun.lab.records import status, sweep
from nmrun.lab.runs import locks
from nmrun.lab.sweeps import jobs
from nmrun.lab.sweeps.jobs import NMSweeper
from nmrun.lab.train import checkpoint

NOW = 1_000_000.0


def record(place: Path, begun: float, jobs: int | None, done: str, **odd: Any) -> sweep.Record:
    """A sweep whose jobs have ended as ``done`` says: status and seconds of each."""
    head = {"begun": begun, "jobs": jobs, "command": "nmrun -m", "output_dir": "out"}
    (place / "sweep.json").write_text(json.dumps(head))
    words = done.split()
    lines: list[dict[str, Any]] = [
        {"status": status, "seconds": float(seconds), "ended": begun + 9, "overrides": []}
        for status, seconds in zip(words[::2], words[1::2], strict=True)
    ]
    if odd:
        lines.append(lines[0] | odd)
    (place / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sweep.read(place)


@pytest.mark.parametrize(
    ("passed", "jobs", "done", "left"),
    [
        (100, 10, "finished 10 skipped 0.1 failed 20 skipped 0.1 skipped 0.1", 15 * 5),
        # several at a time: one each 12.5 s, though it takes 40
        (50, 12, "finished 40 " * 4, 50 / 4 * 8),
        (41, 12, "finished 40", 40 * 11),
        (50, 4, "finished 12 " * 4, 0),
        (50, 10, "", None),
        (50, 10, "skipped 0.1 refused 0.1 planned 3", None),
        (50, None, "finished 10", None),
        (-500, 10, "finished 10", None),  # the clock was set back
    ],
)
def test_the_time_left(passed, jobs, done, left, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.time, "time", lambda: NOW)
    assert record(tmp_path, NOW - passed, jobs, done).seconds_left() == pytest.approx(left)


def test_a_record_that_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.time, "time", lambda: NOW)
    record(tmp_path, NOW - 100, 4, "finished 10")
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"status": "fini')
    assert sweep.title(tmp_path, 2, ["seed=1"]) == "[2/4] seed=1 (30 s left)"
    assert sweep.summary(tmp_path) == ("sweep of 4: 1 finished, 3 not reached; 2 min", 1)
    (tmp_path / "sweep.json").write_text('{"begun')
    assert sweep.title(tmp_path, 2, ["seed=1"]) == "[2/?] seed=1"
    assert sweep.summary(tmp_path / "nowhere") == ("sweep of 0: nothing done", 0)


@pytest.mark.parametrize("key", ["status", "folder", "error", "seconds", "ended", "overrides"])
@pytest.mark.parametrize(
    "value",
    [[1], {"a": []}, "\x1b[2J", 7, True, None, math.nan, math.inf, 10**400],
    ids=lambda odd: str(odd)[:9],
)
def test_a_record_of_anybodys(key, value, tmp_path):
    record(tmp_path, NOW, 4, "finished 10", **{key: value})
    head = {"begun": 1.0, "jobs": 2, "command": "nmrun -m\x1b[2J", "output_dir": "out\x1b[2J"}
    (tmp_path / "sweep.json").write_text(json.dumps({**head, "sweeps": [["seed=1\x1b[2J"]]}))
    read = sweep.read(tmp_path)
    texts = [sweep.title(tmp_path, 2, []), sweep.summary(tmp_path)[0], str(read.counts())]
    texts += [read.command, read.output_dir, *itertools.chain(*read.sweeps)]
    assert "\x1b" not in "".join(texts)
    assert read.jobs == 2
    assert isinstance(read.seconds_left(), float)


@pytest.mark.parametrize(
    "value", ["x", [], math.nan, math.inf, 10**400], ids=lambda odd: str(odd)[:9]
)
@pytest.mark.parametrize("key", ["jobs", "begun", "sweeps"])
def test_a_head_of_anybodys(key, value, tmp_path):
    head = {"begun": 1.0, "jobs": 2, "command": "nmrun -m", "output_dir": "out"}
    if (key, value) == ("sweeps", []):
        value = [4]
    (tmp_path / "sweep.json").write_text(json.dumps({**head, key: value}))
    assert sweep.summary(tmp_path) == ("sweep of 0: nothing done", 0)


def test_times_in_words():
    times = {0.4: "0 s", 59.4: "59 s", 59.6: "1 min", 720: "12 min"}
    times |= {3570: "1 h 0 min", 12_000: "3 h 20 min"}
    assert {seconds: output.span(seconds) for seconds in times} == times


@pytest.mark.slow
def test_a_zipped_sweep_does_only_what_is_missing_and_tells_the_time(nmrun_cli, tmp_path):
    assert nmrun_cli("recipe=ste", "debug=fast", "sparsity=2:4", "seed=0").returncode == 0
    process = nmrun_cli(
        "-m", "recipe=ste", "debug=fast", "sparsity=2:4,1:4,1:8", "seed=0,1,2", "zip=sparsity,seed"
    )
    *_, last, table = process.stdout.splitlines()
    assert table == "  nmrun table outputs/.debug/digits"
    titles = [line for line in process.stdout.splitlines() if line.startswith("[")]
    ratios = ("2:4", "1:4", "1:8")
    jobs = [f"[{i + 1}/3] sparsity={ratio} seed={i}" for i, ratio in enumerate(ratios)]
    # nothing is guessed from the first, which was skipped
    assert titles[:2] == jobs[:2]
    assert re.fullmatch(rf"{re.escape(jobs[2])} \(\d+ s left\)", titles[2])
    assert re.fullmatch(r"sweep of 3: 2 finished, 1 skipped; \d+ s", last)
    results = [result_of(path.parent) for path in tmp_path.rglob("result.json")]
    assert {result["environment"]["command"] for result in results} == {
        f"nmrun recipe=ste debug=fast sparsity={ratio} seed={i}" for i, ratio in enumerate(ratios)
    }


# --- keys that go together ------------------------------------------------------------------------


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``nmrun -m ...`` up to its jobs: call by call, as plain values; nothing is trained."""
    sweeps: list[list[dict[str, Any]]] = []

    def values(job: Sequence[str]) -> dict[str, Any]:
        parsed = [OverridesParser.create().parse_override(word) for word in job]
        return {one.key_or_group: one.value() for one in parsed}

    def run_job(_: Path, number: int, composed: object, job: list[str], *__: str) -> Any:
        if number == 1:
            sweeps.append([])
        sweeps[-1].append(values(job))
        return {"status": "planned"}

    def call(*words: str) -> list[list[dict[str, Any]]]:
        sweeps.clear()
        monkeypatch.setattr(sys, "argv", ["nmrun", "-m", *words, "output_dir=out"])
        cli.main()
        return [
            [{key: value for key, value in job.items() if key != "output_dir"} for job in jobs]
            for jobs in sweeps
        ]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "run_job", run_job)
    return call


def test_zipped_keys_are_one_axis_of_the_product(launches, tmp_path):
    ratios, rates, seeds = ["2:4", "1:4", "1:8"], [1e-3, 3e-3, 1e-3], [0, 1]
    keys = ("sparsity=2:4,1:4,1:8", "optimizer.lr=1e-3,3e-3,1e-3", "zip=optimizer.lr,sparsity")
    (jobs,) = launches("recipe=ste", *keys, "seed=0,1")
    assert jobs == [
        {"recipe": "ste", "sparsity": ratio, "optimizer.lr": rate, "seed": seed}
        for (ratio, rate), seed in itertools.product(zip(ratios, rates, strict=True), seeds)
    ]
    (head,) = tmp_path.rglob(sweep.HEAD)
    record = sweep.read(head.parent)
    assert record.jobs == 6
    assert record.sweeps == [
        ["recipe=ste", f"sparsity={ratio}", f"optimizer.lr={rate}", "seed=0,1", "output_dir=out"]
        for ratio, rate in zip(ratios, rates, strict=True)
    ]


def test_two_zips_ranges_lists_and_texts(launches):
    words = ("seed=range(3)", "model.exclude=[stem],[stem,head],[]", "zip=seed,model.exclude")
    (jobs,) = launches(*words, "recipe=step,sr_ste", "optimizer=adam,sgd", "zip=recipe,optimizer")
    seeds = list(zip([0, 1, 2], [["stem"], ["stem", "head"], []], strict=True))
    # the product of these two has step with sgd, which is refused
    pairs = [("step", "adam"), ("sr_ste", "sgd")]
    expected = [
        {"seed": seed, "model.exclude": names, "recipe": recipe, "optimizer": optimizer}
        for (seed, names), (recipe, optimizer) in itertools.product(seeds, pairs)
    ]
    assert sorted(map(str, (sorted(job.items()) for job in jobs))) == sorted(
        map(str, (sorted(job.items()) for job in expected))
    )


def test_each_job_has_a_command_that_asks_for_it_alone(tmp_path):
    words = ["recipe=dense,ste", "sparsity=dense,2:4", f"output_dir={tmp_path}"]
    for job in jobs.checked(words, multirun=True).jobs:
        alone = shlex.split(command_line.of_job(job.words))[1:]
        (asked,) = jobs.checked(alone, multirun=False).jobs
        assert run_folder(asked.config) == run_folder(job.config)


EXPERIMENT = """
title: two
source: none
sweep:
  - recipe=ste sparsity=2:4,1:4 optimizer.lr=1e-3,3e-3 zip=sparsity,optimizer.lr
  - recipe=dense {extra}
scales:
  smoke: seed=0,1 debug=fast
"""


def test_an_experiment_may_zip(launches, tmp_path):
    (tmp_path / "own.yaml").write_text(EXPERIMENT.format(extra=""))
    (jobs,) = launches("experiment=own.yaml", "scale=smoke")  # both sweeps in one launch
    pairs = [
        (ratio, rate, seed) for ratio, rate in (("2:4", 1e-3), ("1:4", 3e-3)) for seed in (0, 1)
    ]
    keys = ("recipe", "sparsity", "optimizer.lr", "seed")
    assert [tuple(job.get(key) for key in keys) for job in jobs] == [
        *(("ste", *pair) for pair in pairs), ("dense", None, None, 0), ("dense", None, None, 1)
    ]  # fmt: skip
    configs = precheck.configs(experiment.load("own.yaml"), "smoke")
    assert [(str(c.pattern), c.optimizer.lr, c.seed) for c in configs][:4] == pairs
    with pytest.raises(ConfigError, match=r"optimizer\.lr has no list of values"):
        command_line.expand(["experiment=own.yaml", "scale=smoke", "optimizer.lr=1"], multirun=True)


def test_an_experiment_has_one_launcher(tmp_path):
    (tmp_path / "own.yaml").write_text(EXPERIMENT.format(extra="hydra.launcher={}"))
    with pytest.raises(ConfigError, match="have one launcher"):
        jobs.checked([f"experiment={tmp_path}/own.yaml", "scale=smoke"], multirun=True)


@pytest.mark.parametrize(
    ("word", "as_typed"),
    [
        (r"sparsity=2\:4", "sparsity=2:4"),
        (r"sparsity.overrides={a:1\:8,head:dense}", "sparsity.overrides={a:1:8,head:dense}"),
        (r"sparsity.overrides={a\:b:1\:8}", r"sparsity.overrides={a\:b:1:8}"),
        # there it matters
        (r"sparsity.overrides={a1\:2b:1\:8}", r"sparsity.overrides={a1\:2b:1\:8}"),
        (r"track.project=a\(b\)", r"track.project=a\(b\)"),
    ],
)
def test_overrides_as_one_types_them(word, as_typed):
    assert command_line.unescaped(word) == as_typed


# --- runs that others are at work on ---------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_another_process_has_is_left_to_it(nmrun_cli, tmp_path):
    words = ("recipe=ste", "debug=fast", "output_dir=out")
    assert nmrun_cli(*words, "seed=1").returncode == 0
    (there,) = (path.parent for path in tmp_path.rglob("result.json"))
    (there / "result.json").unlink()
    with locks.hold(there):
        alone = nmrun_cli(*words, "seed=1")
        process = nmrun_cli("-m", *words, "seed=0,1")
    who = f"process {os.getpid()} on {os.uname().nodename} is at work on this very run"
    assert (alone.returncode, alone.stderr) == (1, f"nmrun: {who}: {there.relative_to(tmp_path)}\n")
    assert process.returncode == 0
    last = process.stdout.splitlines()[-2]  # then the command for the table
    assert re.fullmatch(r"sweep of 2: 1 finished, 1 running in another process; \d+ s", last)


@pytest.mark.parametrize(
    ("state", "said", "code", "counted"),
    [
        ("finished", "1 skipped", 0, "1 skipped"),
        ("running", "1 running in another process", 0, "1 running"),
        ("interrupted", "1 not done", 1, "1 interrupted"),
        ("failed", "1 not done", 1, "1 failed"),
        (None, "1 not done", 1, "1 killed"),
    ],
)
def test_how_a_run_ended_that_was_left_to_another_process(
    state, said, code, counted, write, tmp_path
):
    run = write("ste", "2:4", 0, 0.5, status=state or "killed")
    if state is None:
        (run / "result.json").unlink()
    (run / "model.safetensors").touch()
    sweep.begin(tmp_path, 1, "nmrun -m", "outputs")
    sweep.add(tmp_path, {"status": "running", "folder": str(run)}, ["seed=0"], 1.0)
    with locks.hold(run) if state == "running" else contextlib.nullcontext():
        text, ended = sweep.summary(tmp_path)
        line = status.sweep_lines(tmp_path, running=False)[0]
    assert re.search(r"sweep of 1: ([^;]*);", text)[1] == said
    assert ended == code
    assert f", ended: 1 of 1 jobs done ({counted}); " in line


# --- pipes -------------------------------------------------------------------------------------


def test_a_stream_of_somebody_else_s_need_not_count(monkeypatch):
    """Ray's, in its workers, returns None."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    with output.ends_quietly():
        assert sys.stdout.write("four") == 4
    assert written == ["four"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["--help", "recipe=ste dry=true", "-m recipe=ste seed=0,1 dry=true"],
)
def test_a_reader_who_leaves_ends_it_quietly(line, tmp_path, write):
    write("ste", "2:4", 0, 0.5, root="out")
    process = started(tmp_path, line)
    process.stdout.close()
    assert process.wait(60) == 128 + 13
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_a_run_whose_reader_left_goes_on_with_the_same_command(tmp_path, nmrun_cli):
    line = "recipe=ste trainer.limit_batches=20 trainer.epochs=10 track=local output_dir=out"
    process = started(tmp_path, line)
    with contextlib.closing(process.stdout):
        while "epoch  2/10" not in process.stdout.readline():
            assert process.poll() is None
    assert process.wait(60) == 128 + 13
    assert process.stderr.read() == ""
    (result,) = tmp_path.rglob("result.json")
    ended = json.loads(result.read_text())
    assert (ended["status"], ended["signal"]) == ("interrupted", 13)
    # what was trained is saved, not the whole epochs alone
    rows = (result.parent / "metrics.jsonl").read_text().splitlines()
    state = checkpoint.load(result.parent / "checkpoint.pt")
    assert json.loads(rows[-1])["step"] <= state["loop"]["step"] < 200
    again = nmrun_cli(*line.split())
    assert again.returncode == 0
    assert "goes on at step" in again.stdout


def started(folder: Path, line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nmrun", *shlex.split(line)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a buffer is what is hard about it
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )  # fmt: skip


# --- the sweeper ----------------------------------------------------------------------------------


def test_the_sweeper_launches_in_batches(monkeypatch):
    words = [["seed=3", "recipe=ste"], ["seed=3", "recipe=asp"]]
    monkeypatch.setattr(NMSweeper, "jobs", words)
    assert NMSweeper(None).split_arguments([], None) == [words]
    assert NMSweeper(1).split_arguments([], 1) == [words[:1], words[1:]]


@pytest.mark.parametrize("place", ["the line", "a file"])
def test_the_jobs_of_hydra_s_params_are_counted(place, launches, tmp_path):
    """They may stand in a file of one's own too, and are checked like any other."""
    params = "hydra.sweeper.params={trainer.epochs: '1,2'}"
    (tmp_path / "mine" / "debug").mkdir(parents=True)
    file = "# @package _global_\nhydra: {sweeper: {params: {trainer.epochs: '1,2'}}}\n"
    (tmp_path / "mine" / "debug" / "two.yaml").write_text(file)
    words = [params] if place == "the line" else ["--config-dir", "mine", "debug=two"]
    (every,) = launches(*words, "seed=0,1,2")
    assert sorted((job["trainer.epochs"], job["seed"]) for job in every) == [
        (epochs, seed) for epochs in (1, 2) for seed in (0, 1, 2)
    ]
    (folder,) = (path.parent for path in tmp_path.rglob(sweep.HEAD))
    assert sweep.read(folder).jobs == 6
    problems = mistakes([params.replace("'1,2'", "'1,x'"), "seed=0,1"], multirun=True)
    assert problems == ["trainer.epochs=x: it takes a whole number, 1 or more"]


@needs("launchers", "hydra_plugins.hydra_joblib_launcher")
def test_what_is_done_never_comes_to_a_launcher(tmp_path, monkeypatch, capsys):
    """Neither finished runs nor those that another process has; and no launcher starts for nothing."""
    from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

    launched: list[list[list[str]]] = []

    def launch(_: object, every: list[list[str]], initial_job_idx: int) -> list[object]:
        launched.append(every)
        return []

    monkeypatch.setattr(JoblibLauncher, "launch", launch)
    words = [*TINY, "trainer.epochs=1", "trainer.limit_batches=1", "model.channels=[4,4,4]"]
    finished(config(tmp_path, *words, "seed=0"))
    other = run_folder(config(tmp_path, *words, "seed=1"))
    other.mkdir(parents=True)

    def sweep(seeds: str, *more: str) -> str:
        command = ["nmrun", "-m", "launcher=joblib", *words, f"output_dir={tmp_path}", *more]
        monkeypatch.setattr(sys, "argv", [*command, f"seed={seeds}"])
        launched.clear()
        cli.main()
        return capsys.readouterr().out

    with at_work(other):
        said = sweep("0,1,2")
        assert [[word for word in job if "seed" in word] for job in launched[0]] == [["seed=2"]]
        assert "[2/3] seed=0: finished already, accuracy" in said
        assert "[3/3] seed=1: running: another process is at work" in said
        assert "sweep of 3: 1 skipped, 1 running in another process, 1 not reached" in said
        assert "1 skipped, 1 running" in sweep("0,1")
        assert launched == []
    sweep("0,1", "force=true")
    assert len(launched[0]) == 2


def test_a_word_for_hydra_that_nobody_hears_is_refused():
    with pytest.raises(ConfigError, match=r"^hydra\.verbose=true: Hydra hears it where"):
        jobs.checked(["hydra.verbose=true", "seed=0,1"], multirun=True)


@pytest.mark.parametrize(("key", "said"), [
    ("hydra.job.env_set", "job: {env_set: {A: b}}"),
    ("hydra.callbacks", "callbacks: {x: {_target_: a.B}}"),
])  # fmt: skip
def test_what_a_file_says_to_hydra_and_nobody_hears_is_refused(key, said, tmp_path):
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "mine.yaml").write_text(f"# @package _global_\nhydra: {{{said}}}\n")
    for words, multirun in ((["seed=0"], False), (["seed=0,1"], True)):
        assert mistakes(words, multirun, str(tmp_path)) == []
        (line,) = mistakes([*words, "debug=mine"], multirun, str(tmp_path))
        assert line.startswith(f"{key} in a file of yours: Hydra hears it where")


@needs("launchers", "hydra_plugins.hydra_joblib_launcher")
def test_what_a_file_says_to_hydra_is_heard_with_a_launcher(tmp_path):
    (tmp_path / "debug").mkdir()
    said = "# @package _global_\nhydra: {job: {env_set: {A: b}}}\n"
    (tmp_path / "debug" / "mine.yaml").write_text(said)
    words = ["launcher=joblib", "debug=mine", "seed=0,1"]
    assert len(jobs.checked(words, multirun=True, config_dir=str(tmp_path)).jobs) == 2


# --- the end --------------------------------------------------------------------------------------


def test_what_is_not_done_is_named_with_its_reason_and_folder(tmp_path):
    sweep.begin(tmp_path, 2, "nmrun -m", "out")
    sweep.add(tmp_path, {"status": "interrupted", "folder": "out/s0"}, ["seed=0"], 1.0)
    sweep.add(tmp_path, {"status": "refused", "error": "no such file"}, ["seed=1"], 1.0)
    _, *bad = sweep.summary(tmp_path)[0].splitlines()
    assert bad == ["  interrupted: seed=0  out/s0", "  refused: seed=1: no such file"]


@pytest.mark.slow
def test_a_dry_sweep_is_a_list_of_its_runs_and_writes_nothing(tmp_path, nmrun_cli):
    fixed = ("sparsity=2:8", "trainer.epochs=4", "trainer.limit_batches=3", "track=local")
    swept = ("recipe=dense,step", "optimizer.lr=0.01,0.02", "output_dir=a/b")
    process = nmrun_cli("-m", *swept, *fixed, "dry=true")
    assert process.returncode == 0, process.stderr
    alone = nmrun_cli("recipe=step", *fixed, "dry=true").stdout
    dense, without = re.findall(r"training: (\S+) dense, (\S+) sparse", alone)[0]
    plan = f"  12 steps, FLOPs of the training: {dense} dense"
    *lines, total = process.stdout.splitlines()
    assert [re.sub(r" \(.* left\)$", "", line) for line in lines] == [
        *("[1/4] recipe=dense optimizer.lr=0.01", plan),
        *("[2/4] recipe=dense optimizer.lr=0.02", plan),
        *("[3/4] recipe=step optimizer.lr=0.01", f"{plan}, {without} sparse"),
        *("[4/4] recipe=step optimizer.lr=0.02", f"{plan}, {without} sparse"),
    ]
    assert total.startswith("sweep of 4: 4 planned")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_sweep_says_which_runs_there_cannot_be(tmp_path, nmrun_cli):
    """How many FLOPs an epoch has, and whether a model can be built, is known once that is tried."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    own = "name: own\n_target_: own.build\ninclude: null\nexclude: null\n"
    (tmp_path / "mine" / "model" / "own.yaml").write_text(own)
    (tmp_path / "own.py").write_text("raise RuntimeError('half done')\n")
    words = ("--config-dir", "mine", "-m", "model=own,mlp", "trainer.budget=null,flops:1000")
    process = nmrun_cli(*words, "recipe=ste", "track=local", "dry=true")
    assert process.returncode == 1
    *_, title, plan, _, total, own, _, refused = process.stdout.splitlines()
    assert title.startswith("[3/4] model=mlp")
    assert " steps, FLOPs " in plan  # what was refused has none
    assert total.startswith("sweep of 4: 1 planned, 3 not done")
    assert own.startswith("  failed: model=own ")
    assert "RuntimeError: half done" in own
    assert refused.startswith("  refused: model=mlp trainer.budget=flops")
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_ends_with_the_command_for_its_table(tmp_path):
    sweep.begin(tmp_path, 2, "nmrun -m", "out")
    for number, (place, paths) in enumerate(
        {"out/digits": "out/digits", "out/cifar10": "out/cifar10 out/digits"}.items()
    ):
        run = f"{place}/small_conv/ste/2of4/s0-{number}"
        sweep.add(tmp_path, {"status": "finished", "folder": run}, [f"seed={number}"], 1.0)
        assert sweep.summary(tmp_path)[0].splitlines()[-1] == f"  nmrun table {paths}"


def test_a_job_s_line_has_what_tells_it_from_others(tmp_path):
    """Words that all sweeps of the command have alike are said by the command."""
    common = ["seed=0,1", "sparsity='2:4'", "output_dir=o", "trainer.epochs=2"]
    sweeps = [[f"recipe={recipe}", *common] for recipe in ("dense", "sr_ste")]
    sweep.begin(tmp_path, 4, "nmrun -m ...", "o", sweeps)
    job = ["recipe=dense", "seed=1", "sparsity=2:4", "output_dir=o", "trainer.epochs=2"]
    assert sweep.title(tmp_path, 2, job) == "[2/4] recipe=dense seed=1"
    sweep.begin(tmp_path, 1, "nmrun -m ...", "o", [["recipe=dense", "seed=1"]])
    assert sweep.title(tmp_path, 1, ["recipe=dense", "seed=1"]) == "[1/1] recipe=dense seed=1"
    assert sweep.title(tmp_path, 1, ["++recipe.beta=0.9"]) == "[1/1] recipe.beta=0.9"


def test_a_record_is_read_as_it_stands(tmp_path):
    """Also where lines come again, one is half written, and a reader changes what it got."""
    for number in (1, 2):
        sweep.add(tmp_path, {"status": "skipped"}, ["seed=0"], 0.0, number)
    one, two = (tmp_path / sweep.JOBS).read_text().splitlines(keepends=True)
    texts = {one: [1], one + two: [1, 2], two + one + two[:20]: [2, 1], one * 2: [1, 1]}
    for text, jobs_ended in texts.items():
        (tmp_path / sweep.JOBS).write_text(text)
        ends = sweep.read(tmp_path).ends
        assert [(line["job"], line["status"]) for line in ends] == [
            (job, "skipped") for job in jobs_ended
        ]
        for line in ends:
            line["status"] = "changed"
