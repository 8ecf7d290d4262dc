"""Products with matrices in slots: in float32 and bfloat16 against float64, the latter by the
instruction and by its definition; in int8 the bits of the formula in torch. Every tail, any N:M.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path

import pytest
import torch
from bf16_emulated import HAS_INSTRUCTION
from operands import cases, normal, normal_bf16, sparse
from torch import Tensor

from nmrun.fast.cpu.kernels import bf16, int8, products
from nmrun.fast.cpu.kernels.bf16 import SEGMENT, SEGMENTS, Bf16Matrix
from nmrun.fast.cpu.kernels.int8 import Int8Matrix
from nmrun.fast.cpu.kernels.tiles import FEW, SlotMatrix, TiledMatrix
from nmrun.kernels import compiler

BLOCK = SEGMENT * SEGMENTS  # columns of bfloat16
PATTERNS = ("2:4", "1:4", "1:8", "1:16", "1:32", "4:16", "3:7", "2:5", "3:4", "1:1")
SHAPES = ((1, 1), (5, 17), (16, 64), (33, 300), (40, BLOCK + 3), (64, 2080), (1090, 33))
CASES = cases(PATTERNS, SHAPES, (33, 300))
TOKENS = (1, 2, 3, 4, 5, 7, FEW, FEW + 1, 15, 16, 17, 37, 64, 65)
TINY = torch.finfo(torch.float32).tiny


def in_float32(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of float32 sums, by the size of what is added up; then of the dtype."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias)
    scale = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.abs())
    own = torch.finfo(result.dtype).eps * exact.abs()
    assert bool(((result.double() - exact).abs() <= 2**-20 * scale + own).all())


def in_bf16(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of float32 in each step of the sum, and of bfloat16 at its end."""
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    steps = int((weight != 0).sum(1).max()) + 4
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.abs())
    off = (result.double() - expected).abs()
    assert bool((off <= 2**-8 * expected.abs() + 1.01 * steps * 2**-24 * size).all())


def in_int8(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The bits of the product in torch: whole numbers in float64, then float32 as documented."""
    scales = (weight.abs().amax(1) / 127).clamp_min(TINY)
    q = (weight / scales[:, None]).round()
    low, high = x.amin(1, True).clamp_max(0), x.amax(1, True).clamp_min(0)
    scale = (high / 255 - low / 255).clamp_min(TINY)
    zero = (-low * (1 / scale)).round().clamp_max(255)
    u = ((x * (1 / scale)).round() + zero).clamp(0, 255)
    y = ((u - zero).double() @ q.double().t()).float() * scale * scales
    assert torch.equal(result, y if bias is None else y + bias)


@dataclass(frozen=True)
class Layout:
    """A matrix, the dtype of its operands, what its results have to be, and the bytes of a non-zero."""

    matrix: type[SlotMatrix]
    dtype: torch.dtype
    check: Callable[..., None]
    bytes: int

    def numbers(self, *shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, seed=seed).to(self.dtype)

    def sparse(self, rows: int, columns: int, pattern: str) -> Tensor:
        return sparse(rows, columns, pattern).to(self.dtype).float()


LAYOUTS = {
    "tiles": Layout(TiledMatrix, torch.float32, in_float32, 5),
    "bf16": Layout(Bf16Matrix, torch.bfloat16, in_bf16, 3),
    "int8": Layout(Int8Matrix, torch.float32, in_int8, 2),
}
WAYS = ["tiles", "bf16", "int8", *(["bf16 by the instruction"] if HAS_INSTRUCTION else [])]


@pytest.fixture(params=WAYS)
def layout(request: pytest.FixtureRequest) -> Layout:
    kind, _, instruction = request.param.partition(" ")
    if kind == "bf16" and not instruction:
        request.getfixturevalue("emulated_bf16")
    why = {"tiles": products, "bf16": bf16, "int8": int8}[kind].KERNELS.obstacle()
    return pytest.skip(why) if why else LAYOUTS[kind]


@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_every_pattern_shape_and_number_of_tokens(
    pattern: str, rows: int, columns: int, layout: Layout
) -> None:
    """A token has the same bits in any company."""
    weight, bias = layout.sparse(rows, columns, pattern), normal(rows, seed=1)
    packed, x = layout.matrix.packed(weight), layout.numbers(70, columns, seed=2)
    matrix = layout.matrix.of([getattr(packed, name) for name in packed.STORED], *packed.shape)
    assert all(map(torch.equal, matrix.parts, packed.parts))
    step = weight.abs().amax(1, True) / 127 if layout.matrix is Int8Matrix else torch.zeros(1)
    assert bool(((matrix.dense() - weight).abs() <= 0.501 * step).all())
    whole = matrix.multiply(x, bias)
    layout.check(whole, x, weight, bias)
    layout.check(matrix.multiply(x), x, weight)
    for tokens in TOKENS:
        assert torch.equal(matrix.multiply(x[:tokens], bias), whole[:tokens])
    assert matrix.multiply(x[:0]).shape == (0, rows)


def test_threads_change_no_bit(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = layout.sparse(1000, 600, "1:4"), layout.numbers(70, 600)
    matrix = layout.matrix.packed(weight)
    whole = matrix.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert all(map(torch.equal, layout.matrix.packed(weight).parts, matrix.parts))
    for tokens in (1, 5, FEW + 1, 70):
        assert torch.equal(matrix.multiply(x[:tokens]), whole[:tokens])


def test_a_mixture_of_patterns_in_one_tile_and_whole_columns_of_its_rows(layout: Layout) -> None:
    patterns = ("1:16", "2:4", "3:7", "1:4")
    rows = [layout.sparse(40, 384, p)[i * 10 : i * 10 + 10] for i, p in enumerate(patterns)]
    mixed = torch.cat([*rows, layout.numbers(1, 384).float(), torch.zeros(4, 384)])
    for weight in (mixed, layout.sparse(64, 2080, "16:2:8")):
        x = layout.numbers(66, weight.shape[1])
        for tokens in (1, 7, 66):
            result = layout.matrix.packed(weight).multiply(x[:tokens])
            layout.check(result, x[:tokens], weight)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:16"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_bytes_are_those_of_the_non_zeros(
    kind: str, pattern: str, request: pytest.FixtureRequest
) -> None:
    if kind == "bf16":
        request.getfixturevalue("emulated_bf16")
    (n, m), layout = map(int, pattern.split(":")), LAYOUTS[kind]
    matrix = layout.matrix.packed(layout.sparse(64, 1024, pattern))
    assert matrix.values.nbytes + matrix.index.nbytes == 64 * 1024 * layout.bytes * n // m


def test_tensors_that_hold_no_matrix_are_refused(layout: Layout) -> None:
    matrix = layout.matrix.packed(layout.sparse(40, 200, "2:4"))
    values, index, counts, *scales = (getattr(matrix, name) for name in matrix.STORED)
    outside, behind = index.clone(), counts.clone()
    outside[-1, 0] = 255
    behind[..., -1, 6:8] = behind[..., -1, 6:8].flip(-1)  # slots of a segment that is not there
    wrongs = [
        ((values[:-1], index, counts, *scales), "where the counts say"),
        ((values, outside, counts, *scales), "not of its segment"),
        ((values, index, counts[..., :-1], *scales), "are not those of 40 x 200"),
    ]
    if layout.matrix is Bf16Matrix:
        wrongs += [((values.float(), index, counts), "not bfloat16")]
        wrongs += [((values, index, behind), "not of its segment")]
    if scales:
        wrongs += [((values, index, counts, scales[0][:-1]), "scales")]
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=message):
            layout.matrix.of(wrong, 40, 200)


def stored(matrix: SlotMatrix, *slots: int) -> list[list[float]]:
    """Values and columns of the first row of a tile in some slots."""
    deep = matrix.SEGMENT // 16
    return [[*matrix.values[s, :deep].tolist(), *matrix.index[s, :deep].tolist()] for s in slots]


def test_what_is_stored(layout: Layout) -> None:
    """By hand: 17 rows are two tiles; a segment has as many slots as its fullest row needs."""
    weight = torch.zeros(17, 130)
    weight[0, :3], weight[1, 20], weight[16, 129] = torch.tensor([1.0, 2.0, 3.0]), -2.0, 4.0
    matrix = layout.matrix.packed(weight)
    if layout.matrix is TiledMatrix:
        assert matrix.counts[0].tolist() == [[3, 1, *[0] * 6], [0] * 8]
        assert matrix.counts[1].tolist() == [[0] * 8, [1, *[0] * 7]]
        assert matrix.start.tolist() == [0, 4, 4, 4, 5]
        assert stored(matrix, *range(5)) == [[1, 0], [2, 1], [3, 2], [0, 16], [4, 1]]
        assert (matrix.values[3, 1], matrix.index[3, 1]) == (-2, 20)
    elif layout.matrix is Bf16Matrix:
        assert matrix.counts.tolist() == [[[2, *[0] * 15], [*[0] * 4, 1, *[0] * 11]]]
        assert matrix.start.tolist() == [0, 2, 3]
        assert stored(matrix, 0, 1, 2) == [[1, 2, 0, 1], [3, 0, 2, 0], [4, 0, 1, 0]]
        assert (matrix.values[0, 2], matrix.index[0, 2]) == (-2, 20)
    else:
        assert matrix.counts.tolist() == [[1, 0, 0], [0, 0, 1]]
        assert matrix.start.tolist() == [0, 1, 2]
        assert stored(matrix, 0, 1) == [[42, 85, 127, 0, 0, 1, 2, 0], [127, 0, 0, 0, 1, 0, 0, 0]]
        assert matrix.values[0, 4:8].tolist() == [-127, 0, 0, 0]
        assert matrix.sums.tolist() == [254, -127, *[0] * 14, 127, *[0] * 15]


@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_tiles_take_bfloat16_inputs_and_values(values: torch.dtype, inputs: torch.dtype) -> None:
    weight = sparse(50, 200, "2:8").to(values)
    matrix, x, bias = TiledMatrix.packed(weight), normal(70, 200).to(inputs), normal(50)
    assert matrix.values.dtype == values
    for tokens in (1, 6, 70):
        result = matrix.multiply(x[:tokens], bias)
        assert result.dtype == inputs
        in_float32(result, x[:tokens], weight, bias)


# --- in bfloat16 ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_bf16")
@pytest.mark.parametrize(("pattern", "rows", "columns"), CASES)
def test_transposes_and_gradients_of_kept_weights(pattern: str, rows: int, columns: int) -> None:
    """The rows of a transpose have any number of non-zeros."""
    weight, d = LAYOUTS["bf16"].sparse(rows, columns, pattern), normal_bf16(19, rows, seed=2)
    matrix = Bf16Matrix.empty(columns, rows)
    assert matrix.pack(weight, turned=True) == int((weight != 0).sum())
    assert torch.equal(matrix.dense().float(), weight.t())
    in_bf16(matrix.multiply(d), d, weight.t())
    for tokens in (1, 2, 7, 300):
        x, y = normal_bf16(tokens, columns, seed=3), normal_bf16(tokens, rows, seed=4)
        gradient = Bf16Matrix.packed(weight).sampled(x, y)
        expected = (y.double().t() @ x.double()) * (weight != 0)
        size = (y.double().abs().t() @ x.double().abs()) * (weight != 0)
        assert bool(((gradient - expected).abs() <= 1.01 * (tokens + 2) * 2**-24 * size).all())


@pytest.mark.usefixtures("every_bf16")
def test_threads_change_no_bit_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, y = sparse(200, 600, "1:4"), normal_bf16(37, 600), normal_bf16(37, 200)
    matrix = Bf16Matrix.packed(weight)
    gradient = matrix.sampled(x, y)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(matrix.sampled(x, y), gradient)


@pytest.mark.usefixtures("every_bf16")
def test_the_weight_is_rounded_to_nearest_ties_to_even() -> None:
    weight = normal(30, 70)
    weight[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 2**-140])
    assert torch.equal(Bf16Matrix.packed(weight).dense(), weight.bfloat16())


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


@pytest.mark.usefixtures("every_bf16")
def test_the_definition_of_the_instruction() -> None:
    """Of numbers far apart, where the order and every rounding shows; subnormal ones are zero."""
    generator = torch.Generator().manual_seed(5)
    scale = 2.0 ** torch.randint(-12, 13, (40, 32), generator=generator)
    x = (normal_bf16(40, 32, seed=6) * scale).bfloat16()
    w = (normal_bf16(40, 32, seed=7) * scale.flip(1)).bfloat16()
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
    package, names = resources.files("nmrun.fast.cpu.kernels"), bf16.KERNELS.sources[:3]
    assert names[-1] == "nm_bf16"
    (tmp_path / "nm.c").write_text("".join(package.joinpath(f"{n}.c").read_text() for n in names))
    cc, target = compiler.find_compiler(), ("-mavx512bf16", "-mavx512bw", "-mavx512vl")
    assert cc is not None
    command = [cc, "-O1", *target, *bf16.KERNELS.flags, "-UEMULATED", "-S", "nm.c"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    assert "vdpbf16ps" in (tmp_path / "nm.s").read_text()


# --- in int8 ----------------------------------------------------------------------------------------

needs_int8 = pytest.mark.skipif(bool(int8.KERNELS.obstacle()), reason=int8.KERNELS.obstacle())


@needs_int8
def test_rounding_is_that_of_eight_bits() -> None:
    """Normal operands: the error of a sum is about that of one rounding of weight and token."""
    weight, x = sparse(256, 768, "1:4"), normal(64, 768, seed=3)
    expected = x.double() @ weight.double().t()
    share = (Int8Matrix.packed(weight).multiply(x) - expected).norm() / expected.norm()
    assert 0.003 < float(share) < 0.015


@needs_int8
def test_extreme_tokens() -> None:
    weight = sparse(20, 100, "2:4")
    rows = [torch.full((100,), v) for v in (0.0, 1.0, -1.0, 3e38, 1e-44, -1e-40)]
    wide = normal(100)
    wide[7], wide[93] = 3e38, -3e38
    x = torch.stack([*rows, wide, normal(100).abs(), -normal(100).abs()])
    result = Int8Matrix.packed(weight).multiply(x)
    in_int8(result, x, weight)
    assert not result[0].any()


@needs_int8
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("columns", [17, 100])
def test_what_is_not_finite_is_refused(
    odd: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = Int8Matrix.packed(sparse(20, columns, "2:4"))
    for threads, tokens in ((1, 1), (1, 19), (3, 19)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for column in range(columns):
            x = normal(tokens, columns)
            x[-1, column] = odd
            with pytest.raises(RuntimeError, match=r"^int8 .* have NaN or infinity$"):
                matrix.multiply(x)
    with pytest.raises(ValueError, match="the weight has NaN or infinity"):
        Int8Matrix.packed(torch.tensor([[0.0, odd]]))


def test_rows_that_overflow_32_bits_are_refused() -> None:
    columns = 67_008
    values = torch.zeros(columns // 4, 64, dtype=torch.int8)
    counts = torch.full((1, columns // 64), 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="32 bits add up"):
        Int8Matrix.of([values, values.to(torch.uint8), counts, torch.ones(1)], 1, columns)
