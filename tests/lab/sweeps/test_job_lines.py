"""A sweep whose jobs run side by side: its record, and its lines."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from nmrun.lab import output
from nmrun.lab.records import sweep
from nmrun.lab.sweeps import workers
from nmrun.lab.sweeps.workers import Sweeper

SWEEPS = [["recipe=step,sr_ste", "seed=0,1", "sparsity=2:4", "trainer.epochs=12"]]
RUN = {"status": "finished", "metric": "accuracy"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record with one job that has finished, one that failed, and two that run."""
    monkeypatch.setattr(workers, "PAUSE", 60.0)
    place = tmp_path / "record"
    place.mkdir()
    sweep.begin(place, 6, "nmrun -m", "out", SWEEPS)
    begun = [(recipe, seed) for recipe in ("step", "sr_ste") for seed in (0, 1)]
    for number, (recipe, seed) in enumerate(begun, 1):
        sweep.begins(place, number, words(recipe, seed), tmp_path / f"run{number}")
    final = {"final": {"test/accuracy": 0.9, "eval/accuracy": 0.875}}
    sweep.add(place, RUN | {"metrics": final}, words("step", 0), 90.0, 1)
    sweep.add(place, {"status": "failed", "error": "the loss is nan"}, words("step", 1), 2.0, 2)
    return place


def words(recipe: str, seed: int) -> list[str]:
    return [f"recipe={recipe}", f"seed={seed}", "sparsity=2:4", "trainer.epochs=12"]


def test_the_record_says_who_is_at_work(folder):
    record = sweep.read(folder)
    assert list(record.running) == [3, 4]
    assert record.at_work == {os.getpid()}
    assert record.signal is None
    assert len(record.ends) == 2
    sweep.begins(folder, 5, words("asp", 0), Path("elsewhere"), launched=False)
    sweep.note_signal(folder, 15)
    with (folder / "jobs.jsonl").open("a") as file:
        file.write('{"job": 6, "process": "x", "folder": 3, "overrides": [null]}\n{"job": 6, "pro')
    record = sweep.read(folder)
    assert list(record.running) == [3, 4, 5]
    assert record.at_work == {os.getpid()}, "a process of another host has a number of that"
    assert record.signal == 15


def test_a_line_for_each_job_that_has_ended_and_one_for_a_signal(folder, capsys):
    lines = [
        "[1/6] recipe=step seed=0: finished, accuracy test 0.9000, validation 0.8750; 2 min",
        f"[2/6] recipe=step seed=1: failed: the loss is nan; {folder}/job2.log",
    ]
    with Sweeper(folder, waits=False):
        pass
    assert capsys.readouterr().out.splitlines() == lines
    sweep.note_signal(folder, signal.SIGTERM)
    with Sweeper(folder, waits=False):
        pass
    told = "SIGTERM: each job saves its run, a second one ends them at once"
    assert capsys.readouterr().out.splitlines() == [*lines, told]


def test_a_reader_who_leaves_ends_the_sweep(folder, monkeypatch):
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *about: ended.append(about))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with output.ends_quietly(), Sweeper(folder, waits=False) as sweeper:
            pass
    assert sweeper.caught == sweep.read(folder).signal == signal.SIGPIPE
    assert ended == [(os.getpid(), signal.SIGTERM)]


def test_what_a_job_says_goes_to_its_log(tmp_path, capfd):
    """Also what is written past Python's streams."""
    log = sweep.log_of(tmp_path, 3)
    with output.logged(log):
        assert not sys.stdout.isatty()
        print("one")
        os.write(1, b"two\n")
        os.system("echo three >&2")
        print("four", file=sys.stderr)
    print("five")
    assert log.read_text() == "one\ntwo\nthree\nfour\n"
    assert capfd.readouterr() == ("five\n", "")
    with output.logged(tmp_path / "nowhere" / "log"):
        print("six")
    assert capfd.readouterr() == ("", "")


def test_a_job_that_reads_of_a_signal_ends_by_it(tmp_path):
    """Ray's workers may be on another host, where no signal comes to."""
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), workers.ends_by_record(tmp_path):
        sweep.note_signal(tmp_path, signal.SIGINT)
        time.sleep(30)
    with workers.ends_by_record(tmp_path / "another"):
        pass
    assert signal.getsignal(signal.SIGTERM) == former
