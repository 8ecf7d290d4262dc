"""Sums over kept and pruned entries by the compiled kernel, against exactly rounded ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nmrun.kernels import compiler, cpu

pytestmark = pytest.mark.skipif(bool(cpu.SPLIT.obstacle()), reason="no C compiler here")


def exact(values: Tensor, mask: Tensor, squares: bool) -> list[float]:
    numbers = values.double() ** (2 if squares else 1)
    return [math.fsum(numbers[mask].tolist()), math.fsum(numbers[~mask].tolist())]


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("shape", [(1 << 16,), (257, 263), (64, 40, 5, 7)])
def test_against_exact_sums(shape, squares):
    values, mask = torch.randn(shape), torch.rand(shape) < 0.3
    sums = cpu.split(values, mask, squares)
    assert sums is not None
    assert sums.tolist() == pytest.approx(exact(values, mask, squares), rel=1e-5, abs=1e-3)
    if values.dim() == 4:
        last = [t.contiguous(memory_format=torch.channels_last) for t in (values, mask)]
        sums = cpu.split(*last, squares)
        assert sums is not None
        assert sums.tolist() == pytest.approx(exact(values, mask, squares), rel=1e-5, abs=1e-3)
        assert cpu.split(last[0], mask, squares) is None


def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(compiler, "CHUNK", 1)
    values, mask, sums = torch.randn(300, 301), torch.rand(300, 301) < 0.5, []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        sums.append(cpu.split(values, mask, True))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_a_number_that_is_none_stays_on_its_side():
    values, mask = torch.ones(300, 300), torch.zeros(300, 300, dtype=torch.bool)
    values[7, 7], mask[7, 7] = float("nan"), True
    kept_sum, pruned_sum = cpu.split(values, mask, True).tolist()
    assert math.isnan(kept_sum)
    assert pruned_sum == 300 * 300 - 1


def test_what_it_is_not_for():
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert cpu.split(torch.ones(300, 300).bfloat16(), mask, True) is None
    assert cpu.split(torch.ones(300, 300).t()[:200], mask[:200], True) is None
    assert cpu.split(torch.ones(30, 30), mask[:30, :30].contiguous(), True) is None
