"""metrics.jsonl is always whole and never repeats; W&B is there when it can be, and never in the
way.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from runs import config, rows

from nmrun.config.identity import identity, run_folder
from nmrun.train import runner, track
from nmrun.train.console import Console
from nmrun.train.track import Tracker

LOCAL = {"track": {"name": "local"}}
WANDB = {
    "track": {"name": "wandb", "project": "nmrun", "entity": None, "mode": "auto", "group": None},
    "answer": 42,
}


def tracker(folder: Path, chosen: dict[str, Any], step: int = 0) -> tuple[Tracker, list[str]]:
    said: list[str] = []
    return Tracker(folder, chosen, "0123456789", "some-sweep", step, said.append), said


def test_rows_are_strict_json(tmp_path: Path) -> None:
    made, _ = tracker(tmp_path, LOCAL)
    made.log({"step": 1, "epoch": 1, "train/loss": 0.1})
    made.log({"step": 2, "epoch": 1, "train/loss": math.nan, "eval/loss": math.inf})
    made.finish({}, 0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    refuse = lambda word: pytest.fail(f"{word} is not JSON")  # noqa: E731
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "epoch": 1, "train/loss": 0.1},
        {"step": 2, "epoch": 1, "train/loss": None, "eval/loss": None},
    ]


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    first, _ = tracker(tmp_path, LOCAL)
    for step in (1, 2, 3, 4):
        first.log({"step": step, "x": 1 / 3})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x": 0.3')  # killed in the middle of a row
    second, _ = tracker(tmp_path, LOCAL, step=2)
    second.log({"step": 3, "x": 7})
    assert rows(tmp_path) == [{"step": 1, "x": 1 / 3}, {"step": 2, "x": 1 / 3}, {"step": 3, "x": 7}]
    tracker(tmp_path, LOCAL, step=0)
    assert rows(tmp_path) == []


def offline_runs(folder: Path) -> list[bytes]:
    wandb.teardown()  # its service writes the files in its own time
    return [path.read_bytes() for path in folder.glob("wandb/offline-run-*/run-*.wandb")]


def test_wandb_is_offline_for_who_is_not_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One W&B run a run, with the identity as id, the whole config, every row, and the result as
    summary. No question asked.
    """
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is there to answer"))
    made = config(tmp_path, "track=wandb", "recipe=step", "seed=3")
    result = runner.run(made, run_folder(made), "some-sweep")
    assert result["status"] == "finished"
    (run,) = offline_runs(run_folder(made))
    assert identity(made).encode() in run
    assert b"some-sweep" in run
    assert b'"label_smoothing":0' in run
    for key in set().union(*rows(run_folder(made))):
        assert key.encode() in run, key
    assert f"{result['metrics']['final']['test/accuracy']:.6f}"[:6].encode() in run
    assert not [p for p in run_folder(made).rglob("*") if ":" in p.name or " " in p.name]


def test_an_offline_run_that_goes_on_is_one_run_with_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    first, _ = tracker(tmp_path, WANDB)
    first.log({"step": 1, "before": 1.0})
    first.log({"step": 2, "lost": 1.0})
    first.finish({}, 1)
    second, said = tracker(tmp_path, WANDB, step=1)
    second.log({"step": 2, "after": 1.0})
    second.finish({"closing": "word"}, 0)
    (run,) = offline_runs(tmp_path)
    assert all(key in run for key in (b"before", b"after", b"closing", b"answer"))
    assert b"lost" not in run
    assert said == []


def test_a_missing_wandb_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    made = config(tmp_path, "track=wandb", "recipe=ste")
    assert runner.run(made, run_folder(made))["status"] == "finished"
    assert capsys.readouterr().out.count("W&B is off for this run") == 1
    assert len(rows(run_folder(made))) == 8  # steps 2, 3, 4, 6, 8, 9, 10, 12


def test_a_wandb_that_breaks_on_the_way_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full\nand more")

    monkeypatch.setattr(wandb.Run, "log", broken)
    made, said = tracker(tmp_path, WANDB)
    made.log({"step": 1})
    made.log({"step": 2})
    made.finish({}, 0)
    wandb.finish()
    assert said == ["W&B is off for this run (OSError: disk full); metrics.jsonl has everything"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_nobody_waits_for_wandb_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come before it has begun reach it in their order, and the summary comes last."""
    came, begins = list[Any](), threading.Event()

    class Run:
        summary = SimpleNamespace(update=came.append)

        def log(self, row: dict[str, Any], step: int) -> None:
            came.append((step, row["x"]))

        def finish(self, exit_code: int) -> None:
            came.append(exit_code)

    def init(**_: Any) -> Run:
        assert begins.wait(60)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    made, said = tracker(tmp_path, WANDB)
    for step in range(1, 6):
        made.log({"step": step, "x": step / 2})
    assert came == []
    assert len(rows(tmp_path)) == 5
    begins.set()
    made.finish({"status": "finished"}, 0)
    assert came == [*((step, step / 2) for step in range(1, 6)), {"status": "finished"}, 0]
    assert said == []


def test_an_unreachable_server_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(track, "INIT_TIMEOUT", 1.0)
        monkeypatch.setattr(track, "_unreachable", False)
        for number in (0, 1):
            folder = tmp_path / f"a/b/{number}"
            folder.mkdir(parents=True)
            made, said = tracker(folder, WANDB)
            made.log({"step": 1, "something": 1.0})
            made.finish({}, 0)
            assert len(said) == (number == 0)
            (run,) = offline_runs(folder)
            assert b"something" in run


@pytest.mark.parametrize(
    ("environment", "netrc", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": "key"}, None, True),
        ({}, "machine api.wandb.ai login user password key", True),
        ({}, "machine example.org login user password key", False),
        (
            {"WANDB_BASE_URL": "https://example.org"},
            "machine example.org login user password key",
            True,
        ),
        ({}, "not a netrc", False),
    ],
)
def test_who_is_logged_in(
    environment: dict[str, str],
    netrc: str | None,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_live_line_is_for_terminals_and_the_log_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    live = Console(tmp_path / "run.log")
    live.progress(3, 12, lambda: "epoch 1/4  loss 2.3")
    live.progress(4, 12, lambda: pytest.fail("too soon after the last one to be drawn"))
    live.say("a line")
    live.clear()
    assert "epoch 1/4" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    plain = Console(tmp_path / "run.log", brief=True)
    plain.progress(3, 12, lambda: pytest.fail("no terminal, no live line"))
    plain.detail("a detail")
    assert capsys.readouterr().out == ""
    assert (tmp_path / "run.log").read_text() == "a line\na detail\n"
