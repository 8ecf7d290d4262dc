"""Products with a V:N:M matrix against float64: by the vector instruction, by its definition, and by
AMX, whose instructions are written out in ``tiles.h``. By AMX alone also those of any N:M, as bitmaps.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from bf16_emulated import HAS_INSTRUCTION
from operands import normal, normal_bf16, sparse
from perceptrons import pruned
from test_slots import in_bf16 as check

import nmrun
from nmrun.fast.cpu.kernels import blocks, int8
from nmrun.fast.cpu.kernels.blocks import BitmapMatrix, BlockMatrix, BlockTranspose
from nmrun.fast.cpu.kernels.matrix import Matrix
from nmrun.fast.cpu.packed_linear import BitmapLinear, Int8BlockLinear, Int8Linear
from nmrun.fast.measurement import BF16_BITMAP
from nmrun.kernels import compiler

STAND_IN = f'-DTILES_BY="{Path(__file__).with_name("tiles.h")}"'
WAYS = {"vectors": (), "emulated": ("-DEMULATED",), "tiles": (STAND_IN,)}


@pytest.fixture(params=WAYS, autouse=True)
def way(
    request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    flags = WAYS[request.param]
    if not HAS_INSTRUCTION:
        if request.param == "vectors":
            pytest.skip("this processor has no bfloat16 products")
        flags = tuple(dict.fromkeys((*flags, "-DEMULATED")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    kernels = replace(blocks.KERNELS, flags=(*blocks.KERNELS.flags, *flags))
    if kernels.obstacle():
        pytest.skip("no AVX-512 here")
    monkeypatch.setattr(blocks, "KERNELS", kernels)
    in_bytes = replace(int8.KERNELS, flags=(*int8.KERNELS.flags, *flags))
    monkeypatch.setattr(int8, "KERNELS", in_bytes)
    found = blocks.tiles_obstacle
    found.cache_clear()
    yield request.param
    found.cache_clear()


@pytest.fixture
def packed(request: pytest.FixtureRequest, way: str) -> Callable[..., Matrix]:
    """What packs a weight in groups of so many rows; the pattern of bitmaps is any."""
    if request.param == "blocks":
        return lambda weight, height: BlockMatrix.packed(weight, height=height)
    request.getfixturevalue("bitmaps")
    return lambda weight, height: BitmapMatrix.packed(weight)


@pytest.fixture
def bitmaps(way: str) -> None:
    """Products of bitmaps, which are by AMX."""
    if not hasattr(blocks.KERNELS.load(), "nm_bitmap_bf16"):
        pytest.skip("this processor has no VBMI2")


each_kind = pytest.mark.parametrize(
    ("way", "packed"), [*((way, "blocks") for way in WAYS), ("tiles", "bitmaps")], indirect=True
)


def by_ways(*ways: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways, indirect=True)


@each_kind
@pytest.mark.parametrize(
    ("pattern", "rows", "columns", "height"),
    [
        ("64:4:16", 128, 100, 64),
        ("16:4:8", 48, 64, 16),
        ("32:2:8", 96, 300, 32),
        ("48:4:32", 96, 70, 48),  # three tiles of rows
        ("64:1:9", 64, 33, 64),
        ("2:4", 40, 37, 32),  # nothing is shared, and the last group is short
        ("1:4", 16, 32, 16),
        ("3:7", 17, 31, 16),
        ("1:16", 96, 300, 16),
        ("1:32", 64, 1024, 16),
        ("1:1", 1, 1, 16),
    ],
)
def test_patterns_shapes_and_numbers_of_tokens(
    pattern: str, rows: int, columns: int, height: int, packed: Callable[..., Matrix]
) -> None:
    weight = sparse(rows, columns, pattern).bfloat16()
    bias, x = normal(rows, seed=1), normal_bf16(70, columns)
    matrix = packed(weight, height)
    assert torch.equal(matrix.dense(), weight)
    again = matrix.of([getattr(matrix, name) for name in matrix.STORED], rows, columns)
    whole = again.multiply(x, bias)
    check(whole, x, weight, bias)
    check(matrix.multiply(x), x, weight)
    for tokens in (1, 2, 15, 16, 17, 31, 32, 33):
        assert torch.equal(matrix.multiply(x[:tokens], bias), whole[:tokens])
    assert torch.equal(matrix.multiply(x.t().contiguous().t(), bias), whole)
    assert matrix.multiply(x[:0]).shape == (0, rows)


@pytest.mark.parametrize(
    ("pattern", "rows", "columns", "height"),
    [("64:4:16", 128, 100, 64), ("16:4:8", 48, 64, 16), ("48:2:9", 96, 70, 48), ("2:4", 64, 37, 32)],
)  # fmt: skip
def test_the_transpose_is_scattered(
    pattern: str, rows: int, columns: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, dz = sparse(rows, columns, pattern), normal_bf16(70, rows)
    forward = BlockMatrix.empty(rows, columns, height)
    backward = BlockTranspose.empty(columns, rows, height)
    for other in (weight + 1, weight):  # what was packed before is gone
        forward.pack_both(other, None, backward)
    assert torch.equal(forward.dense(), weight.bfloat16())
    assert torch.equal(forward.counts, BlockMatrix.packed(weight, height=height).counts)
    whole = backward.multiply(dz)
    check(whole, dz, weight.bfloat16().t())
    for tokens in (1, 32, 33):
        assert torch.equal(backward.multiply(dz[:tokens]), whole[:tokens])
    assert backward.multiply(dz[:0]).shape == (0, columns)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(backward.multiply(dz), whole)
    dz[3, 5] = torch.inf
    z = backward.multiply(dz)
    kept = weight.bfloat16()[5] != 0
    assert not z[3, kept].isfinite().any()
    others = [t for t in range(70) if t != 3]
    assert torch.equal(z[others], whole[others])


@pytest.mark.parametrize(
    ("pattern", "rows", "columns", "height"),
    [("64:4:16", 128, 100, 64), ("16:2:8", 48, 64, 16), ("48:4:9", 96, 70, 48)],
)
@pytest.mark.parametrize("tokens", [0, 1, 32, 75])
def test_gradients_in_the_columns_that_are_kept(
    pattern: str, rows: int, columns: int, height: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = sparse(rows, columns, pattern)
    x, y = normal_bf16(tokens, columns, seed=3), normal_bf16(tokens, rows, seed=4)
    matrix = BlockMatrix.packed(weight, height=height)
    gradient = matrix.sampled(x, y)
    kept = torch.zeros(rows, columns)
    for top in range(0, rows, height):
        kept[top : top + height] = (weight[top : top + height] != 0).any(0)
    expected = (y.double().t() @ x.double()) * kept
    size = (y.double().abs().t() @ x.double().abs()) * kept
    assert bool(((gradient - expected).abs() <= 1.01 * (tokens + 2) * 2**-24 * size).all())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(matrix.sampled(x, y), gradient)


def test_groups_keep_any_number_of_columns() -> None:
    """None among them: what is gathered for the next group meanwhile is gathered all the same."""
    keep = torch.zeros(5, 100, dtype=torch.bool)
    for group, count in enumerate((33, 0, 100, 1, 64)):
        keep[group, torch.randperm(100)[:count]] = True
    weight = normal(5 * 16, 100) * keep.repeat_interleave(16, 0)
    x, dz, bias = normal_bf16(33, 100), normal_bf16(33, 80, seed=1), normal(80, seed=2)
    forward, backward = BlockMatrix.empty(80, 100, 16), BlockTranspose.empty(100, 80, 16)
    assert forward.pack_both(weight, None, backward) == 16 * int(keep.sum())
    check(forward.multiply(x, bias), x, weight.bfloat16(), bias)
    check(backward.multiply(dz), dz, weight.bfloat16().t())
    assert torch.equal(forward.sampled(x, dz) != 0, keep.repeat_interleave(16, 0))


# fused operations, by which the instruction is emulated, keep them
@by_ways(*(["vectors"] if HAS_INSTRUCTION else []), "tiles")
def test_subnormal_numbers_and_sums_are_zero() -> None:
    weight, x = sparse(64, 64, "64:4:16").bfloat16(), normal_bf16(20, 64)
    for small in (2.0**-70, 2.0**-130):
        matrix = BlockMatrix.packed(weight * 2.0**-60, height=64)
        assert not matrix.multiply((x.float() * small).bfloat16()).any()


@by_ways("vectors")
def test_where_the_system_refuses_amx_vectors_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by tiles are built in, whatever the processor has: it is the system that is asked."""
    flags = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
    kernels = replace(blocks.KERNELS, flags=(*blocks.KERNELS.flags, *flags))
    if kernels.obstacle():
        pytest.skip("the compiler does not know AMX")
    monkeypatch.setattr(blocks, "KERNELS", kernels)
    if not blocks.tiles_obstacle():
        pytest.skip("this system allows AMX")
    assert blocks.tiles_obstacle() == "the system refuses AMX"
    weight, x = sparse(64, 64, "64:4:16").bfloat16(), normal_bf16(20, 64)
    check(BlockMatrix.packed(weight, height=64).multiply(x), x, weight)


def test_a_weight_that_is_not_finite_shows() -> None:
    weight, x = sparse(64, 64, "64:4:16"), normal_bf16(5, 64)
    weight[7, 0] = torch.nan  # kept beside the four columns of the block, as the masks do it
    forward, backward = BlockMatrix.empty(64, 64, 64), BlockTranspose.empty(64, 64, 64)
    forward.pack_both(weight, None, backward)
    z = forward.multiply(x)
    assert z[:, 7].isnan().all()
    assert z[:, :7].isfinite().all()
    assert backward.multiply(x)[:, 0].isnan().all()


@pytest.mark.parametrize(
    ("pattern", "rows", "columns"),
    [("64:4:16", 128, 100), ("16:4:8", 48, 64), ("32:2:8", 96, 301), ("48:4:32", 48, 270), ("8:4:16", 40, 32)],
)  # fmt: skip
def test_int8_has_the_bits_of_products_without_blocks(
    pattern: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if int8.KERNELS.obstacle():
        pytest.skip(int8.KERNELS.obstacle())
    weight, bias, x = sparse(rows, columns, pattern), normal(rows, seed=1), normal(70, columns)
    x[5] *= 1e3
    for b in (bias, None):
        plain, layer = Int8Linear.of(weight, b), Int8BlockLinear.of(weight, b)
        assert torch.equal(layer.dense(), plain.dense())
        whole = plain(x)
        for tokens in (0, 1, 31, 32, 33, 70):
            assert torch.equal(layer(x[:tokens]), whole[:tokens])
    assert torch.equal(layer(x.view(2, 5, 7, columns)), whole.view(2, 5, 7, rows))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(layer(x), whole)
    assert torch.equal(layer(x[:2]), whole[:2])
    x[40, 3] = torch.nan
    with pytest.raises(
        RuntimeError, match=r"^int8 products: the activations have NaN or infinity$"
    ):
        layer(x)
    with pytest.raises(ValueError, match=r"scales"):
        layer.MATRIX.of([layer.values, layer.index, layer.scales[1:]], rows, columns)


@by_ways("tiles")
@pytest.mark.parametrize("kernels", [blocks.KERNELS, int8.KERNELS], ids=lambda k: k.sources[-1])
def test_compilers_that_know_amx_take_its_instructions(
    kernels: compiler.CFunctions, tmp_path: Path
) -> None:
    """Those of the stand-in are functions; a compiler's may be statements."""
    compiler_path = compiler.find_compiler()
    built, source = tmp_path / "nm.so", tmp_path / "nm.c"
    place = resources.files("nmrun.fast.cpu.kernels")
    texts = [place.joinpath(f"{name}.c").read_text() for name in kernels.sources]
    command = [compiler_path, "-march=sapphirerapids", "-shared", "-fPIC", "-O1", *kernels.flags]
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;")
    if subprocess.run([*command, empty, "-o", built], capture_output=True).returncode:
        pytest.skip("the compiler does not know AMX")
    source.write_text("".join(texts))
    done = subprocess.run([*command, source, "-o", built], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_which_way_it_is(way: str) -> None:
    why = blocks.tiles_obstacle()
    assert why == "" if way == "tiles" else "AMX" in why or not why


@each_kind
@pytest.mark.parametrize(("threads", "tokens"), [(2, 70), (3, 5)])
def test_threads_share_tokens_or_rows(
    threads: int, tokens: int, packed: Callable[..., Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = packed(sparse(128, 64, "32:4:8"), 32), normal_bf16(tokens, 64)
    alone = matrix.multiply(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    assert torch.equal(matrix.multiply(x), alone)


@each_kind
def test_what_is_not_finite_stays_with_its_token(packed: Callable[..., Matrix]) -> None:
    weight, x = sparse(64, 64, "64:4:16").bfloat16(), normal_bf16(33, 64)
    plain = (matrix := packed(weight, 64)).multiply(x)
    column = int(weight[0].nonzero()[0])
    x[3, column], x[32, column] = torch.nan, torch.inf
    z = matrix.multiply(x)
    assert z[3].isnan().all()
    assert not z[32].isfinite().any()
    others = [t for t in range(33) if t not in (3, 32)]
    assert torch.equal(z[others], plain[others])
    weight[5, column] = torch.nan
    z = packed(weight, 64).multiply(x[others])
    assert z[:, 5].isnan().all()
    assert torch.equal(z[:, :5], plain[others][:, :5])


def test_tensors_that_hold_no_matrix_are_refused() -> None:
    weight = sparse(64, 64, "64:4:16")
    matrix = BlockMatrix.packed(weight, height=64)
    values, index = matrix.values, matrix.index
    for wrong in ((values[:0], index), (values.float(), index), (values, index.long()),
                  (values, index + 1), (values, index - 1), (values, index[:, :16])):  # fmt: skip
        with pytest.raises(ValueError, match=r"index|column|tiles"):
            BlockMatrix.of(wrong, 64, 64)
    with pytest.raises(ValueError, match="index"):
        BlockMatrix.of((values, index), 65, 64)
    bitmap = BitmapMatrix.packed(weight)
    values, masks = bitmap.values, bitmap.masks
    for wrong in ((values[:-1], masks), (values.float(), masks), (values, masks.long()),
                  (values, masks[:-1])):  # fmt: skip
        with pytest.raises(ValueError, match="masks"):
            BitmapMatrix.of(wrong, 64, 64)
    with pytest.raises(ValueError, match="masks"):
        BitmapMatrix.of((values, masks), 64, 129)


@pytest.mark.parametrize(
    ("pattern", "height"),
    [("64:4:16", 64), ("128:4:16", 64), ("32:4:16", 32), ("16:4:8", 16), ("2:4", None), ("8:4:16", 16)],
)  # fmt: skip
def test_the_height_of_groups_is_found(pattern: str, height: int | None) -> None:
    weight = sparse(128, 160, pattern)
    assert blocks.height_of(weight != 0) == height
    weight[3, 7] = 1.0  # a weight that is off makes one group wider, and no number wrong
    if height:
        assert torch.equal(BlockMatrix.packed(weight, height=height).dense(), weight.bfloat16())


# --- bitmaps --------------------------------------------------------------------------------------


def test_what_is_stored_of_bitmaps() -> None:
    """By hand: the lowest bit is the first column, a tile of columns follows the other."""
    weight = torch.zeros(17, 40)
    weight[0, 0], weight[0, 31], weight[0, 33], weight[1, 2], weight[16, 39] = 1, 2, 3, 4, 5
    matrix = BitmapMatrix.packed(weight)
    assert matrix.values.tolist() == [1, 2, 4, 3, 5]
    assert matrix.start.tolist() == [0, 4, 5]
    assert matrix.masks[0, 0, :3].tolist() == [1 - 2**31, 4, 0]
    assert matrix.masks[:, 1, 0].tolist() == [2, 1 << 7]


@by_ways("tiles")
@pytest.mark.usefixtures("bitmaps")
def test_the_layer_of_bitmaps_and_its_state() -> None:
    weight, bias, x = sparse(40, 70, "2:4"), normal(40, seed=1), normal(2, 3, 70)
    layer = BitmapLinear.of(weight, bias)
    check(layer(x).view(6, 40), x.bfloat16().view(6, 70), weight.bfloat16(), bias)
    other = BitmapLinear.of(sparse(40, 70, "1:4"), bias)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_without_amx_bitmaps_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "tiles_obstacle", lambda: "the system refuses AMX")
    with pytest.raises(RuntimeError, match="products of bitmaps: the system refuses AMX"):
        BitmapMatrix.packed(sparse(16, 32, "2:4")).multiply(normal_bf16(1, 32))


@by_ways("tiles")
@pytest.mark.usefixtures("bitmaps")
@pytest.mark.parametrize(("tokens", "path"), [(32, BF16_BITMAP), (33, "packed")])
def test_deploy_tries_bitmaps_for_few_tokens(
    tokens: int, path: str, way: str, deploy_times: dict[str, float]
) -> None:
    deploy_times.update({"packed": 0.5, BF16_BITMAP: 0.25})
    model, x = pruned("2:4").bfloat16(), normal_bf16(tokens, 80)
    exact = model.float()(x.float()).detach()
    choices = nmrun.deploy(model.bfloat16(), x)
    assert [choice.path for choice in choices] == [path] * 2
    z = model(x)
    assert float((z - exact).norm() / exact.norm()) < 0.005
