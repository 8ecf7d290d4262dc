"""Transposable masks against exhaustive optima; the minimum-variance estimate
against its closed form.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.sparsity import mvue, transposable_mask
from nmrun.sparsity.masks import inclusion_probabilities


def block_sums(weight: Tensor, mask: Tensor) -> Tensor:
    """The sum of magnitudes kept in each M x M block of a block column."""
    return (weight.abs() * mask).double().reshape(-1, weight.shape[1] ** 2).sum(1)


def best_by_search(block: Tensor, n: int) -> float:
    """The optimum of one block by trying the rows one after the other, with the column sums as the
    state.
    """
    m, best = block.shape[0], {(0,) * block.shape[0]: 0.0}
    for row in block.abs().double().tolist():
        grown: dict[tuple[int, ...], float] = {}
        for counts, value in best.items():
            for chosen in itertools.combinations(range(m), n):
                new = tuple(c + (i in chosen) for i, c in enumerate(counts))
                if max(new) <= n:
                    grown[new] = max(grown.get(new, -1.0), value + sum(row[i] for i in chosen))
        best = grown
    return best[(n,) * m]


@pytest.mark.parametrize(
    ("n", "m"), [(1, 2), (2, 3), (1, 4), (2, 4), (3, 4), (2, 5), (3, 6), (1, 8)]
)
def test_transposable_mask_is_optimal_in_every_block(n, m):
    count = 20 if m <= 4 else 2
    weight = torch.randn(count * m, m)
    mask = transposable_mask(weight, f"{n}:{m}")
    assert mask.dtype == torch.bool
    assert (mask.sum(1) == n).all()
    assert (mask.reshape(count, m, m).sum(1) == n).all()
    optimum = [best_by_search(block, n) for block in weight.reshape(count, m, m)]
    assert block_sums(weight, mask).tolist() == pytest.approx(optimum, rel=1e-12)


def test_blocks_are_where_they_should_be():
    assert transposable_mask(torch.zeros(0, 8), "1:8").shape == (0, 8)
    weight = torch.randn(8, 12)
    mask = transposable_mask(weight, "2:4")
    for i, j in itertools.product(range(0, 8, 4), range(0, 12, 4)):
        block = slice(i, i + 4), slice(j, j + 4)
        assert torch.equal(mask[block], transposable_mask(weight[block], "2:4"))


# --- the minimum-variance unbiased estimate -------------------------------------------------------


def water_filling(group: list[float], n: int) -> list[float]:
    """min(1, c |x|) with a sum of n, or of the number of non-zeros if that is less: c by bisection."""
    sizes = [abs(x) for x in group]
    goal = min(n, sum(x > 0 for x in sizes))
    low, high = 0.0, n / min([x for x in sizes if x > 0], default=1.0)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * x) for x in sizes) < goal else (low, c)
    return [min(1.0, high * x) for x in sizes]


def groups(m: int) -> Tensor:
    torch.manual_seed(m)
    ones, count = torch.ones(m), torch.arange(m).float()
    special = torch.stack([ones, 0 * ones, torch.eye(m)[1], count, 10.0**-count, -ones])
    return torch.cat([torch.randn(8, m), torch.randn(4, m).exp() ** 2, special])


@pytest.mark.parametrize(
    ("n", "m"), [(1, 2), (1, 4), (2, 4), (3, 4), (4, 4), (2, 8), (4, 8), (3, 16)]
)
def test_inclusion_probabilities_fill_up_to_n(n, m):
    x = groups(m)
    expected = torch.tensor([water_filling(g, n) for g in x.tolist()], dtype=torch.float64)
    actual = inclusion_probabilities(x, f"{n}:{m}", 1)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (3, 4), (4, 4), (2, 8), (3, 16)])
def test_estimate_is_unbiased_with_exactly_n_picks_and_the_smallest_variance(n, m):
    draws = 4000
    x = groups(m).double()
    estimates = mvue(
        x.expand(draws, *x.shape), f"{n}:{m}", dim=-1, generator=torch.Generator().manual_seed(1)
    )
    picks = (estimates != 0).sum(-1)
    assert (picks == (x != 0).sum(1).clamp_max(n)).all()

    p = torch.tensor([water_filling(g, n) for g in x.tolist()], dtype=torch.float64)
    variance = torch.where(x != 0, x**2 * (1 / p - 1).nan_to_num(posinf=0.0), 0.0)
    error = (estimates.mean(0) - x).abs()
    assert (error <= 5 * (variance / draws).sqrt() + 1e-9 * x.abs()).all()
    frequent = draws * p > 100  # for rarer entries 4000 draws say nothing about the variance
    torch.testing.assert_close(estimates.var(0)[frequent], variance[frequent], rtol=0.5, atol=1e-9)
    total, expected = estimates.var(0)[:12].sum(), variance[:12].sum()  # the random groups together
    assert math.isclose(total, expected, rel_tol=0.15, abs_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_form_and_reproducibility(dtype, dim):
    x = torch.randn(8, 8, 8).to(dtype)
    first, second = (mvue(x, "2:4", dim, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.dtype, first.shape) == (x.dtype, x.shape)
    assert ((first != 0).movedim(dim, -1).reshape(-1, 4).sum(1) == 2).all()
    state = torch.get_rng_state()
    mvue(x, "2:4", dim, torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    one = mvue(x, "2:4", dim)
    torch.manual_seed(5)
    assert torch.equal(mvue(x, "2:4", dim), one)
    assert not torch.equal(mvue(x, "2:4", dim), one)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_short_last_group_is_one_that_zeros_fill_up(dim):
    x = torch.randn(7, 7)
    filled = F.pad(x, (0, 1) if dim else (0, 0, 0, 1))
    estimate = mvue(x, Pattern(2, 4).over(7), dim, torch.Generator().manual_seed(3))
    expected = mvue(filled, "2:4", dim, torch.Generator().manual_seed(3))
    assert torch.equal(estimate, expected.narrow(dim, 0, 7))
    p = inclusion_probabilities(x, Pattern(2, 4).over(7), dim)
    assert torch.equal(p, inclusion_probabilities(filled, "2:4", dim).narrow(dim, 0, 7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(bad):
    x = torch.ones(2, 8)
    x[0, 5] = bad
    estimate = mvue(x, "2:4", 1)
    assert estimate[0, 4:].isnan().all()
    assert estimate[0, :4].isfinite().all()
    assert estimate[1].isfinite().all()


def test_on_a_device_it_is_one_operator(monkeypatch):
    """Which Triton's kernel may stand behind; where it does not apply it is the reference, with the
    device's own generator.
    """
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for operand, dim in ((x, 0), (x.t(), 1)):
        torch.library.opcheck(
            *(torch.ops.nmrun.mvue.default, (operand, 2, 4, dim)),
            test_utils=("test_schema", "test_faketensor"),
        )
    torch.manual_seed(3)
    estimate = torch.ops.nmrun.mvue(x, 2, 4, 0)
    assert torch.equal(estimate, mvue(x, "2:4", 0, torch.Generator().manual_seed(3)))
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.ops.nmrun, "mvue", lambda x, *rest: (asked.append(rest), x)[1])
    played = SimpleNamespace(is_cuda=True, dim=lambda: 2)
    assert mvue(played, "2:4", -1) is played
    assert asked == [(2, 4, 1)]
