"""A user's script with DDP: whichever comes first, the ranks train what one process trains."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import user_ranks
import user_training

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, torch.Tensor]]:
    """By recipe, optimizer and way: what both ranks ended with, bit by bit the same."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [*TORCHRUN, user_ranks.__file__, "ddp", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[Any, dict[str, torch.Tensor]] = torch.load(folder / "ddp.pt")
    return found


@pytest.mark.parametrize(("recipe", "optimizer"), user_training.CASES)
def test_two_ranks_train_the_weights_of_one(recipe: str, optimizer: str, outcomes: Any) -> None:
    expected = user_training.alone(recipe, optimizer)
    start = user_training.net().state_dict()
    assert any(not torch.equal(expected[name], start[name]) for name in start)
    for how in user_ranks.WAYS:
        found = outcomes[recipe, optimizer, how]
        assert found.keys() == expected.keys(), how
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{how} {name}"
            )


@pytest.mark.parametrize(("recipe", "optimizer"), user_training.CASES)
def test_the_order_of_the_calls_changes_no_bit(recipe: str, optimizer: str, outcomes: Any) -> None:
    first = outcomes[recipe, optimizer, "ddp first"]
    for how in ("sparsify first", "ddp first, seeds", "sparsify first, seeds"):
        for name, tensor in outcomes[recipe, optimizer, how].items():
            assert torch.equal(tensor, first[name]), (how, name)
