"""Each process takes a GPU of its own, and waits where there is none left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from nmrun.lab.train import build

TAKE = (
    "import sys; from nmrun.lab.runs.locks import free_gpu; print({}, flush=True); sys.stdin.read()"
)


def taking(place, what, **environment):
    """A process that prints which GPUs it takes, and holds them until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", TAKE.format(what)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(place), **environment},
    )  # fmt: skip


def test_three_processes_on_two_gpus(tmp_path):
    both = "free_gpu(2, 0.01), free_gpu(2)"
    first = taking(tmp_path, both)
    assert first.stdout.readline() == "0 0\n"
    second = taking(tmp_path, both)
    assert second.stdout.readline() == "1 1\n"
    third = taking(tmp_path, both)
    with pytest.raises(subprocess.TimeoutExpired):
        third.wait(0.5)
    first.kill()  # however it ends
    first.wait()
    assert third.stdout.readline() == "0 0\n"
    for process in (second, third):
        process.communicate("")


def test_visible_devices_are_told_apart_by_their_own_numbers(tmp_path):
    started = [taking(tmp_path, "free_gpu(1)", CUDA_VISIBLE_DEVICES=visible) for visible in "35"]
    assert [process.stdout.readline() for process in started] == ["0\n", "0\n"]
    assert len(list(tmp_path.glob("nmrun-*-gpu-[35].lock"))) == 2
    for process in started:
        process.communicate("")


def test_the_device_of_a_run_is_the_current_one(monkeypatch):
    """Events and cuSPARSELt go by the current device, not by that of the tensors."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(build, "free_gpu", lambda count: count - 1)
    assert build.device_of("free") == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert build.device_of("auto") == build.device_of("cuda") == torch.device("cuda", 2)
    assert build.device_of("cpu") == torch.device("cpu")
    assert current == [3, 2, 2]
