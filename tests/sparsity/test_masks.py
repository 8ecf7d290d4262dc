"""Masks and projections against brute force over all subsets, and S-STE's projection against its
definition.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nmrun.sparsity import (
    check_nm,
    hard_threshold,
    mvue,
    nm_mask,
    soft_threshold,
    soft_threshold_scale,
    transposable_mask,
)

ALL_RATIOS = [(n, m) for m in range(1, 9) for n in range(1, m + 1)]


def brute_force(group: list[float], n: int) -> list[bool]:
    """The subset of n with the largest sum of magnitudes; of equals the one whose kept indices come
    first.
    """
    # in lexicographic order, so max() takes the lowest indices
    subsets = itertools.combinations(range(len(group)), n)
    best = max(subsets, key=lambda subset: math.fsum(abs(group[i]) for i in subset))
    return [i in best for i in range(len(group))]


def hard_groups(m: int, dtype: torch.dtype) -> Tensor:
    """Groups of m (rows): ties, zeros of both signs, constants, single values, and random ones."""
    generator = torch.Generator().manual_seed(m)
    # multiples of a half: sums are exact
    few = torch.randint(-2, 3, (24, m), generator=generator).to(dtype) / 2
    zeros, count = torch.zeros(m), torch.arange(m)
    special = torch.stack([zeros, -zeros, zeros + 1, count % 2 * -1.0, -count / 8.0])
    spread = torch.randn(12, m, generator=generator).mul(64).round() / 64
    return torch.cat([few, special.to(dtype), spread.to(dtype), torch.where(few == 0, -0.0, few)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "m"), ALL_RATIOS)
def test_mask_is_the_best_subset(n, m, dtype):
    groups = hard_groups(m, dtype)
    expected = torch.tensor([brute_force(group, n) for group in groups.tolist()])
    assert torch.equal(nm_mask(groups, f"{n}:{m}"), expected)
    assert torch.equal(nm_mask(groups.T, f"{n}:{m}", dim=0), expected.T)
    side_by_side = groups.reshape(1, -1)
    assert torch.equal(nm_mask(side_by_side, f"{n}:{m}", dim=-1), expected.reshape(1, -1))
    projected = hard_threshold(groups, f"{n}:{m}")
    assert projected.dtype == dtype
    assert torch.equal(projected, torch.where(expected, groups, 0))
    assert not projected[projected == 0].signbit().any()  # +0.0 everywhere


@pytest.mark.parametrize(
    "kernel", [(), (3,), (3, 2), (2, 1, 2)], ids=["linear", "conv1d", "conv2d", "conv3d"]
)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 8), (5, 6)])
def test_groups_run_along_input_channels_at_one_kernel_position(n, m, kernel):
    weight = torch.randn(3, 2 * m, *kernel)
    mask = nm_mask(weight, f"{n}:{m}")
    assert mask.shape == weight.shape
    positions = itertools.product(*map(range, kernel))
    for out, start, position in itertools.product(range(3), (0, m), positions):
        group = (out, slice(start, start + m), *position)
        assert mask[group].tolist() == brute_force(weight[group].tolist(), n)


@pytest.mark.parametrize(("n", "indices"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_nan_is_kept_on_top_of_the_n(n, indices):
    weight = torch.tensor([[math.nan, 1.0, -2.0, 3.0, -4.0, math.nan]])
    assert nm_mask(weight, f"{n}:6").nonzero()[:, 1].tolist() == [0, *indices, 5]
    projected = hard_threshold(weight, f"{n}:6")
    assert projected.isnan().sum() == 2
    assert nm_mask(torch.full((1, 4), math.nan), "1:4").all()


def test_whole_numbers_stay_so():
    weight = torch.tensor([[3, -1, 2, 0, 5, 6, -8, -7]])
    assert hard_threshold(weight, "2:4").tolist() == [[3, 0, 2, 0, 0, 0, -8, -7]]
    assert soft_threshold(weight, "2:4").tolist() == [[2, 0, 1, 0, 0, 0, -2, -1]]
    results = [f(weight, p) for f in (hard_threshold, soft_threshold) for p in ("2:4", "4:4")]
    assert {result.dtype for result in results} == {weight.dtype}


def test_nan_takes_no_place_from_a_zero():
    weight = torch.tensor([[math.nan, 0.0, 0.0, 1.0], [0.0, math.nan, math.nan, 0.0]])
    expected = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(nm_mask(weight, "2:4"), expected)
    assert torch.equal(nm_mask(weight.T, "2:4", dim=0), expected.T)


def test_a_nan_stays_one_under_a_soft_threshold_and_takes_no_place():
    weight = torch.tensor([[math.nan, 1.0, -2.0, 3.0], [4.0, 1.0, -2.0, 3.0]])
    expected = torch.tensor([[math.nan, 0.0, -1.0, 2.0], [2.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(soft_threshold(weight, "2:4"), expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 6), (6,), ()])
def test_sizes_that_are_no_multiple_of_m(shape):
    with pytest.raises(ValueError, match=r"2:4 needs dimension \d to be a multiple of 4; it is"):
        nm_mask(torch.ones(shape), "2:4", dim=len(shape) - 1)


@pytest.mark.parametrize("function", [nm_mask, hard_threshold, soft_threshold, mvue, check_nm])
def test_a_dimension_is_one_that_the_tensor_has(function):
    weight = torch.zeros(4, 8)
    for dim in (2, 3, -3):
        with pytest.raises(ValueError, match=rf"dim={dim}: this tensor has 2 dimensions, \[4, 8\]"):
            function(weight, "2:4", dim)
    assert nm_mask(torch.ones(4), "2:4").tolist() == [True, True, False, False]  # a vector has one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: soft_threshold(w, "2:4", gamma=-0.5), "gamma=-0.5: it takes a number from 0"),
        (lambda w: soft_threshold(w, "2:4", gamma=1.5), "gamma=1.5: it takes a number from 0 to 1"),
        (lambda w: soft_threshold_scale(w, "2:4", fit="max"), "fit='max': it takes mse or l1"),
        (lambda w: soft_threshold(w, "4:2:8"), "soft threshold is for N:M patterns, not for 4:2:8"),
        (lambda w: mvue(w, "4:2:8", 1), "mvue is for N:M patterns, not for 4:2:8"),
        (lambda w: transposable_mask(w, "4:2:8"), "for N:M patterns, not for 4:2:8"),
        (lambda w: check_nm(3, "2:4"), "int is no module: give check_nm the model"),
    ],
)
def test_what_has_no_meaning_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(8, 8))


def test_masks_take_no_part_in_autograd():
    weight = torch.randn(4, 8, requires_grad=True)
    for function in (nm_mask, hard_threshold, soft_threshold, soft_threshold_scale):
        assert not function(weight, "2:4").requires_grad
    assert not mvue(weight, "2:4", 1).requires_grad


# --- S-STE ----------------------------------------------------------------------------------------


def test_gamma_is_the_way_from_one_magnitude_to_the_next():
    weight = torch.tensor([[0.5, -4.0, 1.0, 2.0]], dtype=torch.float64)  # t from 1 to 2 at 2:4
    for gamma, values in ((0.0, [-3.0, 1.0]), (0.25, [-2.75, 0.75]), (0.9, [-2.1, 0.1])):
        expected = torch.tensor([[0.0, values[0], 0.0, values[1]]], dtype=torch.float64)
        torch.testing.assert_close(soft_threshold(weight, "2:4", gamma=gamma), expected)


def test_a_scale_that_keeps_the_sum_of_magnitudes():
    weight = torch.tensor([[0.5, -4.0, 1.0, 2.0]], dtype=torch.float64)
    assert soft_threshold_scale(weight, "2:4", fit="l1") == pytest.approx(7.5 / 4.0)
    assert soft_threshold_scale(weight, "2:4") == pytest.approx((4 * 3 + 2 * 1) / (9 + 1))
    assert soft_threshold_scale(weight, "2:4", gamma=0.5, fit="l1") == pytest.approx(7.5 / 3.0)
    assert soft_threshold_scale(torch.zeros(1, 4), "2:4", fit="l1") == 1.0


def soft_by_definition(group: list[float], n: int) -> list[float]:
    sizes = sorted((abs(w) for w in group), reverse=True)
    t = sizes[n] if n < len(group) else 0.0  # the (N+1)-th largest
    return [math.copysign(max(abs(w) - t, 0.0), w) for w in group]


@pytest.mark.parametrize(("n", "m"), ALL_RATIOS)
def test_soft_threshold_is_its_definition(n, m):
    groups = hard_groups(m, torch.float64)
    projected = soft_threshold(groups, f"{n}:{m}")
    assert projected.tolist() == [soft_by_definition(g, n) for g in groups.tolist()]
    assert ((projected != 0).sum(1) <= n).all()
    assert not projected[projected == 0].signbit().any()
    assert torch.equal(soft_threshold(groups.T, f"{n}:{m}", dim=0), projected.T)


@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 1), ((16, 8), 0), ((4, 8, 3, 3), 1)])
@pytest.mark.parametrize("ratio", ["2:4", "1:8"])
def test_scale_is_the_least_squares_fit(shape, dim, ratio):
    weight = torch.randn(shape)
    shrunk = soft_threshold(weight, ratio, dim).double().numpy().reshape(-1, 1)
    fitted = np.linalg.lstsq(shrunk, weight.double().numpy().reshape(-1), rcond=None)[0].item()
    scale = soft_threshold_scale(weight, ratio, dim)
    assert scale.shape == ()
    assert scale.dtype == weight.dtype
    assert scale.item() == pytest.approx(fitted, rel=1e-6)
