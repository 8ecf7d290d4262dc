"""Checkpoints through kills and power cuts; damage is in ``test_faults``, whole runs are in
``test_resume``.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import config, cut_off, finished

from nmrun.lab import ranks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import checkpoint, runner


def test_the_checkpoint_before_the_last_is_kept(tmp_path, monkeypatch):
    """Also where a kill came while the next one was written."""

    def killed(*_):
        raise KeyboardInterrupt

    for step in range(3):
        checkpoint.save_next(tmp_path, {"step": step})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoint, "save", killed)
            checkpoint.save_next(tmp_path, {"step": step + 1})
        assert checkpoint.load_last(tmp_path) == ({"step": step}, [])
    for step in (3, 4):
        checkpoint.save_next(tmp_path, {"step": step})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert checkpoint.load(tmp_path / "checkpoint.pt") == {"step": 4}
    assert checkpoint.load(tmp_path / "checkpoint.previous.pt") == {"step": 3}


def test_rows_are_on_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    cfg = config(tmp_path, "recipe=ste")
    synced, checked = dict[int, int](), []
    fsync, replace = os.fsync, os.replace

    def noting(handle):
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checking(source, to):
        if Path(to).name == "checkpoint.pt":
            rows = (run_folder(cfg) / "metrics.jsonl").stat()
            checked.append(synced.get(rows.st_ino) == rows.st_size > 0)
        replace(source, to)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", checking)
    finished(cfg)
    assert checked == [True] * 4


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    for step in (1, 2):
        checkpoint.save_next(tmp_path, {"step": step, "tensor": torch.arange(4)})
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-40])
    state, messages = checkpoint.load_last(tmp_path)
    assert state["step"] == 1
    assert messages[0].startswith("checkpoint.pt is damaged (")
    assert messages[1:] == ["going on from checkpoint.previous.pt, the one before it"]
    # from here on it is the last one: the next is saved beside it, not beside the damaged one
    checkpoint.save_next(tmp_path, {"step": 3})
    assert checkpoint.load(tmp_path / "checkpoint.previous.pt")["step"] == 1
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / name).write_bytes(b"nothing")
    state, messages = checkpoint.load_last(tmp_path)
    assert state is None
    assert [line.partition(" (")[0] for line in messages] == [
        "checkpoint.pt is damaged",
        "checkpoint.previous.pt is damaged",
        "starting over",
    ]
    assert checkpoint.load_last(tmp_path / "nowhere") == (None, [])


def test_a_state_that_was_edited_is_damaged_though_every_checksum_of_it_is_right(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"step": 1, "tensor": torch.arange(4.0)})
    with zipfile.ZipFile(path) as before:
        seal, records = before.comment, [(info, before.read(info)) for info in before.infolist()]
    numbers = torch.arange(4.0).numpy().tobytes()
    assert sum(content == numbers for _, content in records) == 1
    with zipfile.ZipFile(path, "w") as after:
        for info, content in records:
            after.writestr(info, content[::-1] if content == numbers else content)
        after.comment = seal
    with zipfile.ZipFile(path) as after:
        assert after.testzip() is None
    with pytest.raises(ValueError, match="its hash is another"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
        OSError(errno.EIO, os.strerror(errno.EIO)),
        MemoryError(),
        pickle.UnpicklingError("Weights only load failed"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
    ids=repr,
)
def test_a_checkpoint_that_cannot_be_read_now_is_kept(error, tmp_path, monkeypatch):
    cfg = config(tmp_path)
    cut_off(cfg, 5)
    folder = run_folder(cfg)
    before = (folder / "checkpoint.pt").read_bytes()

    def unread(*_, **__):
        raise error

    with monkeypatch.context() as machine:
        machine.setattr(torch, "load", unread)
        result = runner.run(cfg, folder)
    assert result["status"] == "failed"
    assert (folder / "checkpoint.pt").read_bytes() == before
    finished(cfg)
    assert "goes on at step" in (folder / "run.log").read_text()


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32 + 5, 3**32 + 1, 2**63 + 9, 2**64 - 1])
def test_every_seed_is_given_to_every_generator_as_far_as_it_takes_it(seed):
    checkpoint.seed_everything(seed)
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed % 2**32).random_sample()
    alone = torch.Generator().manual_seed(seed % 2**63)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=alone))


@pytest.mark.parametrize(("devices", "restored"), [(2, True), (1, False), (0, False)])
def test_generators_of_gpus_come_back_where_there_are_as_many(devices, restored, monkeypatch):
    states = [torch.tensor([1]), torch.tensor([2])]
    set_again: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_again.append)
    state = checkpoint.random_state()
    assert state["cuda"] == states
    checkpoint.restore_random_state(state)
    assert set_again == ([states] if restored else [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert checkpoint.random_state()["cuda"] == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_rank_that_does_not_lead_has_what_the_leader_found(damaged, tmp_path, monkeypatch):
    """The leader has put the checkpoint that is whole in its place, when it is read."""
    for step in (1, 2):
        checkpoint.save_next(tmp_path, {"step": step, "tensor": torch.arange(step)})
    if damaged:
        (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    sent: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "world", lambda: 2)
        patch.setattr(ranks, "from_leader", lambda value: sent.append(value) or value)
        ours, messages = checkpoint.load_last(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "world", lambda: 2)
        patch.setattr(ranks, "leads", lambda: False)
        patch.setattr(ranks, "from_leader", lambda _: sent.pop(0))
        theirs, other_messages = checkpoint.load_last(tmp_path)
    assert ours["step"] == theirs["step"] == (1 if damaged else 2)
    assert torch.equal(theirs["tensor"], torch.arange(theirs["step"]))
    assert messages == other_messages
    assert sent == []


@pytest.mark.parametrize(("takes", "most"), [(0.5, 100), (30.0, 20)])
def test_checkpoints_by_time_take_one_percent_at_most(takes, most, monkeypatch):
    """Steps of a second, a checkpoint every ten minutes, or less often where it takes long."""
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now[0])
    clock, saved = checkpoint.CheckpointClock(600.0), 0
    while now[0] < 60_000:
        now[0] += 1
        if clock.due():
            with clock.saving():
                now[0] += takes
            saved += 1
    assert clock.spent == takes * saved
    assert most - 2 < saved <= most
    assert clock.spent < 0.011 * now[0]
    assert not checkpoint.CheckpointClock(None).due()
