"""Adam on the CPU with the recipe's part in one pass: the bits of torch's fused Adam between the
recipe's own steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_steps import KINDS, edited, projection, update_of
from torch import Tensor, nn

import nmrun
from nmrun import optim
from nmrun.kernels import compiler as c_library
from nmrun.kernels import cpu
from nmrun.kernels.layout import Operands, Update
from nmrun.optim import adam
from nmrun.patterns import Pattern
from nmrun.recipes.ste import STE
from nmrun.rule import Rule
from nmrun.sparsity import reference

pytestmark = [
    pytest.mark.skipif(c_library.find_compiler() is None, reason="no C compiler here"),
    pytest.mark.usefixtures("kernels_for_small_weights"),
]
# elsewhere torch fuses other multiplications with additions
EXACT = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
TOTAL = 12


def assert_same(actual: Tensor, expected: Tensor) -> None:
    if EXACT:
        assert torch.equal(*(t.contiguous().view(torch.int32) for t in (actual, expected)))
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


# multiples of a vector's 16 numbers: torch computes what is left over in double precision
SHAPES = [
    ((40, 16), 1, "2:4"),
    ((8, 16, 3, 3), 1, "2:4"),
    ((16, 26), 0, "2:8"),
    ((64, 1024), 1, "2:4"),
]
BLOCKS = [
    ((32, 48), 1, "16:2:8"),
    ((32, 16, 3, 3), 1, "16:2:8"),
    ((16, 32), 0, "16:2:8"),
    ((16, 32, 2, 2), 0, "16:2:8"),  # of a transposed convolution
    ((16, 4096), 1, "16:2:8"),
]


@pytest.mark.parametrize(
    ("decoupled", "beta1", "layout"),
    [
        (True, 0.8, torch.contiguous_format),
        (False, 0.9, torch.channels_last),
        (True, 0.3, torch.channels_last),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torchs_with_the_recipe_s_part_before_and_after(kind, decoupled, beta1, layout):
    assert_steps_are_torchs(SHAPES, kind, decoupled, beta1, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"soft"}))
def test_so_is_a_step_that_keeps_blocks(kind, layout):
    assert_steps_are_torchs(BLOCKS, kind, True, 0.9, layout)


def assert_steps_are_torchs(
    shapes: list[tuple[tuple[int, ...], int, str]],
    kind: str,
    decoupled: bool,
    beta1: float,
    layout: torch.memory_format,
) -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape, _, _ in shapes]
    for p in params:
        p.data = p.contiguous(memory_format=layout) if p.dim() == 4 else p.data
    copies = [
        update_of(kind, p.detach(), Pattern.parse(r), dim)
        for p, (_, dim, r) in zip(params, shapes, strict=True)
    ]
    theirs = [p.detach().clone().requires_grad_() for p in params]
    options = {"lr": 3e-3, "betas": (beta1, 0.95), "eps": 1e-7, "weight_decay": 0.1, "fused": True}
    adam = (optim.AdamW if decoupled else optim.Adam)(params, **options)
    stock = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **options)
    for step in range(3):
        versions = [p._version for p in params]
        for p, q, update in zip(params, theirs, copies, strict=True):
            p.grad = torch.randn_like(p) * 10.0 ** torch.randint(-4, 2, p.shape)
            q.grad = edited(p.grad, q.detach(), update)
            if decay := update.rule.pruned_gradient_decay:  # the recipes' way, which rounds once
                q.grad = torch.add(p.grad, q.detach() - update.projected, alpha=decay)
        grads = [p.grad.clone() for p in params]
        assert adam.plan(dict(zip(params, copies, strict=True))) == params
        adam.step()
        stock.step()
        every = zip(params, theirs, copies, grads, versions, strict=True)
        for p, q, update, grad, version in every:
            assert torch.equal(p.grad, grad)
            assert p._version > version
            assert adam.state[p].keys() == stock.state[q].keys()
            assert adam.state[p]["step"] == stock.state[q]["step"] == step + 1
            for name in ("exp_avg", "exp_avg_sq"):
                assert_same(adam.state[p][name], stock.state[q][name])
            assert_same(p, q)
            # torch keeps the sign of a zero where a mask multiplies
            assert torch.equal(update.projected, projection(p.detach(), update))


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("ste", {}),
    ("ste_periodic", {"interval": 3, "gradient": "ste"}),
    ("ste_periodic", {"interval": 4}),
    ("sr_ste", {"decay": 0.05}),
    ("asp", {}),
    ("step", {"switch": 0.3}),
    ("step", {"switch": 0.3, "decay": 0.1}),
    ("step", {"eps_mode": "outside"}),
    ("s_ste", {}),
    ("s_ste", {"interval": 3}),
    ("s_ste", {"fit": "l1"}),
    ("t_sr_ste", {"decay": 0.05, "interval": 4}),
    ("t_sr_ste", {"decay": 0.05, "interval": 3, "dense_end": 0.25}),
    ("mdgf_linear", {}),
    ("mdgf_exponential", {}),
    ("sdgf_stepwise", {}),
    ("mdgf_linear", {"grad_mode": "ste"}),
    ("mdgf_exponential", {"grad_mode": "ste"}),
    ("lbc", {}),
    ("bi_mask", {"decay": 0.05, "interval": 3, "candidates": 3}),
    ("asp", {"input_gradient": "transposable"}),
]


def begin(
    recipe: str, options: dict[str, Any]
) -> tuple[nn.Module, optim.Adam, nmrun.step.handle.Handle]:
    torch.manual_seed(0)
    first, *last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(256, 32), nn.Linear(32, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), last[0], nn.ReLU(), last[1])
    model.to(memory_format=torch.channels_last)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, exclude=None, **options)
    return model, optimizer, handle


def train(
    model: nn.Module, optimizer: optim.Adam, handle: nmrun.step.handle.Handle, steps: range
) -> list[Any]:
    """What is to be seen after each step."""
    seen: list[Any] = []
    for step in steps:
        x = torch.randn(4, 16, 4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        handle.measure_flips = step % 3 != 1
        if step == 8:
            with torch.no_grad(), handle.dense_weights():
                model[0].weight.mul_(1.25)  # the projection has to follow
        optimizer.step()
        optimizer.zero_grad()
        seen += [handle.metrics(), handle.pop_events()]
    return seen


@pytest.mark.parametrize(("recipe", "options"), RUNS, ids=lambda x: str(x))
def test_a_run_in_one_pass_is_one_with_hooks(recipe, options, monkeypatch):
    steps: list[Operands] = []
    step = cpu.step_adam
    monkeypatch.setattr(cpu, "step_adam", lambda p, scalars: (steps.append(p), step(p, scalars)))
    mine = begin(recipe, options)
    seen = train(*mine, range(TOTAL))
    assert len(steps) >= 3 * (TOTAL // 4)  # after a dense phase, if there is one
    assert len({o.update.projected.data_ptr() for o in steps}) == 3
    steps.clear()
    monkeypatch.setattr(adam, "supports", lambda operands, fused: False)
    other = begin(recipe, options)
    expected = train(*other, range(TOTAL))
    assert not steps
    if EXACT:
        assert seen == expected
    for w, v in zip(mine[2].sparse, other[2].sparse, strict=True):
        assert_same(w.weight, v.weight)
    for p, q in zip(mine[0].parameters(), other[0].parameters(), strict=True):
        assert_same(p, q)


def test_transposable_masks_that_follow_the_weight_are_chosen_after_the_step():
    model, optimizer, handle = begin("sr_ste", {"input_gradient": "transposable"})
    for step in range(3):
        train(model, optimizer, handle, range(step, step + 1))
        for w in handle.sparse[1:]:
            expected = w.dense * nmrun.sparsity.transposable_mask(w.dense, "2:4")
            assert torch.equal(w.parameter, expected)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_work_without_a_gap(threads, monkeypatch):
    results = []
    for number in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        monkeypatch.setattr(c_library, "CHUNK", 1000)
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(101, 204))
        p.grad = torch.randn_like(p)
        optimizer = optim.Adam([p], fused=True)
        update = update_of("decayed", p.detach(), Pattern(2, 4), 1)
        assert optimizer.plan({p: update}) == [p]
        optimizer.step()
        results.append([p, update.projected, *optimizer.state[p].values()])
    assert all(map(torch.equal, *results))


def test_what_it_leaves_to_torch(monkeypatch):
    def taken(p, pattern="2:4", **options):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer = optim.AdamW([p], **{"fused": True, **options})
        update = Update(p.detach(), torch.zeros_like(p), 1, Pattern.parse(pattern), Rule())
        return optimizer.plan({p: update}) == [p]

    def weight(*shape, **options):
        return nn.Parameter(torch.ones(*shape, **options))

    assert taken(weight(8, 16))
    assert taken(weight(8, 256), "1:256")
    assert not taken(weight(8, 16), fused=None)  # its bits are those of torch's fused step
    assert not taken(weight(8, 16), amsgrad=True)
    assert not taken(weight(8, 16), maximize=True)
    assert not taken(weight(8, 16, dtype=torch.float64))
    assert not taken(weight(8, 18))  # a short last group
    assert not taken(weight(8, 1024), "1:512")
    transposed = weight(16, 8)
    transposed.grad = torch.zeros(8, 16).T
    assert not taken(transposed)
    monkeypatch.setattr(cpu, "SMALLEST", 129)
    assert not taken(weight(8, 16))
    monkeypatch.setattr(cpu, "SMALLEST", 1)
    cpu.load.cache_clear()
    monkeypatch.setattr(c_library, "find_compiler", lambda: None)
    assert not taken(weight(8, 16))


def test_a_step_for_which_nothing_was_asked_is_torchs():
    p = nn.Parameter(torch.randn(8, 16))
    optimizer = optim.Adam([p], fused=True)
    update = update_of("nothing", p.detach(), Pattern(2, 4), 1)
    q = p.detach().clone().requires_grad_()
    stock = torch.optim.Adam([q], fused=True)
    before = update.projected
    for step, asked in enumerate((True, False, True), 1):
        p.grad = q.grad = torch.randn_like(p)
        if asked:  # for one step
            optimizer.plan({p: update})
        optimizer.step()
        stock.step()
        assert_same(p, q)
        assert optimizer.state[p]["step"] == step
        expected = nmrun.sparsity.hard_threshold(p.detach(), "2:4") if asked else before
        assert torch.equal(update.projected, expected)
        before = update.projected.clone()


def test_a_recipe_that_overrides_what_happens_around_a_step_is_asked(monkeypatch):
    """The kernel steps only what a rule says whole."""
    asked: list[str] = []

    class Same(STE):
        name = "same"

    class Edits(STE):
        name = "edits"

        def edit_gradient(self, weight, grad):
            asked.append("edits")
            grad.mul_(0.5)

    class Projects(STE):
        name = "projects"

        def project(self, weight, out):
            asked.append("projects")
            torch.mul(weight.dense, 0.5, out=out)

    class Speaks(Projects):
        name = "speaks"

        def rule(self, weight):
            return Rule(pruned_gradient_decay=0.5)

    steps: list[Operands] = []
    step = cpu.step_adam
    monkeypatch.setattr(cpu, "step_adam", lambda o, scalars: (steps.append(o), step(o, scalars)))
    for kind, expected in ((STE, ""), (Same, ""), (Edits, "edits"), (Projects, "projects"),
                           (Speaks, "projects")):  # fmt: skip
        model = nn.Linear(16, 8)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        handle = nmrun.sparsify(model, optimizer, kind(), "2:4", exclude=None)
        asked.clear(), steps.clear()
        for _ in range(2):
            model(torch.ones(2, 16)).square().sum().backward()
            optimizer.step()
        assert (set(asked), len(steps)) == ({expected} - {""}, 0 if expected else 2)
        assert kind is not Projects or torch.equal(model.weight, handle.sparse[0].dense * 0.5)


@pytest.mark.parametrize("soft", [False, True])
def test_a_fixed_mask_with_more_than_zeros_beside_it_is_as_the_rule_says(soft):
    class Held(STE):
        name = "held"

        def attach(self, weights, optimizer):
            for weight in weights:
                weight["mask"] = nmrun.sparsity.nm_mask(weight.dense, "2:4")

        def rule(self, weight):
            scale = weight.dense.new_tensor(2.0) if soft else None
            faded = 0.0 if soft else 0.25
            return Rule(mask=weight["mask"], pruned_weight_factor=faded, soft_threshold_scale=scale)

        @property
        def is_sparse(self):
            return soft

    model = nn.Linear(16, 8)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=True)
    handle = nmrun.sparsify(model, optimizer, Held(), "2:4", exclude=None)
    for _ in range(2):
        model(torch.randn(2, 16)).square().sum().backward()
        optimizer.step()
    w, mask = handle.sparse[0].dense, handle.sparse[0]["mask"]
    shrunk = 2 * reference.soft_threshold(w, Pattern(2, 4), 1)
    expected = shrunk if soft else torch.where(mask, w, 0.25 * w)
    torch.testing.assert_close(model.weight.detach(), expected)


class NewMask(STE):
    """It puts a new tensor in the place of its mask after the update."""

    name = "new_mask"

    def attach(self, weights, optimizer):
        for weight in weights:
            weight["mask"] = nmrun.sparsity.nm_mask(weight.dense, "2:4")

    def after_step(self, weights, optimizer):
        self.attach(weights, optimizer)

    def rule(self, weight):
        return Rule(mask=weight["mask"])


class Fades(STE):
    """It counts by itself, not by ``step``."""

    name = "fades"

    def begin(self, pattern, total_steps):
        super().begin(pattern, total_steps)
        self.left = 1.0

    def after_step(self, weights, optimizer):
        self.left /= 2

    def rule(self, weight):
        return Rule(pruned_weight_factor=self.left)

    @property
    def is_sparse(self):
        return False


class Clips(STE):
    """It writes the dense weights after the update."""

    name = "clips"

    def after_step(self, weights, optimizer):
        for weight in weights:
            weight.dense.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("kind", [NewMask, Fades, Clips])
def test_what_a_recipe_changes_after_the_update_counts_at_once(kind):
    """Although the kernel has projected by the rule that held before it."""
    model = nn.Linear(16, 8)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=True)
    handle = nmrun.sparsify(model, optimizer, kind(), "2:4", exclude=None)
    for step in range(1, 4):
        model(torch.randn(2, 16)).square().sum().backward()
        optimizer.step()
        w = handle.sparse[0].dense
        largest = w.abs().unflatten(1, (-1, 4)).argsort(2, descending=True).argsort(2) < 2
        pruned = w * 0.5**step if kind is Fades else torch.zeros_like(w)
        expected = torch.where(largest.flatten(1), w, pruned)
        torch.testing.assert_close(model.weight.detach(), expected)
        assert kind is not Clips or w.abs().max() == torch.tensor(0.1)
    assert handle.pop_events() == []


class TakesTurns(STE):
    """One mask after odd steps, another after even ones. ``kind``: their dtype."""

    name = "takes_turns"
    kind = torch.bool

    def attach(self, weights, optimizer):
        for weight in weights:
            mask = nmrun.sparsity.nm_mask(weight.dense, "2:4")
            weight["even"], weight["odd"] = mask.to(self.kind), (~mask).to(self.kind)

    def rule(self, weight):
        mask = weight["odd" if self.step % 2 else "even"]
        return Rule(mask=mask, pruned_gradient_factor=0.25)


class OfNumbers(TakesTurns):
    kind = torch.float32

    def rule(self, weight):
        return Rule(mask=weight["even"], pruned_gradient_factor=0.25)


@pytest.mark.parametrize("kind", [TakesTurns, OfNumbers])
def test_gradients_are_edited_by_the_mask_of_the_weight_that_has_them(kind):
    """Without averages Adam's step is ``g / (|g| + eps)``, which shows the size of g."""
    model = nn.Linear(16, 8, bias=False)
    options = {"betas": (0.0, 0.0), "weight_decay": 0.0, "fused": True}
    optimizer = optim.AdamW(model.parameters(), lr=0.1, **options)
    first = model.weight.detach().clone()
    even = first.abs().unflatten(1, (-1, 4)).argsort(2, descending=True).argsort(2).flatten(1) < 2
    handle = nmrun.sparsify(model, optimizer, kind(), "2:4", exclude=None)
    dense, masks = first, [even, ~even if kind is TakesTurns else even]
    for step in range(4):
        now, after = masks[step % 2], masks[(step + 1) % 2]
        torch.testing.assert_close(model.weight.detach(), dense * now)
        model.weight.grad = torch.full_like(first, 1e-8)  # as large as eps
        optimizer.step()
        g = torch.where(now, 1e-8, 0.25e-8)
        dense = dense - 0.1 * g / (g + 1e-8)
        torch.testing.assert_close(handle.sparse[0].dense, dense)
        torch.testing.assert_close(model.weight.detach(), dense * after)


def test_a_state_that_was_cleared_counts_from_1():
    """Adam's first step moves every weight by the learning rate, whatever the gradient's size."""
    model = nn.Linear(16, 8, bias=False)
    optimizer = optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0, fused=True)
    (weight,) = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=None).sparse
    for step in range(6):
        if step == 5:
            optimizer.state.clear()
        before, model.weight.grad = weight.dense.clone(), torch.randn(8, 16).sign()
        optimizer.step()
    moved = before - weight.dense
    torch.testing.assert_close(moved, 1e-2 * model.weight.grad, rtol=1e-4, atol=1e-6)
