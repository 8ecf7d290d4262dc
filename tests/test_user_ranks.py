"""A user's script with DDP and with FSDP2: whichever comes first, the ranks train what one process
trains; shards train DDP's bits, are saved by torch.distributed.checkpoint, and resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import preloaded
import pytest
import torch
import user_ranks
import user_training

pytestmark = pytest.mark.slow

Outcomes = dict[Any, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """What both ranks ended with, bit by bit the same: of ``"ddp"`` by recipe, optimizer and way;
    of ``"fsdp"`` by recipe and optimizer, where the script has compared resumed runs with those
    without a stop.
    """
    folder = tmp_path_factory.mktemp("ranks")

    @cache
    def ended(kind: str) -> Outcomes:
        process = preloaded.torchrun(user_ranks.__file__, kind, folder)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
        result: Outcomes = torch.load(folder / f"{kind}.pt")
        return result

    return ended


def ways(recipe: str) -> list[str]:
    """All but the one in which Bi-Mask's first step prunes for the input gradient what each rank
    had before DDP; its ranks agree from then on.
    """
    return [w for w in user_ranks.WAYS if (recipe, w) != ("bi_mask", "sparsify first, seeds")]


@pytest.mark.parametrize(("recipe", "optimizer"), [*user_training.CASES, *user_training.DRAWN])
def test_two_ranks_train_the_weights_of_one(recipe, optimizer, outcomes):
    expected = user_training.alone(recipe, optimizer)
    start = user_training.net().state_dict()
    assert any(not torch.equal(expected[name], start[name]) for name in start)
    for how in ways(recipe):
        actual = outcomes("ddp")[recipe, optimizer, how]
        assert actual.keys() == expected.keys(), how
        for name, tensor in expected.items():
            torch.testing.assert_close(
                actual[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{how} {name}"
            )


@pytest.mark.parametrize(("recipe", "optimizer"), [*user_training.CASES, *user_training.DRAWN])
def test_the_order_of_the_calls_changes_no_bit(recipe, optimizer, outcomes):
    results = outcomes("ddp")
    first = results[recipe, optimizer, "ddp first"]
    for how in set(ways(recipe)) - {"no_sync"}:
        for name, tensor in results[recipe, optimizer, how].items():
            assert torch.equal(tensor, first[name]), (how, name)


@pytest.mark.parametrize(("recipe", "optimizer"), user_training.CASES)
def test_shards_train_the_bits_of_replicas(recipe, optimizer, outcomes):
    replicated = outcomes("ddp")[recipe, optimizer, "ddp first"]
    sharded = outcomes("fsdp")[recipe, optimizer]
    assert sharded.keys() == replicated.keys()
    for name, tensor in replicated.items():
        if optimizer == "fused":  # its vectors end elsewhere in a shard
            torch.testing.assert_close(sharded[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
            assert torch.equal(sharded[name] == 0, tensor == 0), name
        else:
            assert torch.equal(sharded[name], tensor), name


def test_what_is_summed_over_processes_counts_a_whole_layer_once(outcomes):
    expected = user_training.measured(user_training.pairs())
    actual = outcomes("tensor")["measured"]
    assert actual.keys() == expected.keys()
    assert any(key.startswith("step/") for key in expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("plan", ["all", "some"])
@pytest.mark.parametrize("recipe", user_training.RECIPES)
def test_layers_in_parts_train_as_one_process(recipe, plan, outcomes):
    """Masks of a layer that is cut by its inputs are chosen from whole groups; other layers of the model
    may be whole in every process."""
    expected = user_training.alone(recipe, "adamw", user_training.pairs, user_training.whole_step)
    actual = outcomes("tensor")[recipe, plan]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
        assert torch.equal(actual[name] == 0, tensor == 0), name
