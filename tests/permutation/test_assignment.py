"""The order by assignment against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_permute import kept_by_hand
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.permutation import permute as orders
from nmrun.permutation.permute import assigned_order, best_order, kept_magnitude


def scores(rows: int, channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, channels, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("find", [assigned_order, best_order])
def test_the_default_device_changes_no_order(find):
    layers = [(scores(5, 14), Pattern.parse("2:4").over(14))]
    with torch.device("meta"):
        order = find(layers)
    assert torch.equal(order, find(layers))


@pytest.mark.parametrize(
    ("parts", "channels"),
    [
        ([(5, "2:4")], 16),
        ([(5, "1:4")], 12),
        ([(4, "3:8")], 24),
        ([(4, "2:4"), (6, "1:4")], 16),  # layers that read the same channels
        ([(4, "2:4"), (5, "3:8")], 32),  # one order for groups of two sizes
        ([(5, "2:4")], 14),  # the last group is short
        ([(4, "2:3"), (4, "1:4")], 30),
    ],
)
def test_no_exchange_at_one_place_of_the_groups_keeps_more(parts, channels, monkeypatch):
    """Of all ways to hand the channels at one place of every block out again, by brute force."""
    monkeypatch.setattr(orders, "LEAST", 0.0)
    block = {"2:4 3:8": 8, "2:3 1:4": 12, "3:8": 8}.get(" ".join(p for _, p in parts), 4)
    for seed in range(3):
        layers = [
            (scores(rows, channels, 7 * seed + i), Pattern.parse(text).over(channels))
            for i, (rows, text) in enumerate(parts)
        ]
        order = assigned_order(layers).tolist()
        assert sorted(order) == list(range(channels))
        best = kept_by_hand(layers, order)
        assert best > kept_by_hand(layers, list(range(channels)))
        for place in range(block):
            places = range(place, channels, block)
            for exchanged in itertools.permutations([order[p] for p in places]):
                other = list(order)
                for position, channel in zip(places, exchanged, strict=True):
                    other[position] = channel
                assert kept_by_hand(layers, other) <= best * (1 + 1e-9)


def test_it_keeps_about_what_the_search_by_swaps_keeps():
    """On scores as of trained layers, whose channels differ in size."""
    sized = scores(64, 128) * torch.linspace(-1, 1, 128, dtype=torch.float64).exp()
    layers = [(sized, Pattern(2, 4))]
    first, swaps, ours = (
        kept_magnitude(layers, order)
        for order in (None, best_order(layers), assigned_order(layers))
    )
    assert ours - first > 0.9 * (swaps - first)
