"""metrics.jsonl is always whole and never repeats; W&B is there when it can be, and never in the
way.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from runs import config, finished, rows

from nmrun.lab.config.identity import identity, run_folder
from nmrun.lab.train import runner, track
from nmrun.lab.train.track import TrackedRun, Tracker

KNOWN: dict[str, Any] = {
    "dataset": {"name": "digits"},
    "model": {"name": "mlp"},
    "recipe": {"name": "step"},
    "sparsity": {"n": 2, "m": 8},
    "seed": 3,
    "output_dir": "outputs",
}
LOCAL = {**KNOWN, "track": {"name": "local", "tags": [], "also": []}}
MLFLOW = {**KNOWN, "track": {"name": "mlflow", "tags": [], "also": [], "project": "mine"}}
WANDB = {
    **KNOWN,
    "track": {
        **{"name": "wandb", "project": "nmrun", "entity": None, "mode": "offline", "group": None},
        **{"tags": ["mine"], "also": [], "notes": "a note"},
        **{"git": False, "console": False, "system": False, "weights": False},
    },
    "answer": 42,
}


@pytest.fixture(autouse=True)
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B is as on a new machine."""
    for key in ("MODE", "PROJECT", "NAME", "TAGS", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{key}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.fixture
def closed() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{place.getsockname()[1]}"


def tracker(folder: Path, cfg: dict[str, Any], step: int = 0) -> tuple[Tracker, list[str]]:
    messages: list[str] = []
    run = TrackedRun(folder, cfg, "0123456789", "some-sweep")
    return Tracker(run, step, messages.append), messages


def test_rows_are_strict_json(tmp_path):
    run, _ = tracker(tmp_path, LOCAL)
    run.log({"step": 1, "epoch": 1, "train/loss": 0.1})
    run.log({"step": 2, "epoch": 1, "train/loss": math.nan, "eval/loss": math.inf})
    run.finish({}, 0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    refuse = lambda word: pytest.fail(f"{word} is not JSON")  # noqa: E731
    read = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [abs(row.pop("time") - time.time()) < 60 for row in read] == [True, True]
    assert read == [
        {"step": 1, "epoch": 1, "train/loss": 0.1},
        {"step": 2, "epoch": 1, "train/loss": None, "eval/loss": None},
    ]


def offline_runs(folder: Path) -> list[bytes]:
    wandb.teardown()  # its service writes the files in its own time
    return [path.read_bytes() for path in folder.glob("wandb/offline-run-*/run-*.wandb")]


@pytest.mark.slow
def test_a_run_is_one_offline_run_of_wandb(tmp_path, monkeypatch):
    """One W&B run a run, with the identity as id, the whole config, every row, and the result as
    summary. No question asked.
    """
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is there to answer"))
    cfg = config(tmp_path, "track=wandb", "recipe=step", "seed=3")
    result = runner.run(cfg, run_folder(cfg), "some-sweep")
    assert result["status"] == "finished"
    (run,) = offline_runs(run_folder(cfg))
    assert identity(cfg).encode() in run
    assert b"some-sweep" in run
    assert b'"label_smoothing":0' in run
    for key in set().union(*rows(run_folder(cfg))):
        assert key.encode() in run, key
    assert f"{result['metrics']['final']['test/accuracy']:.6f}"[:6].encode() in run
    assert not [p for p in run_folder(cfg).rglob("*") if ":" in p.name or " " in p.name]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "code"), [(True, 0), (True, 1), (False, 0)])
def test_final_weights_are_an_artifact_where_asked_for(asked, code, tmp_path):
    """W&B knows a file by its MD5; of a run that failed there is none."""
    content = bytes(range(100))
    (tmp_path / "model.safetensors").write_bytes(content)
    run, said = tracker(tmp_path, {**WANDB, "track": {**WANDB["track"], "weights": asked}})
    run.log({"step": 1, "train/loss": 1.0})
    run.finish({}, code)
    (file,) = offline_runs(tmp_path)
    digest = base64.b64encode(hashlib.md5(content).digest())
    sent = asked and code == 0
    assert (b"model-0123456789" in file, digest in file) == (sent, sent), said


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [None, "some-sweep"])
@pytest.mark.parametrize("is_set", [False, True])
def test_the_variables_of_wandb_count_where_the_config_says_nothing(
    is_set, sweep, tmp_path, monkeypatch
):
    """Of a sweep's runs none takes the id or the name of another."""
    for key, value in {
        "PROJECT": "theirs", "NAME": "a run", "TAGS": "x, y", "RUN_ID": "abc123",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"WANDB_{key}", value)
    began, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: began.append(init(**options)) or began[-1])
    words = {"project": "ours" if is_set else None, "tags": ["mine"] if is_set else []}
    cfg = {**WANDB, "track": {**WANDB["track"], **words}}
    run = Tracker(TrackedRun(tmp_path, cfg, "0123456789", sweep), 0, lambda _: None)
    for step, loss in enumerate((3.0, 1.0, 2.0)):
        run.log({"step": step, "train/loss": loss})
    run.finish({"test/accuracy": 0.5, "best/test/accuracy": 0.75}, 0)
    (told,) = began
    (file,) = offline_runs(tmp_path)
    names = ["step", "digits", "mlp", "2:8"]
    assert told.project == ("ours" if is_set else "theirs")
    assert sorted(told.tags) == sorted([*names, *(["mine"] if is_set else ["x", "y"])])
    assert told.id == ("0123456789" if sweep else "abc123")
    assert told.name == ("step 2:8 digits mlp s3" if sweep else "a run")
    losses = re.findall(
        rb'\{"(?:last|min)":[^{}]*\}', file
    )  # keys in any order: W&B's maps have none
    assert json.loads(losses[-1]) == {"last": 2, "min": 1}
    assert b"best/test/accuracy" in file


@pytest.mark.parametrize("login", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_has_a_login_is_told_how_an_offline_run_is_uploaded(login, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0")
    monkeypatch.setenv("NETRC", str(tmp_path / ("netrc" if login else "none")))
    monkeypatch.chdir(tmp_path)
    run, messages = tracker(tmp_path, WANDB)
    run.log({"step": 1, "loss": 1.0})
    run.finish({}, 0)
    commands = [line.split("; ")[1] for line in messages if "wandb sync" in line]
    assert len(commands) == login
    for command in commands:
        folder = shlex.split(command)[2]
        assert list((tmp_path / folder).glob("run-*.wandb"))


def test_an_offline_run_that_goes_on_is_one_run_with_its_history(tmp_path, monkeypatch):
    first, _ = tracker(tmp_path, WANDB)
    first.log({"step": 1, "before": 1.0})
    first.log({"step": 2, "lost": 1.0})
    first.finish({}, 1)
    second, messages = tracker(tmp_path, WANDB, step=1)
    second.log({"step": 2, "after": 1.0})
    second.finish({"closing": "word"}, 0)
    (run,) = offline_runs(tmp_path)
    assert all(key in run for key in (b"before", b"after", b"closing", b"answer"))
    assert b"lost" not in run
    assert messages == []


def test_a_missing_wandb_costs_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = config(tmp_path, "track=wandb", "recipe=ste")
    finished(cfg)
    assert capsys.readouterr().out.count("W&B is off for this run") == 1
    assert len(rows(run_folder(cfg))) == 8  # steps 2, 3, 4, 6, 8, 9, 10, 12


def test_a_wandb_that_breaks_on_the_way_costs_a_line(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("disk full\nand more")

    monkeypatch.setattr(wandb.Run, "log", broken)
    run, messages = tracker(tmp_path, WANDB)
    run.log({"step": 1})
    run.log({"step": 2})
    run.finish({}, 0)
    wandb.finish()
    assert messages == [
        "W&B is off for this run (OSError: disk full); metrics.jsonl has everything"
    ]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_nobody_waits_for_wandb_before_the_end(tmp_path, monkeypatch):
    """Rows that come before it has begun reach it in their order, and the summary comes last."""
    came, begins = list[Any](), threading.Event()

    class Run:
        summary = SimpleNamespace(update=came.append)

        def define_metric(self, key, summary): ...

        def log(self, row, step):
            came.append((step, row["x"]))

        def finish(self, exit_code):
            came.append(exit_code)

    def init(**_):
        assert begins.wait(60)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    run, messages = tracker(tmp_path, WANDB)
    for step in range(1, 6):
        run.log({"step": step, "x": step / 2})
    assert came == []
    assert len(rows(tmp_path)) == 5
    begins.set()
    run.finish({"status": "finished"}, 0)
    assert came == [*((step, step / 2) for step in range(1, 6)), {"status": "finished"}, 0]
    assert messages == []


def test_nothing_is_uploaded_because_somebody_is_logged_in(tmp_path, monkeypatch):
    """The real SDK, with a key and a server that listens: nobody calls there."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    cfg = {**WANDB, "track": config(tmp_path, "track=wandb").plain["track"]}  # the defaults
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        run, messages = tracker(tmp_path, cfg)
        run.log({"step": 1, "something": 1.0})
        run.finish({}, 0)
        (content,) = offline_runs(tmp_path)
        assert b"something" in content
        with pytest.raises(BlockingIOError):
            server.accept()
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("variable", "key", "mode"),
    [
        ("online", True, "online"),
        ("online", False, "offline"),
        ("run", False, "offline"),
        ("shared", True, "offline"),
        ("disabled", True, "disabled"),
    ],
)
def test_the_mode_of_the_environment(variable, key, mode, tmp_path, monkeypatch):
    """Nothing that would ask for a key, and only another offline run takes the place of one."""
    asked: dict[str, Any] = {}
    monkeypatch.setenv("WANDB_MODE", variable)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    init = wandb.init
    monkeypatch.setattr(
        wandb, "init", lambda **options: asked.update(options) or init(mode="disabled")
    )
    before = tmp_path / "wandb" / "offline-run-1"
    before.mkdir(parents=True)
    run, _ = tracker(tmp_path, WANDB)
    run.log({"step": 1, "something": 1.0})
    run.finish({}, 0)
    assert asked["mode"] == mode
    assert before.exists() == (mode != "offline")


@pytest.mark.slow
def test_without_its_server_a_run_has_its_rows(closed, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", closed)
    monkeypatch.setattr(track, "INIT_TIMEOUT", 1.0)
    run, messages = tracker(tmp_path, WANDB)
    run.log({"step": 1, "something": 1.0})
    run.finish({}, 0)
    (line,) = messages
    assert line.startswith("W&B is off for this run")
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("environment", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "key"}, None, True),
        ({}, "machine api.wandb.ai login user password key", True),
        ({}, "machine example.org login user password key", False),
        ({}, "not a netrc", False),
    ],
)
def test_who_is_logged_in(environment, netrc, expected, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(path))
    if netrc is not None:
        path.write_text(netrc)
        path.chmod(0o600)
    assert track.logged_in() is expected


# --- other loggers --------------------------------------------------------------------------------


def test_what_wandb_is_told(tmp_path, monkeypatch):
    """Name, tags and group; the switches; and a summary without nesting."""
    asked: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    run = SimpleNamespace(
        summary=SimpleNamespace(update=summary.update),
        log=lambda row, step: None,
        finish=lambda exit_code: None,
        define_metric=lambda key, summary: None,
    )
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or run)
    cfg = config(tmp_path, "track=wandb", "track.tags=[mine]", "track.git=true", "recipe=dense")
    result = runner.run(cfg, run_folder(cfg), "some-sweep")
    assert asked["name"] == "dense digits small_conv s0"
    assert asked["tags"] == ["dense", "digits", "small_conv", "mine"]
    assert asked["group"] == "some-sweep"
    settings = asked["settings"]
    assert (settings.disable_git, settings.console, settings.x_disable_stats) == (
        False,
        "off",
        True,
    )
    assert summary["test/accuracy"] == result["metrics"]["final"]["test/accuracy"]
    assert summary["best/epoch"] == result["metrics"]["best"]["epoch"]
    assert summary["status"] == "finished"
    assert not any(isinstance(value, dict | list) for value in summary.values())
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    again = config(tmp_path, "track=wandb", "recipe=dense", "seed=7")
    runner.run(again, run_folder(again), "some-sweep")
    assert asked["group"] == "mine"


def test_tensorboard_has_every_number_at_its_step(tmp_path):
    """Read by TensorBoard itself; a resumed run's history is there once."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg = {**LOCAL, "track": {"name": "local", "tags": [], "also": ["tensorboard"]}}
    first, _ = tracker(tmp_path, cfg)
    for step in (1, 2, 3):
        first.log({"step": step, "epoch": 1, "train/loss": step / 4, "gone": None})
    first.finish({}, 1)
    second, messages = tracker(tmp_path, cfg, step=2)
    second.log({"step": 3, "epoch": 1, "train/loss": 8.0})
    second.finish({"test/accuracy": 0.5}, 0)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 8.0),
    ]
    assert "gone" not in events.Tags()["scalars"]
    assert messages == []


@pytest.mark.slow
def test_mlflow_has_one_run_that_goes_on(tmp_path, monkeypatch, capsys):
    tracking = pytest.importorskip("mlflow.tracking")
    place = f"sqlite:///{tmp_path / 'some.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    first, _ = tracker(tmp_path, MLFLOW)
    first.log({"step": 1, "epoch": 1, "train/loss": 0.25})
    first.finish({}, 1)
    second, messages = tracker(tmp_path, MLFLOW, step=1)
    second.log({"step": 2, "epoch": 1, "train/loss": 0.5})
    second.finish({"test/accuracy": 0.75, "status": "finished"}, 0)
    assert messages == []
    assert not [line for line in capsys.readouterr().err.splitlines() if "INFO" in line]
    client = tracking.MlflowClient(place)
    experiment = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("step 2:8 digits mlp s3", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["final/test/accuracy"] == 0.75
    assert run.data.params["sparsity.m"] == "8"


@pytest.mark.slow
def test_an_mlflow_that_refuses_is_not_waited_for_long(closed, tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking")
    slept: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", slept.append)
    monkeypatch.setenv("NO_PROXY", "*")
    for name in track.MLFLOW_WAITS:
        monkeypatch.setenv(name, "")  # which is taken back in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed)
    run, messages = tracker(tmp_path, MLFLOW)
    run.log({"step": 1, "something": 1.0})
    run.finish({}, 0)
    (line,) = messages
    assert line.startswith("MLflow is off for this run")
    assert sum(slept) <= 30


@pytest.mark.slow
def test_an_experiment_that_another_job_makes_meanwhile_is_taken(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    place = f"sqlite:///{tmp_path / 'some.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    client = tracking.MlflowClient(place)
    theirs = client.create_experiment("mine")
    look, looks = tracking.MlflowClient.get_experiment_by_name, []

    def before(self, name):
        looks.append(name)
        return None if len(looks) == 1 else look(self, name)

    monkeypatch.setattr(tracking.MlflowClient, "get_experiment_by_name", before)
    run, messages = tracker(tmp_path, MLFLOW)
    run.finish({}, 0)
    assert messages == []
    assert len(client.search_runs([theirs])) == 1
