"""Products of bfloat16 with an N:M matrix, by the instruction and by its definition: every tail, any
N:M, against float64.
"""

from __future__ import annotations

import subprocess
from fractions import Fraction
from importlib import resources
from pathlib import Path

import operands
import pytest
import torch
from operands import cases, normal_bf16
from torch import Tensor

from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.kernels.bf16 import SEGMENT, SEGMENTS, TOKENS_A_PASS, Bf16Matrix
from nmrun.kernels import compiler

pytestmark = pytest.mark.usefixtures("every_bf16")
BLOCK = SEGMENT * SEGMENTS
PATTERNS = ("2:4", "1:4", "1:8", "1:16", "1:32", "4:16", "3:7", "2:5", "1:1")
SHAPES = ((1, 1), (5, 17), (16, 64), (33, 300), (40, BLOCK + 3), (20, 3 * BLOCK + 40), (1090, 33))
CASES = cases(PATTERNS, SHAPES, (33, 300))
TOKENS = (1, 2, 3, 4, 7, 8, TOKENS_A_PASS - 1, TOKENS_A_PASS, TOKENS_A_PASS + 1, 37)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of bfloat16, in float32."""
    return normal_bf16(*shape, seed=seed).float()


def sparse(rows: int, columns: int, pattern: str) -> Tensor:
    return operands.sparse(rows, columns, pattern).bfloat16().float()


def check(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of float32 in each step of the sum, and of bfloat16 at its end."""
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    steps = int((weight != 0).sum(1).max()) + 4
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.abs())
    off = (result.double() - expected).abs()
    last = 2**-8 if result.dtype == torch.bfloat16 else 2**-24
    assert bool((off <= last * expected.abs() + 1.01 * steps * 2**-24 * size).all())


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_every_pattern_shape_and_number_of_tokens(pattern: str, rows: int, columns: int) -> None:
    weight, bias, x = sparse(rows, columns, pattern), normal(rows, seed=1), normal(37, columns)
    matrix, low = Bf16Matrix.packed(weight), x.bfloat16()
    assert torch.equal(matrix.dense().float(), weight)
    whole = matrix.multiply(low, bias)
    check(whole, x, weight, bias)
    check(matrix.multiply(low), x, weight)
    for tokens in TOKENS:
        assert torch.equal(matrix.multiply(low[:tokens], bias), whole[:tokens])
    assert matrix.multiply(low[:0]).shape == (0, rows)


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_the_transpose(pattern: str, rows: int, columns: int) -> None:
    """Whose rows have any number of non-zeros."""
    weight, d = sparse(rows, columns, pattern), normal(19, rows, seed=2)
    matrix = Bf16Matrix.empty(columns, rows)
    assert matrix.pack(weight, turned=True) == int((weight != 0).sum())
    assert torch.equal(matrix.dense().float(), weight.t())
    check(matrix.multiply(d.bfloat16()), d, weight.t())


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_gradients_of_kept_weights(pattern: str, rows: int, columns: int) -> None:
    weight = sparse(rows, columns, pattern)
    for tokens in (1, 2, 7, 300):
        x, y = normal(tokens, columns, seed=3), normal(tokens, rows, seed=4)
        gradient = Bf16Matrix.packed(weight).sampled(x.bfloat16(), y.bfloat16())
        expected = (y.double().t() @ x.double()) * (weight != 0)
        size = (y.double().abs().t() @ x.double().abs()) * (weight != 0)
        assert bool(((gradient - expected).abs() <= 1.01 * (tokens + 2) * 2**-24 * size).all())


@pytest.mark.parametrize("pattern", ["2:4", "16:2:8", "4:1:16"])
def test_whole_columns_of_several_rows(pattern: str) -> None:
    weight, x = sparse(64, 520, pattern), normal(21, 520)
    check(Bf16Matrix.packed(weight).multiply(x.bfloat16()), x, weight)


def test_a_mixture_of_patterns_in_one_tile() -> None:
    patterns = ("1:16", "2:4", "3:7", "1:4")
    rows = [sparse(40, 384, pattern)[i * 10 : i * 10 + 10] for i, pattern in enumerate(patterns)]
    weight = torch.cat([*rows, normal(1, 384), torch.zeros(4, 384)])
    x = normal(21, 384)
    check(Bf16Matrix.packed(weight).multiply(x.bfloat16()), x, weight)


def test_the_weight_is_rounded_to_nearest_ties_to_even() -> None:
    weight = torch.randn(30, 70, generator=torch.Generator().manual_seed(0))
    weight[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 2**-140])
    assert torch.equal(Bf16Matrix.packed(weight).dense(), weight.bfloat16())


def test_threads_and_company_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, y = sparse(200, 600, "1:4"), normal(37, 600).bfloat16(), normal(37, 200).bfloat16()
    matrix = Bf16Matrix.packed(weight)
    whole, gradient = matrix.multiply(x), matrix.sampled(x, y)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    again = Bf16Matrix.packed(weight)
    assert torch.equal(again.values, matrix.values)
    assert torch.equal(again.index, matrix.index)
    for tokens in (1, 5, 37):
        assert torch.equal(matrix.multiply(x[:tokens]), whole[:tokens])
    assert torch.equal(matrix.sampled(x, y), gradient)


# --- what the instruction is defined to do ----------------------------------------------------------


def float32(exact: Fraction) -> Fraction:
    """Rounded to float32, ties to even; what is below the smallest normal number is zero."""
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** (exponent - 23)
    rounded = round(size / step) * step  # Python's round has ties to even
    return Fraction(0) if rounded < Fraction(2) ** -126 else rounded * (1 if exact > 0 else -1)


def defined(x: list[Fraction], w: list[Fraction]) -> Fraction:
    """Intel's definition, for one row: fused, the second of each pair first."""
    total = Fraction(0)
    for i in range(0, len(x), 2):
        total = float32(total + x[i + 1] * w[i + 1])
        total = float32(total + x[i] * w[i])
    return total


def test_the_definition_of_the_instruction() -> None:
    """Of numbers far apart, where the order and every rounding shows; subnormal ones are zero."""
    generator = torch.Generator().manual_seed(5)
    scale = 2.0 ** torch.randint(-12, 13, (40, 32), generator=generator)
    x = (normal(40, 32, seed=6) * scale).bfloat16()
    w = (normal(40, 32, seed=7) * scale.flip(1)).bfloat16()
    x[0], w[0] = 2.0**-70, 2.0**-56  # 32 products of 2^-126
    x[1], w[1] = 2.0**-70, 2.0**-57  # each below, so that no sum gets above zero
    x[2], w[2] = 2.0**-130, 2.0**100  # x is subnormal
    x[3, 0], x[3, 1], w[3] = 2.0**-62, -(2.0**-63), 2.0**-64  # a difference below
    x[3, 2:] = 0
    for row in range(40):
        result = Bf16Matrix.packed(w[row : row + 1]).multiply(x[row : row + 1])
        numbers = [
            [Fraction(float(v)) if abs(float(v)) >= 2**-126 else Fraction(0) for v in t[row]]
            for t in (x, w)
        ]
        columns = [i for i, v in enumerate(w[row].tolist()) if v]
        expected = defined(*([n[i] for i in columns] for n in numbers))
        assert float(result) == float(torch.tensor(float(expected)).bfloat16()), row


def test_the_true_instruction_is_what_is_compiled(tmp_path: Path) -> None:
    """Whatever this processor is: the compiler has it."""
    package = resources.files("nmrun.fast.cpu.kernels")
    sources = [
        package.joinpath(f"{n}.c").read_text() for n in ("nm_scratch", "nm_vectors", "nm_bf16")
    ]
    (tmp_path / "nm.c").write_text("".join(sources))
    flags = [
        "-O1",
        "-mavx512bf16",
        "-mavx512bw",
        "-mavx512vl",
        *bf16.KERNELS.flags,
        "-UEMULATED",
        "-S",
        "nm.c",
    ]
    cc = compiler.find_compiler()
    assert cc is not None
    subprocess.run([cc, *flags], check=True, cwd=tmp_path, timeout=120)
    assert "vdpbf16ps" in (tmp_path / "nm.s").read_text()


# --- what is stored ---------------------------------------------------------------------------------


def test_what_is_stored() -> None:
    """By hand: 17 rows are two tiles; a slot has two non-zeros of a row."""
    weight = torch.zeros(17, BLOCK + 8)
    weight[0, :3], weight[1, 20], weight[16, BLOCK + 7] = torch.tensor([1.0, 2.0, 3.0]), -2.0, 4.0
    matrix = Bf16Matrix.packed(weight)
    assert matrix.counts[0, 0].tolist() == [2, *[0] * 15]
    assert matrix.counts[1, 1].tolist() == [1, *[0] * 15]
    assert matrix.start.tolist() == [0, 2, 2, 2, 3]
    assert matrix.values[0, :4].tolist() == [1, 2, -2, 0]
    assert matrix.index[0, :4].tolist() == [0, 1, 20, 0]
    assert matrix.values[1, :4].tolist() == [3, 0, 0, 0]
    assert (float(matrix.values[2, 0]), int(matrix.index[2, 0])) == (4, 7)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:16"])
def test_the_bytes_are_three_a_non_zero(pattern: str) -> None:
    n, m = map(int, pattern.split(":"))
    matrix = Bf16Matrix.packed(sparse(64, 1024, pattern))
    assert matrix.values.nbytes + matrix.index.nbytes == 64 * 1024 * 3 * n // m


def test_tensors_that_hold_no_matrix_are_refused() -> None:
    matrix = Bf16Matrix.packed(sparse(40, 200, "2:4"))
    parts = (matrix.values, matrix.index, matrix.counts)
    outside, behind = matrix.index.clone(), matrix.counts.clone()
    outside[-1, 0] = 32
    behind[0, -1, 6:8] = behind[0, -1, 6:8].flip(0)  # slots of a segment that is not there
    for wrong, message in (
        ((parts[0][:-1], *parts[1:]), "where the counts say"),
        ((parts[0].float(), *parts[1:]), "not bfloat16"),
        ((parts[0], outside, parts[2]), "not of its segment"),
        ((*parts[:2], behind), "not of its segment"),
        ((*parts[:2], parts[2][:, :-1]), "are not those of 40 x 200"),
    ):
        with pytest.raises(ValueError, match=message):
            Bf16Matrix.of(wrong, 40, 200)
