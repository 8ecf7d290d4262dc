"""Runs side by side, deleted, and done again."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from runs import result_of
from verbs import verb

from nmrun.lab import cli
from nmrun.lab.folders import status
from nmrun.lab.runs import locks


def test_runs_side_by_side(write, capsys):
    one = write("ste", "2:4", 0, 0.5, optimizer__lr=0.1)
    other = write("step", "1:8", 0, 0.625, recipe__switch=0.25)
    assert verb("compare", str(one), str(other)) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in out if line}
    assert out[:2] == [f"[1] {one}", f"[2] {other}"]
    assert rows["recipe"] == ["ste", "step"]
    assert rows["sparsity"] == ["2:4", "1:8"]
    assert rows["optimizer.lr"] == ["0.1", "0.001"]
    assert rows["recipe.switch"] == ["-", "0.25"]
    assert rows["test/accuracy"] == ["0.5", "0.625", "+0.125"]
    assert "seed" not in rows
    assert verb("compare", str(one), str(one), "--all") == 0
    assert "seed" in capsys.readouterr().out


def test_settings_are_told_apart_to_the_last_digit_and_lists_are_found(write, capsys, tmp_path):
    """What one verb shows of a setting another one takes."""
    shown = ["0.00012345678", "0.00012345679"]
    folders = [
        str(write("ste", "2:4", 0, 0.5, optimizer__lr=float(lr), model__hidden=[32, 64], root=lr))
        for lr in shown
    ]
    assert verb("compare", *folders) == 0
    assert ["optimizer.lr", *shown] in [x.split() for x in capsys.readouterr().out.splitlines()]
    words = ("--filter", f"optimizer.lr={shown[0]}", "model.hidden=[32,64]")
    assert verb("table", str(tmp_path), *words) == 0
    assert "ste" in capsys.readouterr().out


def test_a_run_without_a_result_is_compared_by_its_config(write, capsys):
    one, other = write("ste", "2:4", 0, 0.5), write("ste", "2:4", 1)
    result = result_of(other)
    (other / "config.yaml").write_text(json.dumps(result["config"]))  # JSON is YAML
    (other / "result.json").unlink()
    assert verb("compare", str(one), str(other)) == 0
    out = capsys.readouterr().out
    assert ["seed", "0", "1"] in [line.split() for line in out.splitlines()]
    assert "no result" in out


@pytest.fixture
def runs(write) -> dict[str, Path]:
    return {
        "good": write("ste", "2:4", 0, 0.5),
        "failed": write("ste", "2:4", 1, status="failed"),
        "dense": write("dense", "dense", 0, 0.5),
        "other": write("step", "2:4", 0, 0.5, trainer__epochs=2, model__hidden=[32, 64]),
    }


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("--failed",), {"failed"}),
        (("--filter", "recipe=ste"), {"good", "failed"}),
        (("--filter", "recipe=ste", "--failed"), {"failed"}),
        (("--filter", "recipe=ste", "seed=0"), {"good"}),
        (("--filter", "sparsity=dense,2:4", "trainer.epochs=2"), {"other"}),
        (("--filter", "sparsity=dense"), {"dense"}),
        (("--filter", "trainer.epochs=2.0"), {"other"}),
        (("--filter", "recipe!=ste"), {"dense", "other"}),
        (("--filter", "recipe!=ste,step"), {"dense"}),
        (("--filter", "model.hidden=[32, 64]"), {"other"}),
    ],
)
def test_what_is_deleted(runs, words, gone, tmp_path, capsys):
    assert verb("rm", str(tmp_path / "outputs"), *words, "--yes") == 0
    assert {name for name, folder in runs.items() if not folder.exists()} == gone
    assert f"{len(gone)} run" in capsys.readouterr().out


def test_it_asks_first(runs, tmp_path, capsys, monkeypatch):
    words = ("rm", str(tmp_path / "outputs"), "--failed")
    assert verb(*words) == 2
    assert "Nobody to ask here; --yes is the answer" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    answers = iter(["", "n", "y"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    folder = runs["failed"].parent
    theirs, remnant = folder / ".deleted-mine", folder / ".deleted-s0-0123456789-1"
    theirs.mkdir(), remnant.mkdir()
    for left in (True, True, False):
        assert verb(*words) == 0
        assert runs["failed"].exists() is left
        assert (theirs.exists(), remnant.exists()) == (True, left)


def test_an_end_of_the_input_is_no(runs, tmp_path, capsys, monkeypatch):
    words = ("rm", str(tmp_path / "outputs"), "--failed")
    monkeypatch.setattr("sys.stdin", None)  # closed, by <&-
    assert verb(*words) == 2
    assert "Nobody to ask here" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO())  # Ctrl-D
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert verb(*words) == 0
    assert capsys.readouterr().out.endswith("\nnothing deleted\n")
    assert runs["failed"].exists()


def test_a_run_at_work_is_not_deleted(runs, tmp_path, capsys):
    with locks.hold(runs["good"]):
        words = ("rm", str(tmp_path / "outputs"), "--filter", "recipe=ste", "--yes")
        assert verb(*words) == 0
    assert runs["good"].exists()
    assert not runs["failed"].exists()


def test_a_run_that_has_ended_since_it_was_listed_is_not_deleted(
    runs, tmp_path, capsys, monkeypatch
):
    """Somebody gives its command again while `nmrun rm` waits for an answer."""
    result = runs["failed"] / "result.json"

    def answer(_):
        result.write_text(result.read_text().replace("failed", "finished"))
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert verb("rm", str(tmp_path / "outputs"), "--failed") == 1
    assert "it has changed since it was listed" in capsys.readouterr().err
    assert result.exists()


def test_a_kill_leaves_no_half_of_a_run(runs, write, tmp_path, capsys, monkeypatch):
    outputs = str(tmp_path / "outputs")
    words = ("rm", outputs, "--filter", "recipe=ste", "--yes")
    (runs["good"] / "metrics.jsonl").write_text("{}")

    def killed(folder, **_):
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert verb(*words) == 128 + signal.SIGINT
    assert not runs["good"].exists()
    capsys.readouterr()
    assert verb("table", outputs, "--format", "csv") == 0
    assert "ste,2:4,test/accuracy,0.5" not in capsys.readouterr().out
    assert {run.folder for run in status.runs(Path(outputs))} == {
        str(folder) for name, folder in runs.items() if name != "good"
    }
    assert verb(*words) == 0
    assert not (Path(outputs) / "digits" / "small_conv" / "ste").exists()


def test_a_link_to_a_run_is_not_followed(runs, tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(runs["failed"])
    assert verb("rm", str(link), "--failed", "--yes") == 1
    assert capsys.readouterr().err == (
        f"nmrun: not deleted: {link}: it is a link; name {runs['failed']}\n"
    )
    assert runs["failed"].exists()


@pytest.mark.parametrize("name", ["open", "rename"])
def test_a_run_that_may_not_be_deleted(name, runs, tmp_path, capsys, monkeypatch):
    original = getattr(os, name)

    def refused(path, *words, **more):
        refuses = name == "rename" or Path(path).name == locks.NAME
        if refuses and str(path).startswith(str(runs["failed"])):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refused)
        done = verb("rm", str(tmp_path / "outputs"), "--filter", "recipe=ste", "--yes")
    err = capsys.readouterr().err
    assert (done, runs["failed"].exists()) == (1, True)
    assert err.startswith("nmrun: not deleted: ")
    assert err.endswith(": Permission denied\n")
    assert not runs["good"].exists()


@pytest.mark.parametrize("value", ["", "st", "sr_ste"])
def test_all_but_what_is_not_there_is_not_all(value, runs, tmp_path, capsys):
    """A shell's variable that is not set, a slip."""
    assert verb("rm", str(tmp_path / "outputs"), "--filter", f"recipe!={value}", "--yes") == 2
    assert "dense, ste, step" in capsys.readouterr().err
    assert all(folder.exists() for folder in runs.values())


def test_a_folder_that_holds_more_than_a_run_is_not_deleted(runs, tmp_path):
    outputs = tmp_path / "outputs"
    notes = outputs / "notes"
    notes.mkdir()
    (notes / "result.json").write_text('{"status": "failed"}')  # of another program
    (outputs / "result.json").write_text((runs["failed"] / "result.json").read_text())
    assert verb("rm", str(outputs), "--failed", "--yes") == 1
    assert not runs["failed"].exists()
    assert runs["good"].exists()
    assert (notes / "result.json").exists()


def test_folders_above_the_named_one_stay(write, tmp_path, monkeypatch):
    """The current one, for instance, where it was the only run."""
    project = tmp_path / "project"
    folder = write("ste", "2:4", 0, status="failed", root="project/outputs")
    monkeypatch.chdir(project)
    assert verb("rm", "--failed", "--yes") == 0
    assert [*project.rglob("*")] == [project / "outputs"]
    assert not folder.exists()


@pytest.mark.slow
def test_the_command_of_a_run_once_more(tmp_path, nmrun_cli):
    first = nmrun_cli("recipe=ste", "debug=fast", "output_dir=out", "optimizer.lr=0.01")
    assert first.returncode == 0, first.stderr
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    again = nmrun_cli("rerun", str(folder), "optimizer.lr=0.02", "dry=true")
    assert again.returncode == 0, again.stderr
    line = "nmrun recipe=ste debug=fast output_dir=out optimizer.lr=0.02 dry=true"
    assert again.stdout.startswith(f"{line}\n")
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "out", moved)
    place = moved / folder.relative_to(tmp_path / "out")
    same = nmrun_cli("rerun", str(place))
    assert "finished already" in same.stdout


def test_help_stands_anywhere(capsys):
    for line, what in (
        ("table --help", "table"),
        ("--help table", "table"),
        ("-h table", "table"),
        ("bench train --help", "bench train"),
        ("--help bench train", "bench train"),
        *((f"{name} WORD --help", name) for name in cli.all_verbs() if name != "bench"),
    ):
        with pytest.raises(SystemExit) as stop:
            verb(*line.split())
        assert stop.value.code == 0
        assert f"usage: nmrun {what} [" in capsys.readouterr().out
    for words, text in (
        (("--help",), "== Groups and their options =="),
        (("--hel",), "== Groups and their options =="),
        (("recipe=sr_ste", "--help"), "recipe.decay"),
        (("-m", "seed=0,1", "trainer.epochs=3", "-h"), "trainer.epochs"),
    ):
        assert verb(*words) == 0
        assert text in capsys.readouterr().out
