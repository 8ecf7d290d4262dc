"""A model that is built in files has the bits of one that is built in memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from nmrun.lab.train.on_disk import LEAST, OnDisk


class Odd(nn.Module):
    """Copied layers, tied and transposed weights, a weight that is written through another name,
    initialisers of all kinds, buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 4, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # by copy.deepcopy
        self.memory = nn.LSTM(512, 512)
        self.conv = nn.Conv2d(256, 256, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)
        self.tied = nn.Linear(512, 1024)
        self.tied.weight = self.first.weight
        self.second.weight = nn.Parameter(self.first.weight.detach().t().clone())
        late = torch.empty(600, 600)
        self.late = nn.Parameter(late)
        late.normal_()
        self.table = nn.Embedding.from_pretrained(torch.randn(2000, 256) / 3)
        nn.init.orthogonal_(self.second.weight)
        self.apply(self._start)
        self.load_state_dict({"late": torch.eye(600)}, strict=False)
        self.register_buffer("mask", torch.ones(1024, 1024).tril())
        self.register_buffer("hidden", torch.arange(LEAST / 4), persistent=False)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


def test_a_model_has_the_bits_of_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(3)
    expected, state = Odd(), torch.get_rng_state()
    torch.manual_seed(3)
    with OnDisk():
        model = Odd()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.tied.weight is model.first.weight
    every = dict(expected.named_parameters()) | dict(expected.named_buffers())
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(own) == list(every)
    for name, tensor in every.items():
        assert torch.equal(own[name], tensor), name
        assert own[name].stride() == tensor.stride(), name
        assert own[name].requires_grad == tensor.requires_grad, name
        assert own[name].is_shared() == (tensor.nbytes >= LEAST), name  # a mapped file is shared
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing is left behind


def test_a_step_of_it_is_the_same() -> None:
    models = []
    for mode in (None, OnDisk()):
        torch.manual_seed(0)
        if mode is None:
            models.append(nn.Linear(1024, 512))
        else:
            with mode:
                models.append(nn.Linear(1024, 512))
    x = torch.randn(4, 1024)
    for model in models:
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_disk_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with OnDisk(), pytest.raises(OSError, match="No space left on device") as error:
        nn.Linear(1024, 512)
    assert f"free in {tempfile.gettempdir()}" in str(error.value)


BUILD = """
import contextlib, sys
from torch import nn
from nmrun.lab.train.on_disk import OnDisk

def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

with OnDisk():
    nn.Linear(1024, 1024)  # what torch has to load for it
before, layers, most = anonymous(), [], 0
with OnDisk() if sys.argv[1] == "disk" else contextlib.nullcontext():
    for _ in range(50):
        layers.append(nn.Linear(1024, 1024))
        most = max(most, anonymous() - before)
print(most)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="as Linux counts")
@pytest.mark.parametrize(("where", "least", "most"), [("disk", -40, 40), ("memory", 190, 240)])
def test_what_200_mb_take_up_in_memory(where: str, least: int, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, where], capture_output=True, text=True, check=True
    )
    assert least < float(done.stdout) < most
