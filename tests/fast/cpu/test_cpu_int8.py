"""Products of int8 with an N:M matrix: the bits of the formula in torch, every tail, any N:M."""

from __future__ import annotations

import pytest
import torch
from operands import cases, normal, sparse
from torch import Tensor

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.kernels.int8 import TOKENS_A_PASS, Int8Matrix
from nmrun.kernels import compiler

pytestmark = pytest.mark.skipif(bool(int8.KERNELS.obstacle()), reason=int8.KERNELS.obstacle())
PATTERNS = ("2:4", "1:4", "1:8", "1:16", "1:32", "4:16", "3:7", "2:5", "1:1")
SHAPES = ((1, 1), (5, 17), (16, 64), (33, 300), (100, 129), (64, 2080))
CASES = cases(PATTERNS, SHAPES, (33, 300))
TINY = torch.finfo(torch.float32).tiny


def packed(weight: Tensor) -> Int8Matrix:
    return Int8Matrix.packed(weight)


def exactly(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in torch: whole numbers in float64, then float32 as documented."""
    scales = (weight.abs().amax(1) / 127).clamp_min(TINY)
    q = (weight / scales[:, None]).round()
    low, high = x.amin(1, True).clamp_max(0), x.amax(1, True).clamp_min(0)
    scale = (high / 255 - low / 255).clamp_min(TINY)
    zero = (-low * (1 / scale)).round().clamp_max(255)
    u = ((x * (1 / scale)).round() + zero).clamp(0, 255)
    y = ((u - zero).double() @ q.double().t()).float() * scale * scales
    return y if bias is None else y + bias


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_every_pattern_shape_and_number_of_tokens(pattern: str, rows: int, columns: int) -> None:
    weight, bias = sparse(rows, columns, pattern), normal(rows, seed=1)
    matrix, x = packed(weight), normal(70, columns, seed=2)
    step = weight.abs().amax(1, True) / 127
    assert bool(((matrix.dense() - weight).abs() <= 0.501 * step + TINY).all())
    for tokens in (1, 2, 3, 7, 8, TOKENS_A_PASS - 1, TOKENS_A_PASS, TOKENS_A_PASS + 1, 70):
        result = matrix.multiply(x[:tokens], bias)
        assert torch.equal(result, exactly(x[:tokens], weight, bias))
    assert torch.equal(matrix.multiply(x), exactly(x, weight))
    assert matrix.multiply(x[:0]).shape == (0, rows)


def test_rounding_is_that_of_eight_bits() -> None:
    """Normal operands: the error of a sum is about that of one rounding of weight and token."""
    weight, x = sparse(256, 768, "1:4"), normal(64, 768, seed=3)
    expected = x.double() @ weight.double().t()
    share = (packed(weight).multiply(x) - expected).norm() / expected.norm()
    assert 0.003 < float(share) < 0.015


def test_extreme_tokens() -> None:
    weight = sparse(20, 100, "2:4")
    rows = [torch.full((100,), v) for v in (0.0, 1.0, -1.0, 3e38, 1e-44, -1e-40)]
    wide = normal(100)
    wide[7], wide[93] = 3e38, -3e38
    x = torch.stack([*rows, wide, normal(100).abs(), -normal(100).abs()])
    result = packed(weight).multiply(x)
    assert torch.equal(result, exactly(x, weight))
    assert not result[0].any()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("columns", [17, 100])
def test_what_is_not_finite_is_refused(odd: float, columns: int) -> None:
    matrix = packed(sparse(20, columns, "2:4"))
    for tokens in (1, 19):
        for column in range(columns):
            x = normal(tokens, columns)
            x[-1, column] = odd
            with pytest.raises(RuntimeError, match=r"^int8 .* have NaN or infinity$"):
                matrix.multiply(x)
    weight = torch.tensor([[0.0, odd]])
    with pytest.raises(ValueError, match="the weight has NaN or infinity"):
        packed(weight)


def test_a_token_has_the_same_bits_in_any_company_and_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix, x = packed(sparse(1000, 300, "1:4")), normal(70, 300)
    together = matrix.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    for tokens in (1, 3, 17, 70):
        assert torch.equal(matrix.multiply(x[:tokens]), together[:tokens])
    x[-1, 5] = float("nan")
    with pytest.raises(RuntimeError, match="NaN"):
        matrix.multiply(x)


def test_whole_columns_of_sixteen_rows() -> None:
    weight, x = sparse(64, 2080, "16:2:8"), normal(21, 2080)
    assert torch.equal(packed(weight).multiply(x), exactly(x, weight))


def test_a_mixture_of_patterns_in_one_tile() -> None:
    patterns = ("1:16", "2:4", "3:7", "1:4")
    rows = [sparse(40, 384, pattern)[i * 10 : i * 10 + 10] for i, pattern in enumerate(patterns)]
    weight = torch.cat([*rows, normal(1, 384), torch.zeros(4, 384)])
    x = normal(21, 384)
    assert torch.equal(packed(weight).multiply(x), exactly(x, weight))


def test_what_is_stored() -> None:
    """By hand: 17 rows are two tiles; a slot has four non-zeros of a row."""
    weight = torch.zeros(17, 70)
    weight[0, :5], weight[1, 20], weight[16, 69] = torch.arange(1.0, 6.0), -2.0, 3.0
    matrix = packed(weight)
    assert matrix.counts.tolist() == [[2, 0], [0, 1]]
    assert matrix.start.tolist() == [0, 2, 3]
    assert matrix.values[0, :8].tolist() == [25, 51, 76, 102, -127, 0, 0, 0]
    assert matrix.values[1, :4].tolist() == [127, 0, 0, 0]
    assert matrix.index[0, :5].tolist() == [0, 1, 2, 3, 20]
    assert (int(matrix.values[2, 0]), int(matrix.index[2, 0])) == (127, 5)
    assert matrix.sums.tolist() == [381, -127, *[0] * 14, 127, *[0] * 15]


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:16"])
def test_the_bytes_are_two_a_non_zero(pattern: str) -> None:
    n, m = map(int, pattern.split(":"))
    matrix = packed(sparse(64, 1024, pattern))
    assert matrix.values.nbytes + matrix.index.nbytes == 64 * 1024 * 2 * n // m


def test_tensors_that_hold_no_matrix_are_refused() -> None:
    matrix = packed(sparse(40, 200, "2:4"))
    parts = (matrix.values, matrix.index, matrix.counts, matrix.scales)
    outside = matrix.index.clone()
    outside[-1, 0] = 64
    for wrong, message in (
        ((parts[0][:-1], *parts[1:]), "where the counts say"),
        ((parts[0], outside, *parts[2:]), "not of its segment"),
        ((*parts[:2], parts[2][:, :-1], parts[3]), "are not those of 40 x 200"),
        ((*parts[:3], parts[3][:-1]), "scales"),
    ):
        with pytest.raises(ValueError, match=message):
            Int8Matrix.of(wrong, 40, 200)


def test_rows_that_overflow_32_bits_are_refused() -> None:
    columns = 67_008
    slots = columns // 4
    values = torch.zeros(slots, 64, dtype=torch.int8)
    counts = torch.full((1, columns // 64), 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="32 bits add up"):
        Int8Matrix.of([values, values.to(torch.uint8), counts, torch.ones(1)], 1, columns)
