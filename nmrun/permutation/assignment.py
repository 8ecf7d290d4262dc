"""An order of channels by assignment, for scores of weights (Zhang et al. 2024, arXiv 2402.12419,
section 3.3).

Channels are first dealt to the groups of M, the largest sums of scores first, so that no group has
only large ones. Then all groups give away the channel at one place, and get one of these back each:
which, so that the masks keep most, is a linear sum assignment. A round does that for every place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from nmrun.permutation.search import Layer, kept_magnitude

LEAST = 1e-4  # share of what is kept; a round that gains less is the last


@torch.no_grad()
def assigned_order(layers: Sequence[Layer]) -> Tensor:
    """Find an order of channels with which the masks of all layers keep more of their scores.

    Args:
        layers: scores (rows, channels), 0 or more, all of the same channels, each with its pattern.
            The last group of a pattern made ``over`` the number of channels may be short.

    Returns:
        The channel at each position: int64, on the CPU. The present order where none is better, or
        where a score is not finite.
    """
    channels = layers[0][0].shape[1]
    layers = [(scores, pattern) for scores, pattern in layers if pattern.n < pattern.m]
    present = torch.arange(channels)
    if not layers or not all(bool(scores.isfinite().all()) for scores, _ in layers):
        return present
    # where patterns differ, places of blocks that all groups fit into
    block = min(channels, math.lcm(*(pattern.m for _, pattern in layers)))
    by_channel = [(scores.T.contiguous(), pattern) for scores, pattern in layers]
    sums = torch.stack([columns.sum(1).cpu() for columns, _ in by_channel]).sum(0)
    order = _dealt(sums, block)
    kept = 0.0
    while (now := kept_magnitude(layers, order)) > kept * (1 + LEAST):
        kept = now
        for place in range(block):
            _assign(by_channel, order, torch.arange(place, channels, block))
    return order if now > kept_magnitude(layers) * (1 + 1e-9) else present


def _dealt(sums: Tensor, block: int) -> Tensor:
    """Deal channels to blocks by their sums, forwards and backwards in turn; returns the order."""
    cards, given = sums.argsort(descending=True, stable=True), 0
    order = torch.empty_like(cards)
    for place in range(block):
        places = torch.arange(place, len(order), block)
        own = cards[given : given + len(places)]
        order[places] = own.flip(0) if place % 2 else own
        given += len(places)
    return order


def _assign(by_channel: Sequence[Layer], order: Tensor, places: Tensor) -> None:
    """Exchange the channels at these places, at most one of a group, as is best; in place.

    In a row, a group whose N-th largest score without the place is t gains max(0, c - t) by a
    channel of score c. Up to sums over c and t, which are the same for every assignment, that is
    half of |c - t|.
    """
    gains = torch.zeros(len(places), len(places))
    for columns, pattern in by_channel:
        m = pattern.m
        beside = torch.arange(m - 1) + (torch.arange(m - 1) >= (places % m).unsqueeze(1))
        others = (places // m * m).unsqueeze(1) + beside
        real = (others < len(order)).unsqueeze(2).to(columns.device)  # the last group may be short
        values = columns[order[others.clamp_max(len(order) - 1)]] * real
        t = values.topk(pattern.n, 1).values[:, -1]
        gains = gains + torch.cdist(t, columns[order[places]], p=1.0).cpu()
    _, given = linear_sum_assignment(gains.numpy(), maximize=True)
    order[places] = order[places[torch.as_tensor(given)]]
