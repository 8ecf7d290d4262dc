"""Checkpoints through kills and power cuts; damage is in ``test_faults``, whole runs are in
``test_resume``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config

from nmrun.config.identity import run_folder
from nmrun.train import checkpoint, runner


def test_a_kill_between_the_link_and_its_name(tmp_path: Path) -> None:
    """The link that is left is the checkpoint itself."""
    checkpoint.save_next(tmp_path, {"step": 1})
    os.link(tmp_path / "checkpoint.pt", tmp_path / "checkpoint.previous.pt.partial")
    checkpoint.save_next(tmp_path, {"step": 2})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert checkpoint.load(tmp_path / "checkpoint.pt") == {"step": 2}
    assert checkpoint.load(tmp_path / "checkpoint.previous.pt") == {"step": 1}


def test_rows_are_on_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, "recipe=ste")
    synced, checked = dict[int, int](), []
    fsync, replace = os.fsync, os.replace

    def noting(handle: int) -> None:
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checking(source: Any, to: Any) -> None:
        if Path(to).name == "checkpoint.pt":
            rows = (run_folder(made) / "metrics.jsonl").stat()
            checked.append(synced.get(rows.st_ino) == rows.st_size > 0)
        replace(source, to)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", checking)
    assert runner.run(made, run_folder(made))["status"] == "finished"
    assert checked == [True] * 4


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save_next(tmp_path, {"step": step, "tensor": torch.arange(4)})
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-40])
    state, said = checkpoint.load_last(tmp_path)
    assert state is not None
    assert state["step"] == 1
    assert said[0].startswith("checkpoint.pt is damaged (")
    assert said[1:] == ["going on from checkpoint.previous.pt, the one before it"]
    # from here on it is the last one: the next is saved beside it, not beside the damaged one
    checkpoint.save_next(tmp_path, {"step": 3})
    assert checkpoint.load(tmp_path / "checkpoint.previous.pt")["step"] == 1  # type: ignore[index]
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / name).write_bytes(b"nothing")
    state, said = checkpoint.load_last(tmp_path)
    assert state is None
    assert [line.partition(" (")[0] for line in said] == [
        "checkpoint.pt is damaged",
        "checkpoint.previous.pt is damaged",
        "starting over",
    ]
    assert checkpoint.load_last(tmp_path / "nowhere") == (None, [])
