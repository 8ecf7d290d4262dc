"""Dimensions that M does not divide (``pad``): all as if zeros filled up the last group. And high
ratios, for every recipe.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from reference import best_block
from runs import config
from torch import Tensor, nn
from training import OPTIONS, SPARSE, TOTAL, Conv1D, by_sgd

import nmrun
from nmrun.kernels import compiler as c_library
from nmrun.kernels import cpu
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import build, console
from nmrun.lab.train.flops import Flops, LayerFlops, Products
from nmrun.patterns import Pattern
from nmrun.sparsity import check_nm, hard_threshold, nm_mask, soft_threshold, transposable_mask
from nmrun.sparsity.select import select

# may keep fewer than N of a short group, or shrink one to zero
AT_MOST = ("s_ste", "t_sr_ste", "lbc", "maskllm")


# --- masks ----------------------------------------------------------------------------------------


def rows(x: Tensor, dim: int) -> list[list[float]]:
    """The numbers along ``dim``, one list for each place elsewhere."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist()


def groups(row: list[float], m: int) -> list[list[float]]:
    return [row[i : i + m] for i in range(0, len(row), m)]


def group_mask(group: list[float], n: int) -> list[bool]:
    """The n largest magnitudes, the lower index first; everything if there are no more."""
    best = sorted(range(len(group)), key=lambda j: (-abs(group[j]), j))[:n]
    return [j in best for j in range(len(group))]


def shrunk(group: list[float], n: int) -> list[float]:
    shift = sorted((abs(x) for x in group), reverse=True)[n] if len(group) > n else 0.0
    return [max(abs(x) - shift, 0.0) * (1 if x > 0 else -1) for x in group]


def nasty(*shape: int) -> Tensor:
    """A quarter zeros, and most magnitudes several times."""
    generator = torch.Generator().manual_seed(sum(shape))
    numbers, kept = (torch.randint(*ends, shape, generator=generator) for ends in ((-3, 4), (0, 4)))
    return numbers * kept.bool().float()


CASES = [
    (n, m, m * whole + rest)
    for m in (4, 8, 16)
    for n in sorted({1, 2, m // 2, m - 1, m})
    for whole in (0, 1, 2)
    for rest in range(m)
    if whole or rest
]


@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 0), 1), ((2, 0, 3), 1), ((0, 4), 0)],
    ids=["linear", "conv", "stored (in, out)"],
)
def test_projections_by_brute_force(m, shape, dim, monkeypatch):
    monkeypatch.setattr(cpu, "SMALLEST", 1)
    for n, _, size in (case for case in CASES if case[1] == m):
        pattern = Pattern(n, m)
        weight = nasty(*(size if at == dim else other for at, other in enumerate(shape)))
        split = [groups(row, m) for row in rows(weight, dim)]
        mask = [[k for g in row for k in group_mask(g, n)] for row in split]
        hard = [
            [x if k else 0.0 for g in row for x, k in zip(g, group_mask(g, n), strict=True)]
            for row in split
        ]
        soft = [[x for g in row for x in shrunk(g, n)] for row in split]
        result = nm_mask(weight, pattern, dim, pad=True)
        shrunk_weight = soft_threshold(weight, pattern, dim, pad=True)
        assert result.dtype == torch.bool
        assert result.shape == weight.shape
        assert result.is_contiguous()
        assert rows(result, dim) == mask
        assert rows(hard_threshold(weight, pattern, dim, pad=True), dim) == hard
        assert rows(shrunk_weight, dim) == soft
        energy, product = (float((shrunk_weight * x).sum()) for x in (shrunk_weight, weight))
        scale = float(nmrun.sparsity.soft_threshold_scale(weight, pattern, dim, pad=True))
        assert scale == pytest.approx(product / energy if energy else 1.0)
        assert pattern.over(size).density == pytest.approx(sum(mask[0]) / size)
        assert check_nm(hard_threshold(weight, pattern, dim, pad=True), pattern, dim, pad=True)
        if c_library.find_compiler() is not None and n <= 2:
            out = torch.full_like(weight, 7.0)
            assert cpu.project(weight, out, pattern.over(size), dim)
            assert rows(out, dim) == hard
            assert cpu.project(weight, out, pattern.over(size), dim, soft=True, scale=2.0)
            assert rows(out, dim) == [[2 * x for x in row] for row in soft]


def test_check_nm_takes_the_option_that_sparsify_had():
    model = nn.Linear(10, 4)
    by_sgd(model, "ste", "2:4", pad=True)
    assert check_nm(model, "2:4", pad=True, exclude=None) == ["weight"]
    with pytest.raises(
        ValueError, match=r"weight is not 1:4: 2 of 4 weights at \[0, 0-3\] are non-"
    ):
        check_nm(model, "1:4", pad=True, exclude=None)
    with pytest.raises(
        ValueError, match="no weight of this model could hold 2:4: nothing to check"
    ):
        check_nm(model, "2:4", exclude=None)


def test_transposable_by_brute_force():
    """Of all masks with N in each row and column of the filled-up block, the one that keeps most of
    what is there.
    """
    for inputs in (1, 2, 3, 5, 6, 7):
        weight = torch.randn(4, inputs)
        result = transposable_mask(weight, "2:4", pad=True)
        assert result.shape == weight.shape
        filled = nn.functional.pad(weight, (0, -inputs % 4)).abs()
        for start in range(0, inputs, 4):
            block, part = filled[:, start : start + 4], result[:, start : start + 4]
            assert (part.sum(0) == 2).all()
            assert (part.sum(1) <= 2).all()
            kept = weight[:, start : start + 4][part].abs().sum()
            assert float(kept) == pytest.approx(float((best_block(block) * block).sum()))
    with pytest.raises(ValueError, match="both sides multiples of 4"):
        transposable_mask(torch.ones(6, 8), "2:4", pad=True)


# --- which layers, and what is said of them -------------------------------------------------------


def test_which_layers_and_why():
    model = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    sparse, dense = select(model, Pattern(2, 4))
    assert [(c.name, str(c.pattern)) for c in sparse] == [("0.weight", "2:4")]
    allowed = " (the option pad allows that)"
    assert [d.reason for d in dense] == [
        "10 inputs are not a multiple of 4" + allowed,
        "3 inputs are not a multiple of 4" + allowed,
        "2 inputs are not a multiple of 4, and 2:4 would prune none of them",
    ]
    sparse, dense = select(model, Pattern(2, 4), pad=True, overrides={"0": "1:16"})
    ratios = {"0.weight": "1:16", "1.weight": "2:4", "2.weight": "2:4"}
    assert {c.name: str(c.pattern) for c in sparse} == ratios
    assert [d.reason for d in dense] == [
        "2 inputs are not a multiple of 4, and 2:4 would prune none of them"
    ]


@pytest.mark.parametrize(
    ("inputs", "ratio", "left", "stored"),
    [(10, "2:4", 6, 12), (9, "2:4", 5, 12), (9, "1:4", 3, 12), (7, "1:8", 1, 8)],
)
def test_flops_count_what_is_pruned(inputs, ratio, left, stored):
    """``left`` of the inputs are multiplied; tensor cores compute half of what four divide."""
    model = nn.Linear(inputs, 8)
    _, handle = by_sgd(model, "ste", ratio, pad=True)
    dense = 2.0 * inputs * 8
    layer = LayerFlops(handle.sparse[0], False, False, Products(dense, dense, dense))
    cost = Flops(dense, 2 * dense, [layer])
    assert cost.inference() == pytest.approx(2 * left * 8)
    assert cost.inference(hardware=True) == pytest.approx(2 * stored / 2 * 8)
    assert cost.training(handle.recipe) == pytest.approx(2 * 8 * (left + left + inputs))
    assert handle.report()["density"] == pytest.approx(left / inputs)
    assert handle.report()["pattern"] == handle.report()["layers"][0]["pattern"] == ratio


# --- every recipe ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Inputs that four and eight do not divide; with ``filled`` the same network, and zeros that
    fill up groups of so many.
    """

    def __init__(self, filled: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.filled = filled
        self.a, self.b, self.conv = nn.Linear(10, 8), nn.Linear(7, 8), nn.Conv1d(5, 8, 3, padding=1)
        self.out = nn.Linear(8, 4)
        if filled:
            for name in ("a", "b", "conv"):
                old = getattr(self, name)
                inputs = old.weight.shape[1] + -old.weight.shape[1] % filled
                wide = (
                    nn.Conv1d(inputs, 8, 3, padding=1) if name == "conv" else nn.Linear(inputs, 8)
                )
                with torch.no_grad():
                    wide.weight.zero_()[:, : old.weight.shape[1]] = old.weight
                    wide.bias.copy_(old.bias)
                setattr(self, name, wide)

    def forward(self, x: Tensor) -> Tensor:
        a, b, conv = (
            torch.cat([p, p.new_zeros(len(p), -p.shape[1] % max(1, self.filled), *p.shape[2:])], 1)
            for p in (x, x[:, :7], x.unflatten(1, (5, 2)))
        )
        return self.out(self.a(a).tanh() * self.b(b).tanh() + self.conv(conv).mean(-1).tanh())


def start(
    recipe: str, pattern: str, model: nn.Module, pad: bool, exclude: str = "out"
) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = nmrun.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    options = OPTIONS.get(recipe, {})
    return optimizer, nmrun.sparsify(
        model, optimizer, recipe, pattern, TOTAL, exclude=exclude, pad=pad, **options
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    inputs: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    for step in steps:
        x = torch.randn(8, inputs, generator=torch.Generator().manual_seed(step)).to(dtype)
        y = model(x)
        (y - x[:, : y.shape[1]]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def counts(weight: Tensor, m: int) -> list[tuple[int, int]]:
    """(non-zeros, members) of every group along dimension 1."""
    return [
        (sum(x != 0 for x in group), len(group))
        for row in rows(weight, 1)
        for group in groups(row, m)
    ]


# SQFT draws its adapters for the number of inputs, which the zeros change
@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [(name, ("1:8", "2:4")[i % 2]) for i, name in enumerate(SPARSE) if name != "sqft"],
)
def test_as_if_zeros_filled_it_up(recipe, pattern):
    """The same training of a network that really has the zeros, and inputs of zero for them."""
    narrow, wide = Net().double(), Net(filled=Pattern.parse(pattern).m).double()
    optimizer, _ = start(recipe, pattern, narrow, pad=True)
    other, _ = start(recipe, pattern, wide, pad=recipe == "sdgf_geometric")
    for step in range(TOTAL):
        train(narrow, optimizer, range(step, step + 1), 10, torch.float64)
        train(wide, other, range(step, step + 1), 10, torch.float64)
        for name in ("a", "b", "conv"):
            used, whole = getattr(narrow, name).weight, getattr(wide, name).weight
            torch.testing.assert_close(used, whole[:, : used.shape[1]])
            assert not whole[:, used.shape[1] :].any()


@pytest.mark.parametrize("recipe", SPARSE)
def test_stored_the_other_way_round(recipe):
    """It trains as the linear layer with the transposed weight does."""
    torch.manual_seed(1)
    stored, linear = Conv1D(4, 10).double(), nn.Linear(10, 4).double()
    with torch.no_grad():
        linear.weight.copy_(stored.weight.T)
        linear.bias.zero_()
    (optimizer, _), (other, _) = (
        start(recipe, "2:4", model, pad=True, exclude=()) for model in (stored, linear)
    )
    # its noise is drawn in the order of storage: only the pattern can be compared
    if recipe == "maskllm":
        train(stored, optimizer, range(TOTAL), 10, torch.float64)
        return check_holds(stored.weight.detach().T)
    for step in range(TOTAL):
        for model, its in ((stored, optimizer), (linear, other)):
            train(model, its, range(step, step + 1), 10, torch.float64)
        torch.testing.assert_close(stored.weight.T, linear.weight)
    check_holds(linear.weight.detach())


def check_holds(weight: Tensor) -> None:
    assert weight.any()
    assert all(nonzeros <= 2 for nonzeros, _ in counts(weight, 4))


def test_geometric_says_what_would_help():
    with pytest.raises(
        ValueError, match=r"multiple of the 8 of its coarsest pattern 4:8 \(fewer fr"
    ):
        start("sdgf_geometric", "2:4", nn.Linear(12, 4), pad=False, exclude=())
    _, handle = start("sdgf_geometric", "2:4", nn.Linear(12, 4), pad=True, exclude=())
    # the dense phase is one step long
    train(handle.sparse[0].module, handle.optimizer, range(2), 12)
    assert set(counts(handle.sparse[0].weight, 8)) == {(4, 8), (4, 4)}


# --- high ratios ----------------------------------------------------------------------------------


# the compiler takes ten seconds for each kernel of 32
HIGH = [(recipe, pattern) for pattern in ("1:16", "1:128") for recipe in SPARSE]
HIGH += [("lbc", "2:32"), ("maskllm", "2:32")]
SEVERAL_KERNELS = ("sdgf_stepwise", "1:128"), ("sdgf_geometric", "1:128")
HIGH = [
    pytest.param(*each, marks=pytest.mark.slow) if each in SEVERAL_KERNELS else each
    for each in HIGH
]
HIGH += [
    pytest.param(recipe, pattern, marks=pytest.mark.minutes)
    for pattern in ("1:32", "2:32")
    for recipe in SPARSE
    if (recipe, pattern) not in HIGH
]


@pytest.mark.parametrize(("recipe", "pattern"), HIGH)
def test_high_ratios(recipe, pattern, monkeypatch):
    """A few steps of a layer with 256 inputs: exactly N:M at the end, with and without the compiled
    projection, to the same bits.
    """
    parsed = Pattern.parse(pattern)
    why_not = {
        ("lbc", "2:32"): "2:32 has 496 possible masks a group, and 256 at most have scores",
        ("maskllm", "2:32"): "2:32 has 496 possible masks a group, and 256 at most have scores",
        ("proxsparse", pattern): "proximal steps are for groups of 8 at most",
    }
    if message := why_not.get((recipe, pattern)):
        with pytest.raises(ValueError, match=message):
            start(recipe, pattern, nn.Linear(256, 128), pad=False, exclude=())
        return
    ends = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(cpu, "load", lambda *_: None)
        torch.manual_seed(0)
        model = nn.Linear(256, 128)
        optimizer, handle = start(recipe, pattern, model, pad=False, exclude=())
        train(model, optimizer, range(TOTAL), 256)
        assert handle.is_sparse
        handle.finalize()
        check_nm(model, pattern, exclude=None)
        nonzeros = model.weight.detach().reshape(-1, parsed.m).count_nonzero(1)
        assert (nonzeros <= parsed.n).all()
        assert model.weight.any()
        assert recipe in AT_MOST or (nonzeros == parsed.n).all()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


# --- on the command line --------------------------------------------------------------------------

ODD = ("model.channels=[10,8,9]", "sparsity='2:6'")


def test_plan():
    cfg = config("out", *ODD, "sparsity.pad=true", "recipe=sr_ste")
    text = "\n".join(console.plan_lines(cfg, build.build(cfg)))
    assert re.search(r"sparse +inner.0.weight +8x10x3x3 +2:6, the last group of 4\n", text)
    assert re.search(r"sparse +inner.1.weight +9x8x3x3 +2:6, the last group of 2\n", text)
    # 100 in the stem, 8 * 10 * 9 + 8 and 9 * 8 * 9 + 9 within, of which 4 of 10 and 4 of 8 are
    # left, and 10 * 36 + 10 in the head
    nonzeros = 100 + (8 * 4 * 9 + 8) + (9 * 4 * 9 + 9) + 370
    assert f"density {nonzeros / 1855:.1%} of 1,855 parameters" in text


def test_a_dense_run_is_the_same_with_it():
    plain, padded = (
        config("out", "recipe=dense"),
        config("out", "recipe=dense", "sparsity.pad=true"),
    )
    assert run_folder(plain) == run_folder(padded)


@pytest.mark.parametrize(
    ("ratio", "meaning"),
    [("2:2:8", "2:2:8: 2:8, the columns shared by 2 rows"), ("1:1", "1:1, which prunes nothing")],
)
def test_the_plan_says_what_an_unusual_ratio_means(ratio, meaning, tmp_path):
    cfg = config(tmp_path, f"sparsity='{ratio}'", "recipe=sr_ste")
    lines = console.plan_lines(cfg, build.build(cfg))
    assert any(line.endswith(meaning) for line in lines)
