"""Products of any N:M matrix by AMX, whose instructions are written out in ``tiles.h``, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bf16_emulated import HAS_INSTRUCTION
from operands import normal, normal_bf16, sparse
from perceptrons import pruned
from torch import Tensor

import nmrun
from nmrun.fast.cpu.kernels import blocks
from nmrun.fast.cpu.kernels.blocks import BitmapMatrix
from nmrun.fast.cpu.packed_linear import BitmapLinear
from nmrun.fast.measurement import BF16_BITMAP
from nmrun.kernels import compiler

STAND_IN = f'-DTILES_BY="{Path(__file__).with_name("tiles.h")}"'


@pytest.fixture(autouse=True)
def tiles(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flags = (STAND_IN,) if HAS_INSTRUCTION else (STAND_IN, "-DEMULATED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    kernels = replace(blocks.KERNELS, flags=(*blocks.KERNELS.flags, *flags))
    if kernels.obstacle() or not hasattr(kernels.load(), "nm_bitmap_bf16"):
        pytest.skip("no AVX-512 with VBMI2 here")
    monkeypatch.setattr(blocks, "KERNELS", kernels)
    found = blocks.tiles_obstacle
    found.cache_clear()
    yield
    found.cache_clear()


def check(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of float32 in each step of the sum, and of bfloat16 at its end."""
    x, weight = x.double(), weight.double()
    expected = x @ weight.t() + (0 if bias is None else bias.double())
    size = x.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())
    steps = int((weight != 0).sum(1).max()) + 4
    off = (result.double() - expected).abs()
    assert bool((off <= 2**-8 * expected.abs() + 1.01 * steps * 2**-24 * size).all())


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:16", "3:7", "1:32", "1:1"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (16, 32), (17, 31), (40, 65), (96, 300), (64, 1024)]
)
def test_patterns_shapes_and_numbers_of_tokens(pattern: str, rows: int, columns: int) -> None:
    weight = sparse(rows, columns, pattern).bfloat16()
    bias, x = normal(rows, seed=1), normal_bf16(40, columns)
    matrix = BitmapMatrix.packed(weight)
    assert torch.equal(matrix.dense(), weight)
    matrix = BitmapMatrix.of([matrix.values, matrix.masks], rows, columns)
    whole = matrix.multiply(x, bias)
    check(whole, x, weight, bias)
    check(matrix.multiply(x), x, weight)
    for tokens in (0, 1, 15, 16, 17, 32, 33):
        assert torch.equal(matrix.multiply(x[:tokens], bias), whole[:tokens])
    assert torch.equal(matrix.multiply(x.t().contiguous().t(), bias), whole)


def test_what_is_stored() -> None:
    """By hand: the lowest bit is the first column, a tile of columns follows the other."""
    weight = torch.zeros(17, 40)
    weight[0, 0], weight[0, 31], weight[0, 33], weight[1, 2], weight[16, 39] = 1, 2, 3, 4, 5
    matrix = BitmapMatrix.packed(weight)
    assert matrix.values.tolist() == [1, 2, 4, 3, 5]
    assert matrix.start.tolist() == [0, 4, 5]
    assert matrix.masks[0, 0, :3].tolist() == [1 - 2**31, 4, 0]
    assert matrix.masks[:, 1, 0].tolist() == [2, 1 << 7]


@pytest.mark.parametrize(("threads", "tokens"), [(2, 70), (3, 5)])
def test_threads_share_tokens_or_rows(
    threads: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = BitmapMatrix.packed(sparse(130, 64, "2:4")), normal_bf16(tokens, 64)
    alone = matrix.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(matrix.multiply(x), alone)


def test_what_is_not_finite_stays_with_its_token() -> None:
    weight, x = sparse(40, 70, "2:4").bfloat16(), normal_bf16(33, 70)
    plain = BitmapMatrix.packed(weight).multiply(x)
    x[3, 5], x[32, 69] = torch.nan, torch.inf
    z = BitmapMatrix.packed(weight).multiply(x)
    assert z[3].isnan().all()
    assert not z[32][weight[:, 69] != 0].isfinite().any()
    others = [t for t in range(33) if t not in (3, 32)]
    assert torch.equal(z[others], plain[others])
    weight[5, 0] = torch.nan
    z = BitmapMatrix.packed(weight).multiply(x[others])
    assert z[:, 5].isnan().all()
    assert torch.equal(z[:, :5], plain[others][:, :5])


def test_the_layer_and_its_state() -> None:
    weight, bias, x = sparse(40, 70, "2:4"), normal(40, seed=1), normal(2, 3, 70)
    layer = BitmapLinear.of(weight, bias)
    check(layer(x).view(6, 40), x.bfloat16().view(6, 70), weight.bfloat16(), bias)
    other = BitmapLinear.of(sparse(40, 70, "1:4"), bias)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_tensors_that_hold_no_matrix_are_refused() -> None:
    matrix = BitmapMatrix.packed(sparse(40, 70, "2:4"))
    values, masks = matrix.values, matrix.masks
    for wrong, size in (
        ((values[:-1], masks), (40, 70)),
        ((values.float(), masks), (40, 70)),
        ((values, masks.long()), (40, 70)),
        ((values, masks[:-1]), (40, 70)),
        ((values, masks), (40, 129)),
    ):
        with pytest.raises(ValueError, match="masks"):
            BitmapMatrix.of(wrong, *size)


def test_without_amx_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "tiles_obstacle", lambda: "the system refuses AMX")
    with pytest.raises(RuntimeError, match="products of bitmaps: the system refuses AMX"):
        BitmapMatrix.packed(sparse(16, 32, "2:4")).multiply(normal_bf16(1, 32))


@pytest.mark.parametrize(("tokens", "path"), [(32, BF16_BITMAP), (33, "packed")])
def test_deploy_tries_them_for_few_tokens(
    tokens: int, path: str, deploy_times: dict[str, float]
) -> None:
    deploy_times.update({"packed": 0.5, BF16_BITMAP: 0.25})
    model, x = pruned("2:4").bfloat16(), normal_bf16(tokens, 80)
    exact = model.float()(x.float()).detach()
    choices = nmrun.deploy(model.bfloat16(), x)
    assert [choice.path for choice in choices] == [path] * 2
    z = model(x)
    assert float((z - exact).norm() / exact.norm()) < 0.005
