"""A user's script with FSDP2: DDP's bits; saved by torch.distributed.checkpoint and resumed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import user_ranks
import user_training
from test_user_ddp import TORCHRUN

Outcomes = dict[Any, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    """Replicated and sharded. The script has compared resumed runs with those without a stop."""
    folder = tmp_path_factory.mktemp("fsdp")
    return ended("ddp", folder), ended("fsdp", folder)


def ended(kind: str, folder: Path) -> Outcomes:
    command = [*TORCHRUN, user_ranks.__file__, kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: Outcomes = torch.load(folder / f"{kind}.pt")
    return found


@pytest.mark.parametrize(("recipe", "optimizer"), user_training.CASES)
def test_shards_train_the_bits_of_replicas(recipe: str, optimizer: str, outcomes: Any) -> None:
    replicated, sharded = (
        outcomes[0][recipe, optimizer, "ddp first"],
        outcomes[1][recipe, optimizer],
    )
    assert sharded.keys() == replicated.keys()
    for name, tensor in replicated.items():
        if optimizer == "fused":  # its vectors end elsewhere in a shard
            torch.testing.assert_close(sharded[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
            assert torch.equal(sharded[name] == 0, tensor == 0), name
        else:
            assert torch.equal(sharded[name], tensor), name
