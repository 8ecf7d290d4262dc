"""The order by assignment against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.permutation import order as orders
from nmrun.permutation.order import assigned_order, best_order, kept_magnitude


def scores(rows: int, channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, channels, generator=generator, dtype=torch.float64)


def magnitude(layers: list[tuple[Tensor, Pattern]], order: list[int]) -> float:
    total = 0.0
    for matrix, pattern in layers:
        for row in matrix.tolist():
            values = [row[c] for c in order]
            for start in range(0, len(values), pattern.m):
                group = sorted(values[start : start + pattern.m], reverse=True)
                total += sum(group[: pattern.n])
    return total


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
        best = magnitude(layers, order)
        assert best > magnitude(layers, list(range(channels)))
        for place in range(block):
            places = range(place, channels, block)
            for exchanged in itertools.permutations([order[p] for p in places]):
                other = list(order)
                for position, channel in zip(places, exchanged, strict=True):
                    other[position] = channel
                assert magnitude(layers, other) <= best * (1 + 1e-9)


def test_it_keeps_about_what_the_search_by_swaps_keeps():
    """On scores as of trained layers, whose channels differ in size."""
    sized = scores(64, 128) * torch.linspace(-1, 1, 128, dtype=torch.float64).exp()
    layers = [(sized, Pattern(2, 4))]
    first, swaps, ours = (
        kept_magnitude(layers, order)
        for order in (None, best_order(layers), assigned_order(layers))
    )
    assert ours - first > 0.9 * (swaps - first)


def test_what_no_order_improves_stays():
    broken = scores(4, 16)
    broken[0, 0] = torch.nan
    for matrix, text in [
        (scores(4, 16), "4:4"),
        (torch.ones(4, 16), "1:4"),
        (scores(4, 16), "2:16"),
        (broken, "2:4"),
    ]:
        assert torch.equal(assigned_order([(matrix, Pattern.parse(text))]), torch.arange(16))


def test_the_same_scores_give_the_same_order():
    layers = [(scores(16, 64).float(), Pattern(2, 4))]
    torch.manual_seed(1)
    first = assigned_order(layers)
    torch.manual_seed(2)
    assert torch.equal(first, assigned_order(layers))
