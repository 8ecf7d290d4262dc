"""What the machine does to a run: damaged files, a full disk, memory that runs out."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, after_step, config, finished, outcome
from training import bits

from nmrun.fast.cpu.kernels import products
from nmrun.lab.config.identity import run_folder
from nmrun.lab.records import status, sweep
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.train import checkpoint, runner


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    state = {
        "weights": {"w": torch.randn(50, 7)},
        "random": checkpoint.random_state(),
        "loop": {"step": 3, "best": {"a": 0.5}},
    }
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, state)
    assert bits(checkpoint.load(path)) == bits(state)
    data, chance, noticed = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        try:
            assert bits(checkpoint.load(path)) == bits(state)  # a flag or a date, of no consequence
        except ValueError:
            noticed += 1
    assert noticed > 200
    for length in range(0, len(data) - 1, 97):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"."):
            checkpoint.load(path)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_that_does_not_fit(tmp_path, nmrun_cli):
    """The kernel refuses to write more than 100 kB into one file; the checkpoint is larger."""
    words = (*TINY, "model.channels=[16,32,32]", f"output_dir={tmp_path}")
    command = [sys.executable, "-m", "nmrun", *words]
    limited = ["bash", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "bash", *command]
    process = subprocess.run(limited, capture_output=True, text=True)
    assert process.returncode == 1
    assert "checkpoint.pt: File too large, " in process.stderr
    assert "Traceback" not in process.stderr + process.stdout
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "failed"
    assert sorted(p.name for p in result.parent.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "run.log",
    ]
    assert nmrun_cli(*words).returncode == 0


def test_a_disk_that_is_full_from_some_step_on(tmp_path, monkeypatch, capsys):
    cfg, full = config(tmp_path), []

    def fsync(_):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open

    def appending(path, mode="r", *args, **kwargs):
        if full and "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    with after_step(8, full.append), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "open", appending)
        result = runner.run(cfg, run_folder(cfg))
    assert result["status"] == "failed"
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "has the traceback" not in said
    assert not list(run_folder(cfg).glob("*.partial"))
    state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
    assert state["loop"]["step"] == 6
    finished(cfg)


def test_a_disk_with_no_room_for_the_next_checkpoint(tmp_path, monkeypatch):
    """Three epochs are not lost, though the last one has made room already."""
    alone, cfg = outcome(config(tmp_path / "alone")), config(tmp_path)
    folder, write, saved = run_folder(cfg), Path.write_bytes, list[Path]()

    def full(path, data):
        if path.name == "checkpoint.pt.partial":
            saved.append(path)
            if len(saved) == 4:
                write(path, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        result = runner.run(cfg, folder)
    assert result["status"] == "failed"
    assert "checkpoint.pt: No space left on device, " in result["error"]
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint.previous.pt"]
    (run,) = status.runs(folder)
    assert run.state == "failed"
    assert outcome(cfg) == alone
    assert "goes on at step 9 of 12" in (folder / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["recipe=ste", "-m recipe=ste seed=0,1", "prune RUN"])
def test_commands_on_a_full_disk_end_in_a_line(command, small_disk, nmrun_cli):
    """The line has the folder and what is free there, and the command works with room again."""
    place = f"output_dir={small_disk}"
    words = [*command.split(), *TINY, place]
    if command == "prune RUN":
        assert nmrun_cli("recipe=dense", *words[2:]).returncode == 0
        (run,) = (path.parent for path in small_disk.rglob("result.json"))
        words = ["prune", str(run), "sparsity=2:4", "method=magnitude", "samples=32", place]
    with contextlib.suppress(OSError):
        (small_disk / "others").write_bytes(bytes(2_000_000))
    process = nmrun_cli(*words)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr + process.stdout
    assert re.search("No space left on device, 0 MB free there", process.stderr)
    assert not list((small_disk / ".sweeps").glob("*"))
    (small_disk / "others").unlink()
    assert nmrun_cli(*words).returncode == 0


def test_a_sweep_goes_on_where_the_end_of_a_job_cannot_be_noted(small_disk, capsys):
    sweep.begin(small_disk, 2, "nmrun -m", "out")
    with contextlib.suppress(OSError):
        (small_disk / "others").write_bytes(bytes(2_000_000))
    sweep.add(small_disk, {"status": "finished"}, ["seed=0"], 1.0)
    assert "jobs.jsonl: No space left on device" in capsys.readouterr().err
    (small_disk / "others").unlink()
    sweep.add(small_disk, {"status": "finished"}, ["seed=1"], 1.0)
    assert [line["overrides"] for line in sweep.read(small_disk).ends] == [["seed=1"]]


# --- memory that runs out -------------------------------------------------------------------------


TOO_FEW = "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.). Try a larger trainer.accumulate"


def small_memory(monkeypatch: pytest.MonkeyPatch, passes: int) -> list[int]:
    """After so many passes with 32 images, more than 8 at once are too many. Returns the sizes of the
    micro-batches as they are tried."""
    loss, tried = Classification.loss, list[int]()

    def limited(task: Classification, model: Any, batch: Any) -> torch.Tensor:
        # two images: the example that FLOPs are counted with
        tried.extend([len(batch[0])] if len(batch[0]) > 2 else [])
        if tried.count(32) > passes and len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return loss(task, model, batch)

    monkeypatch.setattr(Classification, "loss", limited)
    return tried


def test_without_memory_a_run_fails_and_says_what_to_try(tmp_path, monkeypatch, capsys):
    small_memory(monkeypatch, passes=7)
    cfg = config(tmp_path)
    result = runner.run(cfg, run_folder(cfg))
    assert (result["status"], result["error"]) == ("failed", f"step 8: {TOO_FEW}")
    assert "run.log has the traceback" in capsys.readouterr().err
    assert "Traceback (most recent call last)" in (run_folder(cfg) / "run.log").read_text()


def test_a_network_that_memory_does_not_hold_is_told_without_what_is_no_help(tmp_path):
    cfg = config(tmp_path, "model=mlp", "model.hidden=[1000000000000,10]")
    error = runner.run(cfg, run_folder(cfg))["error"]
    assert error.startswith("model=mlp: ")
    assert "can't allocate memory" in error
    assert "trainer.accumulate" not in error


@pytest.mark.slow
def test_memory_that_runs_out_before_training(tmp_path, monkeypatch):
    """The pass that looks at the sizes of layers takes micro-batches as long as those of training;
    what lies in the folder from before ``force=true`` is not gone on with."""
    looks = ("trainer.acceleration=force",) if not products.KERNELS.obstacle() else ()
    monkeypatch.setattr("nmrun.fast.cpu.probe.SMALLEST", 1)
    cfg = config(tmp_path, *looks)
    finished(cfg)
    tried = small_memory(monkeypatch, passes=0)
    failing = config(tmp_path, *looks, "force=true")
    assert runner.run(failing, run_folder(failing))["error"] == f"before training: {TOO_FEW}"
    assert tried == [32]
