"""The best transposable masks of many blocks against linear programmes; what holds for any weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from nmrun.sparsity import check_nm, transposable, transposable_mask
from nmrun.sparsity.transposable import best_masks

RATIOS = [(1, 4), (2, 4), (3, 4), (1, 5), (3, 6), (3, 8), (4, 8), (7, 8), (1, 16), (3, 16), (8, 16), (16, 32)]  # fmt: skip


def weights(kind: str, count: int, m: int) -> Tensor:
    """Blocks of different kinds, (count, m, m), 0 or more."""
    draw = torch.Generator().manual_seed(m)
    normal = torch.randn(count, m, m, generator=draw, dtype=torch.float64)
    column = torch.randn(count, m, 1, generator=draw, dtype=torch.float64)
    kinds = {
        "normal": normal,
        "products": column @ normal[:, :1],  # large rows meet large columns
        "heavy": normal**7,
        "ties": (normal * 2).round(),
        "mostly zero": normal * (normal > 1.5),
        "zero": torch.zeros_like(normal),
        "tiny": normal * 1e-300,
        "huge": normal * 1e300,
    }
    return kinds[kind].abs()


KINDS = ("normal", "products", "heavy", "ties", "mostly zero", "zero", "tiny", "huge")


def magnitude(blocks: Tensor, masks: Tensor) -> Tensor:
    return torch.where(masks, blocks, 0.0).sum((1, 2))


def by_programme(block: Tensor, n: int) -> float:
    """The largest sum, by scipy's solver."""
    m, most = len(block), float(block.max()) or 1.0
    sums = np.concatenate([np.kron(np.eye(m), np.ones(m)), np.kron(np.ones(m), np.eye(m))])
    gain = (block / most).flatten().numpy()
    solution = linprog(-gain, A_eq=sums, b_eq=np.full(2 * m, n), bounds=(0, 1), method="highs-ds")
    return -solution.fun * most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), RATIOS)
def test_both_sides_hold_the_pattern_and_no_mask_keeps_more(n, m, kind):
    blocks = weights(kind, 3 if m <= 16 else 1, m)
    masks = best_masks(blocks, n)
    assert (masks.sum(1) == n).all()
    assert (masks.sum(2) == n).all()
    best = torch.tensor([by_programme(block, n) for block in blocks], dtype=torch.float64)
    sums = magnitude(blocks, masks)
    torch.testing.assert_close(sums, best, rtol=1e-6, atol=0)  # the solver's tolerance
    assert (sums >= best * (1 - 1e-9)).all()


def test_the_way_there_changes_no_mask(monkeypatch):
    """However good the first masks are, and however many blocks are solved together."""
    blocks = weights("normal", 12, 8)
    masks = best_masks(blocks, 4)
    assert torch.equal(best_masks(blocks, 4), masks)
    assert torch.equal(torch.cat([best_masks(block[None], 4) for block in blocks]), masks)
    monkeypatch.setattr(transposable, "ELEMENTS", 1000)
    assert torch.equal(best_masks(blocks, 4), masks)
    monkeypatch.setattr(transposable, "STEPS", 0)
    assert torch.equal(best_masks(blocks, 4), masks)


@pytest.mark.parametrize("ratio", ["1:4", "2:4", "1:8", "2:8"])
def test_what_is_not_finite_is_kept(ratio):
    weight = weights("normal", 1, 8)[0].float()
    weight[2, 3], weight[5, 6] = torch.nan, torch.inf
    mask = transposable_mask(weight, ratio)
    assert mask[2, 3]
    assert mask[5, 6]
    n, m = map(int, ratio.split(":"))
    assert (mask.sum(0) == n * 8 // m).all()
    assert (mask.sum(1) == n * 8 // m).all()


@pytest.mark.parametrize("ratio", ["4:8", "16:32"])
def test_a_whole_matrix(ratio):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    sparse = weight * transposable_mask(weight, ratio)
    check_nm(sparse, ratio)
    check_nm(sparse.T, ratio)
