"""Products with packed weights that stay, against float64 and brute force: all tails, any N:M."""

from __future__ import annotations

import pytest
import torch
from operands import cases, normal, sparse
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.tiles import FEW, TILE, TiledMatrix
from nmrun.kernels import compiler

pytestmark = pytest.mark.skipif(
    bool(products.KERNELS.obstacle()), reason="no C compiler works here"
)
PATTERNS = ("2:4", "1:4", "1:8", "1:16", "4:16", "3:7", "2:5", "1:32", "3:4", "1:1")
SHAPES = ((1, 1), (5, 17), (16, 128), (33, 300), (100, 129), (64, 1024))
CASES = cases(PATTERNS, SHAPES, (33, 300))


def tiled(weight: Tensor) -> TiledMatrix:
    return TiledMatrix.packed(weight)


def near(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the rounding of float32 sums, by the size of what is added up; then of the dtype."""
    exact = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, scale = exact + bias, scale + bias.abs()
    own = torch.finfo(result.dtype).eps * exact.abs()
    assert bool(((result.double() - exact).abs() <= 2**-20 * scale + own).all())


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_every_pattern_shape_and_number_of_tokens(pattern: str, rows: int, columns: int) -> None:
    weight, bias = sparse(rows, columns, pattern), normal(rows, seed=1)
    matrix, x = tiled(weight), normal(150, columns, seed=2)
    assert torch.equal(matrix.dense(), weight)
    for tokens in (1, 2, 3, 4, 5, FEW, FEW + 1, 64, 65, 150):
        near(matrix.multiply(x[:tokens], bias), x[:tokens], weight, bias)
    near(matrix.multiply(x), x, weight, None)
    assert matrix.multiply(x[:0]).shape == (0, rows)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "2:5"])
def test_a_token_has_the_same_bits_in_any_company(pattern: str) -> None:
    matrix, x = tiled(sparse(70, 260, pattern)), normal(150, 260)
    together = matrix.multiply(x)
    threads = torch.get_num_threads()
    try:
        for tokens in (1, 3, 4, FEW, FEW + 1, 70):
            torch.set_num_threads(1 + tokens % 3)
            assert torch.equal(matrix.multiply(x[:tokens]), together[:tokens])
    finally:
        torch.set_num_threads(threads)


def test_threads_share_the_rows_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = tiled(sparse(1000, 1024, "1:4")), normal(1, 1024)
    alone = matrix.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(matrix.multiply(x), alone)


def test_a_mixture_of_patterns_in_one_tile() -> None:
    dense = sparse(40, 384, "1:1")
    rows = [sparse(40, 384, pattern) for pattern in ("1:16", "2:4", "3:7", "1:4")]
    weight = torch.cat(
        [*(w[i * 10 : (i + 1) * 10] for i, w in enumerate(rows)), dense[:1], 0 * dense[:4]]
    )
    x = normal(66, 384)
    for tokens in (1, 7, 66):
        near(tiled(weight).multiply(x[:tokens]), x[:tokens], weight, None)


@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_and_values(values: torch.dtype, inputs: torch.dtype) -> None:
    weight = sparse(50, 200, "2:8").to(values)
    matrix, x, bias = tiled(weight), normal(70, 200).to(inputs), normal(50)
    assert matrix.values.dtype == values
    for tokens in (1, 6, 70):
        result = matrix.multiply(x[:tokens], bias)
        assert result.dtype == inputs
        near(result, x[:tokens], weight, bias)


def test_what_is_stored() -> None:
    """By hand: 17 rows are two tiles; a segment has as many slots as its fullest row needs."""
    weight = torch.zeros(17, 130)
    weight[0, 3], weight[0, 9], weight[1, 20], weight[16, 129] = 1.0, 2.0, 3.0, 4.0
    matrix = tiled(weight)
    assert matrix.counts.tolist() == [
        [[2, 1, 0, 0, 0, 0, 0, 0], [0] * 8],
        [[0] * 8, [1, 0, 0, 0, 0, 0, 0, 0]],
    ]
    assert matrix.start.tolist() == [0, 3, 3, 3, 4]
    assert matrix.values[:, 0].tolist() == [1.0, 2.0, 0.0, 4.0]
    assert matrix.index[:, 0].tolist() == [3, 9, 16, 1]
    assert matrix.values[2, 1] == 3.0
    assert matrix.index[2, 1] == 20


@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_the_bytes_are_n_of_m(pattern: str) -> None:
    n, m = map(int, pattern.split(":"))
    matrix = tiled(sparse(64, 1024, pattern))
    assert matrix.values.nbytes + matrix.index.nbytes == 64 * 1024 * 5 * n // m


def test_tensors_that_hold_no_matrix_are_refused() -> None:
    matrix = tiled(sparse(40, 200, "2:4"))
    parts = (matrix.values, matrix.index, matrix.counts)
    outside = matrix.index.clone()
    outside[-1, 0] = 255
    short = matrix.counts[:, :-1]
    for wrong, message in (
        ((parts[0][:-1], *parts[1:]), "where the counts say"),
        ((parts[0], outside, parts[2]), "not of its segment"),
        ((*parts[:2], short), "are not those of 40 x 200"),
    ):
        with pytest.raises(ValueError, match=message):
            TiledMatrix.of(wrong, 40, 200)
    assert matrix.values.shape[1] == TILE
