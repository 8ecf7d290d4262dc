"""The compiled projection gives the bits of the torch reference, and everything works without it."""

import itertools
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import largest_in_blocks
from torch import Tensor, nn

from nmrun import sparsity
from nmrun.kernels import compiler as c_library
from nmrun.kernels import cpu
from nmrun.patterns import Pattern
from nmrun.recipes.s_ste import SSTE
from nmrun.recipes.ste import STE
from nmrun.sparsity import projections, reference
from nmrun.sparsity.select import select
from nmrun.sparsity.weight import SparseWeight

pytestmark = pytest.mark.usefixtures("kernels_for_small_weights")
needs_compiler = pytest.mark.skipif(c_library.find_compiler() is None, reason="no C compiler here")


def rare(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.minutes)


def late(*case: Any) -> Any:
    """The compiler takes a second or more for its kernel."""
    return pytest.param(*case, marks=pytest.mark.slow)


def nasty(shape: tuple[int, ...]) -> Tensor:
    """Random weights with ties, zeros of both signs, NaNs and infinities strewn in."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    flat = weight.view(-1)
    flat[::3] = flat[::3].mul(2).round() / 2
    flat[1::7], flat[2::11], flat[5::101], flat[6::103] = 0.0, -0.0, torch.nan, torch.inf
    flat[: len(flat) // 8] = -1.0
    return weight


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)  # one NaN is like another


def both(weight: Tensor, ratio: str, dim: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """(compiled, reference); scale None: hard threshold."""
    out = torch.full_like(weight, 7.0)
    assert cpu.project(weight, out, Pattern.parse(ratio), dim, scale is not None, scale or 1.0)
    return out, hard(weight, ratio, dim) if scale is None else soft(weight, ratio, dim) * scale


def hard(weight: Tensor, pattern: str | Pattern, dim: int) -> Tensor:
    return reference.hard_threshold(weight, Pattern.parse(pattern), dim)


def soft(weight: Tensor, pattern: str | Pattern, dim: int) -> Tensor:
    return reference.soft_threshold(weight, Pattern.parse(pattern), dim)


# inserted from the top, N = M, sorted, inserted from below; the others go one of these ways too, and
# the compiler takes seconds for each
SEVERAL = ["16:32", *map(late, ("32:32", "20:48", "255:256"))]
SEVERAL += [rare(ratio) for ratio in ("1:32", "8:32", "24:32", "31:32", "48:64", "20:64")]


@needs_compiler
@pytest.mark.parametrize("ratio", SEVERAL)
def test_groups_of_several_vectors_with_ties_and_without(ratio):
    """Sixteen groups without a tie are written in another way than those with one."""
    m = Pattern.parse(ratio).m
    weight = torch.randn(16 * 20, m)
    weight[16:48] = (4 * weight[16:48]).round() / 4
    weight[70, 3], weight[90, 5], weight[91, 5:7] = torch.nan, torch.inf, -0.0
    weight[100] = torch.nan
    weight = weight.view(-1, 5 * m)
    for scale in (None, 1.5):
        compiled, expected = both(weight, ratio, 1, scale)
        assert torch.equal(bits(compiled), bits(expected))
    mask, faded = torch.empty_like(weight, dtype=torch.bool), torch.empty_like(weight)
    assert cpu.mask(weight, mask, Pattern.parse(ratio), 1)
    expected_mask = reference.nm_mask(weight, Pattern.parse(ratio), 1)
    assert torch.equal(mask, expected_mask)
    if ratio in ("16:32", "20:48"):  # a library of its own
        assert cpu.project(weight, faded, Pattern.parse(ratio), 1, factor=0.7)
        expected = torch.where(expected_mask, weight, weight * 0.7) + 0.0
        assert torch.equal(bits(faded), bits(expected))


@needs_compiler
@pytest.mark.parametrize("scale", [None, 1.0, 1.4832], ids=["hard", "soft", "scaled"])
@pytest.mark.parametrize(
    ("ratio", "shape", "dim"),
    [
        ("2:4", (8, 16), 1),
        ("2:4", (1, 4), 1),  # a single group
        ("1:4", (7, 36), 1),  # 63 groups: no multiple of any vector length
        ("3:7", (5, 21, 3, 3), 1),
        ("2:4", (6, 8, 5), 1),
        ("2:4", (3, 4, 2, 2, 3), 1),
        ("2:4", (12, 7), 0),
        ("2:4", (16, 3, 5), 0),
        ("2:4", (8, 100), 0),  # groups side by side, more than a vector of them
        ("3:16", (2, 32, 7, 7), 1),
        ("3:16", (5, 48), 1),
        rare("7:32", (3, 64, 3, 3), 1),
        rare("14:32", (9, 64), 1),
        late("15:16", (33, 48), 1),  # from below
        ("16:32", (40, 64), 1),  # the last that insertion finds
        late("20:48", (40, 96), 1),  # sorted
        rare("17:34", (40, 68), 1),  # the first that is
        rare("16:33", (40, 66), 1),
        ("16:32", (64, 50), 0),
        rare("17:31", (3, 62, 3, 3), 1),
        late("32:32", (5, 64), 1),
        late("1:128", (9, 256), 1),
        late("255:256", (2, 512), 1),
    ],
)
def test_bits_equal_the_reference(ratio, shape, dim, scale):
    weight = nasty(shape)
    before = weight.clone()
    compiled, expected = both(weight, ratio, dim, scale)
    assert torch.equal(bits(compiled), bits(expected))
    mask = torch.empty_like(weight, dtype=torch.bool)
    assert cpu.mask(weight, mask, pattern := Pattern.parse(ratio), dim)
    assert torch.equal(mask, reference.nm_mask(weight, pattern, dim))
    assert mask.view(torch.uint8).max() == 1
    assert torch.equal(bits(weight), bits(before))


@needs_compiler
@pytest.mark.parametrize(
    ("ratio", "shape", "dim"),
    [
        ("16:4:16", (32, 80), 1),
        ("4:2:8", (12, 4096 * 9), 1),  # several strips
        late("4:2:8", (8, 16, 3, 3), 1),
        late("4:2:8", (16, 12), 0),
        late("4:2:8", (16, 8, 3, 3), 0),
        late("64:3:5", (128, 25), 1),
        late("3:1:6", (6, 42), 1),  # no multiple of four outputs
    ],
)
def test_blocks(ratio, shape, dim):
    weight, pattern = nasty(shape), Pattern.parse(ratio)
    expected = reference.nm_mask(weight, pattern, dim)
    if weight.dim() == 2:
        by_hand = largest_in_blocks(weight.T if dim == 0 else weight, str(pattern))
        assert torch.equal(expected, by_hand.T if dim == 0 else by_hand)
    orders = [torch.contiguous_format, torch.channels_last][: 1 + (weight.dim() == 4)]
    for stored in (weight.contiguous(memory_format=order) for order in orders):
        out, mask = torch.full_like(stored, 7.0), torch.empty_like(stored, dtype=torch.bool)
        assert cpu.project(stored, out, pattern, dim)
        projected = torch.where(expected, weight, 0.0).contiguous() + 0.0
        assert torch.equal(bits(out.contiguous()), bits(projected))
        assert cpu.mask(stored, mask, pattern, dim)
        assert torch.equal(mask, expected)
        assert torch.equal(sparsity.nm_mask(stored, pattern, dim), expected)
    assert not cpu.project(weight, torch.empty_like(weight), pattern, dim, soft=True)


@needs_compiler
@pytest.mark.slow
def test_blocks_of_which_pruned_weights_fade_and_the_last_group_is_short():
    pattern, weight = Pattern.parse("4:2:8").over(20), nasty((8, 20))
    mask, out = reference.nm_mask(weight, pattern, 1), torch.full_like(weight, 7.0)
    assert cpu.project(weight, out, pattern, 1, factor=0.7)
    faded = torch.where(mask, weight, weight * torch.tensor(0.7)) + 0.0
    assert torch.equal(bits(out), bits(faded))
    assert not cpu.project(nasty((6, 24)), torch.empty(6, 24), pattern, 1)  # V does not divide 6


@needs_compiler
@pytest.mark.parametrize(
    ("ratio", "shape", "dim", "padded"),
    [
        ("2:4", (6, 16, 3, 3), 1, False),
        ("2:4", (16, 6, 3, 3), 0, False),
        ("2:4", (64, 5, 7, 7), 0, False),
        ("2:4", (4, 10, 3, 3), 1, True),
    ],
)
def test_weights_with_channels_last(ratio, shape, dim, padded):
    weight = nasty(shape)
    pattern = Pattern.parse(ratio).over(shape[dim]) if padded else Pattern.parse(ratio)
    last = weight.to(memory_format=torch.channels_last)
    out = torch.full_like(last, 7.0)
    assert cpu.project(last, out, pattern, dim)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(bits(out.contiguous()), bits(hard(weight, pattern, dim)))
    assert not cpu.project(last, torch.empty(shape), pattern, dim)  # two orders
    mask = torch.empty_like(last, dtype=torch.bool)
    assert cpu.mask(last, mask, pattern, dim)
    assert torch.equal(mask, reference.nm_mask(weight, pattern, dim))
    assert not cpu.mask(last, torch.empty(shape, dtype=torch.bool), pattern, dim)


@needs_compiler
@pytest.mark.parametrize(
    ("ratio", "shape", "dim"),
    [("2:4", (7, 36), 1), ("3:16", (3, 32, 3, 3), 1), ("3:16", (32, 50), 0)],
)
@pytest.mark.parametrize("factor", [0.7, 1e-3, 1.0])
def test_pruned_weights_fade(ratio, shape, dim, factor):
    weight = nasty(shape)
    out = torch.full_like(weight, 7.0)
    assert cpu.project(weight, out, Pattern.parse(ratio), dim, factor=factor)
    mask = reference.nm_mask(weight, Pattern.parse(ratio), dim)
    faded = torch.where(mask, weight, weight * torch.tensor(factor)) + 0.0
    assert torch.equal(bits(out), bits(faded))
    assert cpu.project(weight, out, Pattern.parse(ratio), dim)  # without a factor, code of its own
    assert torch.equal(bits(out), bits(hard(weight, ratio, dim)))


@needs_compiler
@pytest.mark.parametrize(
    ("ratio", "shape", "last"),
    [
        ("2:4", (16, 50), False),
        ("2:4", (64, 8, 3, 3), False),
        ("2:4", (64, 8, 3, 3), True),
        ("3:7", (21, 5), False),
        ("1:16", (32, 33), False),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_another_order(ratio, shape, last, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(c_library, "CHUNK", 16)
    weight = nasty(shape)
    weight = weight.to(memory_format=torch.channels_last) if last else weight
    order, out = torch.randperm(shape[0]), torch.full_like(weight, 7.0)
    assert cpu.project_rows(weight, out, Pattern.parse(ratio), order)
    expected = hard(weight[order].contiguous(), ratio, 0)[order.argsort()]
    assert torch.equal(bits(out.contiguous()), bits(expected.contiguous()))
    assert not cpu.project_rows(weight, out, Pattern(1, 5), order)  # groups that are not whole
    assert not cpu.project_rows(weight, out, Pattern.parse(ratio), torch.arange(shape[0] + 5))
    assert not cpu.project_rows(weight.double(), out.double(), Pattern.parse(ratio), order)


# --- the public functions -------------------------------------------------------------------------

FUNCTIONS = ("nm_mask", "hard_threshold", "soft_threshold")


def same(actual: Tensor, expected: Tensor) -> bool:
    if actual.dtype == torch.bool:
        return torch.equal(actual, expected)
    return torch.equal(bits(actual), bits(expected))


@needs_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("stored", [lambda w: w, nn.Parameter], ids=["contiguous", "parameter"])
@pytest.mark.parametrize(
    ("ratio", "dim", "pad"), [("2:4", 1, False), ("3:4", -2, False), ("2:8", 0, True)]
)
def test_public_functions_go_through_the_kernel(ratio, dim, pad, stored, function, monkeypatch):
    weight, pattern = stored(nasty((12, 28))), Pattern.parse(ratio)
    pattern = pattern.over(weight.shape[dim]) if pad else pattern
    expected = getattr(reference, function)(weight, pattern, dim % 2)
    monkeypatch.setattr(reference, function, None)
    result = getattr(sparsity, function)(weight, ratio, dim, pad)
    assert result.shape == weight.shape
    assert not result.requires_grad
    assert same(result, expected)


@needs_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(4, 8, 3, 3), (3, 8, 5), (2, 8, 2, 2, 3)])
def test_public_functions_in_any_order_of_memory(shape, function):
    weight = nasty(shape)
    expected = getattr(reference, function)(weight, Pattern(2, 4), 1)
    for order in itertools.permutations(range(len(shape))):
        back = sorted(range(len(shape)), key=order.__getitem__)
        stored = weight.permute(order).contiguous().permute(back)
        assert same(getattr(sparsity, function)(stored, "2:4", 1), expected)


@needs_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
def test_whoever_looks_at_the_operations_sees_them(function):
    """torch.func, tracers and fake tensors, for which memory says nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(w):
        return getattr(sparsity, function)(w, "2:4", 1)

    first, second = nasty((8, 16)), torch.randn(8, 16)
    assert same(torch.func.vmap(call)(second.view(2, 4, 16)).view(8, 16), call(second))
    assert same(make_fx(call)(first)(second), call(second))
    with FakeTensorMode():
        assert call(torch.empty(8, 16)).shape == (8, 16)
        # as an optimizer's step does it
        projections.keep_largest(torch.empty(8, 16), torch.empty(8, 16), Pattern(2, 4), 1)


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("shape", [(1024, 204), (101, 68, 3, 3)])
def test_threads_share_the_work_without_a_gap(monkeypatch, shape, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(c_library, "CHUNK", 1000)
    compiled, expected = both(nasty(shape), "2:4", 1, None)
    assert torch.equal(bits(compiled), bits(expected))


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(c_library, "CHUNK", 16)
    weight = torch.randn(8, 16)
    both(weight, "2:4", 1, None)
    child = multiprocessing.get_context("fork").Process(target=both, args=(weight, "2:4", 1, None))
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


@needs_compiler
def test_what_it_leaves_to_the_reference(monkeypatch):
    weight, pattern = torch.randn(64, 64), Pattern(2, 4)
    out = torch.full_like(weight, 7.0)
    for what in (torch.float64, torch.bfloat16, "meta"):
        assert not cpu.project(weight.to(what), out.to(what), pattern, 1)
    assert not cpu.project(weight.T, out, pattern, 1)
    assert not cpu.project(weight, out.T, pattern, 1)
    assert not cpu.project(torch.randn(4, 1024), torch.empty(4, 1024), Pattern(2, 512), 1)
    monkeypatch.setattr(cpu, "SMALLEST", weight.numel() + 1)
    assert not cpu.project(weight, out, pattern, 1)
    assert (out == 7.0).all()


def _project(recipe: type[STE] | type[SSTE], weight: Tensor) -> Tensor:
    """What a recipe's forward pass would use, by whichever way it finds."""
    layer, rule = nn.Linear(*weight.shape[::-1], bias=False), recipe()
    layer.weight = nn.Parameter(weight)
    rule.begin(Pattern(2, 4), 10)
    sparse = SparseWeight(select(layer, Pattern(2, 4))[0][0])
    sparse["scale"] = torch.tensor(1.5)
    out = torch.empty_like(weight)
    with torch.no_grad():
        rule.project(sparse, out)
    return out


@pytest.mark.parametrize("recipe", [STE, SSTE])
@pytest.mark.parametrize(
    "trouble", ["no compiler", "broken compiler", "crashing compiler", "not a library"]
)
def test_without_a_working_compiler_the_result_is_the_same(trouble, recipe, tmp_path, monkeypatch):
    weight = nasty((16, 64)).nan_to_num(nan=torch.nan, posinf=3.0)
    expected = _project(recipe, weight.T.contiguous().T)  # this layout goes to the reference
    script = {
        "crashing compiler": "kill -9 $$",
        "not a library": 'for last; do :; done; echo no > "${@: -2:1}"',
    }
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/bash\n{script.get(trouble, 'echo error >&2; exit 1')}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(
        c_library, "find_compiler", lambda: None if trouble == "no compiler" else str(compiler)
    )
    cpu.load.cache_clear()
    assert cpu.load(Pattern(2, 4)) is None
    assert torch.equal(bits(_project(recipe, weight)), bits(expected))
    mask = sparsity.nm_mask(weight, "2:4")
    assert torch.equal(mask, reference.nm_mask(weight, Pattern(2, 4), 1))


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_compiler
@pytest.mark.parametrize("trouble", ["a file in the way", "no home"])
def test_without_a_cache_folder_it_still_compiles(trouble, tmp_path, monkeypatch):
    if trouble == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cpu.load.cache_clear()
    compiled, expected = both(nasty((8, 16)), "2:4", 1, None)
    assert torch.equal(bits(compiled), bits(expected))


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Ask for a library; returns how often the compiler, which is played, has been called."""
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/bash\necho >> {calls}\nfor last; do :; done; echo no > "${{@: -2:1}}"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ask(source: str = "nm_parts", *flags: str) -> int:
        c_library.library("nm", (source,), flags)
        return calls.read_text().count("\n")

    return ask


def test_what_was_built_is_of_its_sources_flags_and_processor(builds, tmp_path, monkeypatch):
    """A cache may be shared between machines: none is handed the other's code."""
    asked = [("nm_parts",), ("nm_parts", "-DN=2"), ("nm_parts", "-DN=3"), ("nm_adam",)]
    assert [builds(*words) for words in asked] == [1, 2, 3, 4]
    assert [builds(*words) for words in asked] == [4] * 4
    monkeypatch.setattr(c_library, "cpuinfo", lambda: {"flags": "avx512f avx512_bf16"})
    assert [builds(*words) for words in asked] == [5, 6, 7, 8]
    assert len(list((tmp_path / "nmrun" / "kernels").glob("nm-*.so"))) == 8


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o007, 0o000])
def test_what_was_built_is_found_again_whatever_the_umask(umask, builds):
    before = os.umask(umask)
    try:
        assert [builds() for _ in range(3)] == [1] * 3
    finally:
        os.umask(before)


def test_compiler_of_the_environment_comes_first(tmp_path, monkeypatch):
    (mine := tmp_path / "my-cc").write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", str(mine))
    assert c_library.find_compiler() == str(mine)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_library.find_compiler() is None
