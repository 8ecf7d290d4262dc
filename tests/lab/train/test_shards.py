"""Checkpoints in shards: whole after a kill at any moment, looked through, and for any ranks."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import one_rank
import preloaded
import pytest
import torch
from one_rank import saved
from torch import nn

from nmrun.errors import RunError
from nmrun.lab.runs.run_folder import CHECKPOINT, PREVIOUS
from nmrun.lab.train import checkpoint


def loaded(folder: Path) -> tuple[int, list[str]]:
    """The step that one process finds, whose tensors are checked, and what is said."""
    state, messages = checkpoint.load_last(folder)
    if state is None:
        return 0, messages
    step = state["loop"]["step"]
    state = checkpoint.complete(folder, state, nn.Linear(2, 2))
    assert state["loop"]["random"][0].tolist() == list(range(step))
    expected = one_rank.values(step)
    assert state["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state["model"][name], tensor)
    assert torch.equal(state["optimizer"]["state"][0]["moment"], expected["odd"])
    return step, messages


@pytest.mark.slow
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    server = preloaded.context()
    outcomes, code = [], 3
    while code == 3:
        folder = tmp_path / str(len(outcomes))
        folder.mkdir()
        process = server.Process(target=one_rank.save, args=(folder, 3, len(outcomes)))
        process.start()
        process.join()
        code = process.exitcode
        outcomes.append(loaded(folder))
        assert outcomes[-1][1] == []  # none is damaged
        saved(folder, 4)  # and what a kill has left is in nobody's way
        assert loaded(folder) == (4, [])
        shards = [path.name for path in folder.iterdir() if path.is_dir()]
        states = [checkpoint.load(folder / n) for n in (CHECKPOINT, PREVIOUS)]
        assert sorted(shards) == sorted({state["shards"]["folder"] for state in states})
        assert not [path for path in folder.iterdir() if path.suffix == ".partial"]
    assert code == 0
    steps = [step for step, _ in outcomes]
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}
    assert len(steps) > 12  # the kills reached into everything


@pytest.mark.parametrize("where", ["bit", "cut", "gone", "metadata", "folder"])
def test_damage_is_recognised_and_the_one_before_taken(where, tmp_path):
    saved(tmp_path, 1, 2)
    place = tmp_path / checkpoint.load(tmp_path / CHECKPOINT)["shards"]["folder"]
    largest = max(place.iterdir(), key=lambda path: path.stat().st_size)
    file = place / ".metadata" if where == "metadata" else largest
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if where == "gone":
        file.unlink()
    elif where == "folder":
        shutil.rmtree(place)
    else:
        file.write_bytes(data[:100] if where == "cut" else data)
    step, messages = loaded(tmp_path)
    assert step == 1
    assert messages[0].startswith("checkpoint.pt is damaged (the checksum of checkpoint.shards.1/")
    assert messages[1] == "going on from checkpoint.previous.pt, the one before it"
    assert loaded(tmp_path) == (1, [])  # the damaged one is in nobody's place any more
    saved(tmp_path, 2)
    assert loaded(tmp_path) == (2, [])


def test_both_damaged(tmp_path):
    saved(tmp_path, 1, 2)
    for place in tmp_path.glob("checkpoint.shards.*"):
        (place / ".metadata").write_bytes(b"")
    assert loaded(tmp_path)[0] == 0
    assert loaded(tmp_path)[1][-1] == "starting over"


def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError) as error:
        patch.setattr(os, "fsync", full)
        saved(tmp_path, 2)
    assert str(error.value) == "the shards of rank 0: OSError: [Errno 28] No space left on device"
    assert len(list(tmp_path.glob("checkpoint.shards.*"))) == 1
    assert loaded(tmp_path) == (1, [])


def test_a_whole_checkpoint_takes_the_place_of_shards(tmp_path):
    saved(tmp_path, 1)
    for step in (2, 3):
        assert len(list(tmp_path.glob("checkpoint.shards.*"))) == 1
        checkpoint.save_next(tmp_path, {"model": one_rank.values(step), "loop": {"step": step}})
    assert not list(tmp_path.glob("checkpoint.shards.*"))
