"""The proximal operator against minimisation by brute force: a fine grid, and descents from many
starts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.recipes.proxsparse import proximal


def objective(w: Tensor, z: Tensor, n: int, strength: float) -> Tensor:
    """1/2 ||w - z||^2 + strength * the sum of products of N + 1 magnitudes, of each row."""
    chosen = itertools.combinations(range(w.shape[-1]), n + 1)
    return (w - z).square().sum(-1) / 2 + strength * sum(
        w[..., list(c)].abs().prod(-1) for c in chosen
    )


def on_a_grid(z: Tensor, n: int, strength: float, points: int) -> float:
    """The lowest objective with every weight at a multiple of |z| / ``points``, of one group."""
    shares = torch.linspace(0, 1, points + 1, dtype=z.dtype)
    grid = torch.cartesian_prod(*[shares] * len(z)) * z
    return float(objective(grid, z, n, strength).min())


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (1, 2), (1, 3)])
@pytest.mark.parametrize("strength", [0.05, 0.4, 2.0])
def test_no_point_of_a_grid_is_lower(n, m, strength):
    z = torch.randn(6, m, dtype=torch.float64)
    minimiser = proximal(z, Pattern(n, m), 1, strength)
    for row, value in zip(z, objective(minimiser, z, n, strength).tolist(), strict=True):
        assert value <= on_a_grid(row, n, strength, 20) + 1e-12


def test_a_pattern_that_holds_stays():
    w = torch.tensor([[3.0, 0, 0, -2], [0, 0, 1, 0]])
    assert torch.equal(proximal(w, Pattern(2, 4), 1, 5.0), w)


@pytest.mark.parametrize("dim", [0, 1])
def test_along_any_dimension(dim):
    torch.manual_seed(3)
    w = torch.randn(8, 8, 3)
    minimiser = proximal(w, Pattern(2, 4), dim, 0.3)
    rows = w.movedim(dim, -1).reshape(-1, 4)
    expected = proximal(rows, Pattern(2, 4), 1, 0.3)
    torch.testing.assert_close(minimiser.movedim(dim, -1).reshape(-1, 4), expected)


def test_a_group_does_not_depend_on_the_others():
    """Groups end at different sweeps; each ends where it would alone, to the bit."""
    torch.manual_seed(4)
    w = torch.randn(64, 8) * torch.logspace(-2, 1, 64)[:, None]
    minimiser = proximal(w, Pattern(2, 8), 1, 1.0)
    for row, one in zip(w, minimiser, strict=True):
        assert torch.equal(proximal(row[None], Pattern(2, 8), 1, 1.0)[0], one)
