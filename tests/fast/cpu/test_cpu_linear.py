"""Training through N:M products on the CPU, against masks in dense products."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operands import under_autocast
from perceptrons import batch, mlp, resumes, train
from torch import nn

from nmrun import accelerate, optim, sparsify
from nmrun.errors import ConfigError
from nmrun.fast import measurement
from nmrun.fast.cpu import linear, probe
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.linear import LinearProducts
from nmrun.fast.measurement import Times, as_data, from_data
from nmrun.patterns import Pattern
from nmrun.sparsity.estimators import mvue
from nmrun.sparsity.masks import hard_threshold

pytestmark = [
    pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here"),
    pytest.mark.usefixtures("small_layers"),
]


def both(
    recipe: str, pattern: str = "2:4", **options: Any
) -> tuple[tuple[nn.Module, Any, Any], tuple[nn.Module, Any, Any]]:
    """The same run by masks and by packed products."""
    runs = []
    for packed in (False, True):
        model = mlp()
        optimizer = optim.AdamW(model.parameters(), 1e-2)
        handle = sparsify(
            model, optimizer, recipe, pattern, total_steps=8, **{"exclude": None, **options}
        )
        if packed:
            accelerate(handle, lambda model=model: model(batch(0)[0]), "packed")
        runs.append((model, optimizer, handle))
    return runs[0], runs[1]


# --- the products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["2:4", "1:3", "3:8", "1:16"])
@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_gradients_are_those_of_finite_differences(pattern: str, stored: str) -> None:
    p = Pattern.parse(pattern).over(21)
    w = hard_threshold(torch.randn(10, 21), p, 1)
    w = w.t().contiguous().t() if stored == "columns" else w.contiguous()
    packed = LinearProducts((10, 21), torch.float32, p)
    packed.write(w, None)
    inputs = [t.requires_grad_() for t in (torch.randn(2, 3, 21), torch.randn(10))]
    # linear in each input: a wide difference has no error but rounding
    torch.autograd.gradcheck(
        lambda x, b: packed(x, w, b), inputs, eps=0.5, atol=1e-4, rtol=1e-4, nondet_tol=0
    )
    x, weight = torch.randn(7, 21), w.detach().clone().requires_grad_()
    dz = torch.randn(7, 10)
    packed(x, weight, None).backward(dz)
    assert torch.allclose(weight.grad, dz.t() @ x, atol=1e-5)  # of pruned weights too


def test_a_backward_pass_of_an_earlier_step_raises() -> None:
    """As torch's own linear layer does, whose weight was changed in place."""
    _, (model, optimizer, _) = both("ste")
    x, target = batch(0)
    loss, stale = (F.cross_entropy(model(x), target) for _ in range(2))
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_operators_are_as_torch_wants_them() -> None:
    p = Pattern(2, 4)
    w = hard_threshold(torch.randn(8, 16), p, 1)
    packed = LinearProducts((8, 16), torch.float32, p)
    packed.write(w, None)
    parts = [[getattr(packed, f"{kind}_{part}") for part in ("values", "index", "start")]
             for kind in ("forward", "backward")]  # fmt: skip
    for values, index, start in parts:  # what lies behind the non-zeros is nobody's
        values[int(start[-1]) :], index[int(start[-1]) :] = 0, 0
    x, dz = torch.randn(5, 16, requires_grad=True), torch.randn(5, 8)
    weight = w.clone().requires_grad_()
    torch.library.opcheck(linear.linear, (x, weight, None, *parts, "dense"))
    torch.library.opcheck(linear.multiply, (dz, parts[1], 16))
    torch.library.opcheck(linear.sampled, (dz, x.detach(), parts[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mvue_is_computed_from_the_estimate(dtype: torch.dtype) -> None:
    p = Pattern(2, 4)
    w = hard_threshold(torch.randn(8, 16), p, 1)
    x, dz = torch.randn(32, 16), torch.randn(32, 8).to(dtype)
    packed = LinearProducts((8, 16), dtype, p, True)
    packed.write(w, None)
    weight = w.clone().requires_grad_()
    torch.manual_seed(5)
    packed(x, weight, None, Pattern(1, 4)).backward(dz)
    torch.manual_seed(5)
    expected = mvue(dz, "1:4", 0).t() @ x.to(dtype)
    assert torch.allclose(weight.grad, expected.float(), rtol=1e-2, atol=1e-5)
    assert not torch.allclose(weight.grad, dz.float().t() @ x, atol=1e-2)


def test_a_kept_weight_that_is_zero_gets_its_gradient() -> None:
    """The packed matrix does not know it from a pruned one."""
    p = Pattern(2, 4)
    w = hard_threshold(torch.randn(8, 16), p, 1)
    x, dz = torch.randn(5, 16), torch.randn(5, 8)
    packed = LinearProducts((8, 16), torch.float32, p, gradient_is_faster=True)
    for zeros in (0, 1):
        w[0, w[0].nonzero()[:zeros]] = 0.0
        packed.write(w, None, masked=True)
        weight = w.clone().requires_grad_()
        packed(x, weight, None).backward(dz)
        mask = torch.ones_like(w) if zeros else w != 0
        assert torch.allclose(weight.grad, dz.t() @ x * mask, atol=1e-5)


# --- training -------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "ste": {}, "sr_ste": {"decay": 1e-2}, "s_ste": {}, "asp": {}, "step": {"switch": 0.5},
    "t_sr_ste": {"interval": 3}, "ste_periodic": {"interval": 3}, "lbc": {},
    "mdgf_linear": {"dense": 0.25, "final": 0.25}, "sdgf_stepwise": {"dense": 0.25, "final": 0.25},
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_as_it_does_with_masks_alone(recipe: str) -> None:
    exclude = ["4"] if recipe == "t_sr_ste" else []
    masks, packed = both(recipe, exclude=exclude, **RECIPES[recipe])
    ranked = recipe == "lbc"  # roundings may put two candidates in another order
    expected, losses = train(*masks[:2]), train(*packed[:2])
    assert losses == pytest.approx(expected, rel=1e-2 if ranked else 1e-3)
    assert any(w.layer.packed.forward_start[-1] for w in packed[2].sparse)
    if ranked:
        return
    for a, b in zip(masks[0].parameters(), packed[0].parameters(), strict=True):
        assert (a - b).abs().max() < 5e-3  # Adam turns roundings near 0 into steps


@pytest.mark.parametrize("option", [{}, {"input_gradient": "double_prune"}])
def test_a_gradient_that_is_not_a_number_does_what_it_does_with_masks_alone(
    option: dict[str, str],
) -> None:
    """The projection keeps a NaN beside the N largest: a group may have more than N non-zeros."""
    outputs = []
    for model, optimizer, _ in both("sr_ste", **option):
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        model[0].weight.grad.view(-1)[:3] = torch.nan
        optimizer.step()
        assert model[0].weight.isnan().sum() == 3
        outputs.append(model[0](x))
    assert torch.allclose(*outputs, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert outputs[0].isnan().any(0).sum() == 1


@pytest.mark.parametrize("pattern", ["1:4", "3:7", "1:16", "5:32"])
def test_any_pattern_with_a_tail(pattern: str) -> None:
    masks, packed = both("ste", pattern, pad=True)
    assert train(*packed[:2]) == pytest.approx(train(*masks[:2]), rel=1e-3)


@pytest.mark.parametrize("option", [{"input_gradient": "double_prune"}, {"mvue": "2:4"}])
def test_with_other_backward_products(option: dict[str, str]) -> None:
    masks, packed = both("ste", exclude=["4"], **option)
    torch.manual_seed(1)
    expected = train(*masks[:2])
    torch.manual_seed(1)
    assert train(*packed[:2]) == pytest.approx(expected, rel=1e-3)


def test_under_autocast_to_bfloat16() -> None:
    masks, _ = both("sr_ste")
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    handle = sparsify(model, optimizer, "sr_ste", "2:4", total_steps=8, exclude=None)
    choices = accelerate(handle, under_autocast(model, batch(0)[0]), "packed")
    assert {c.shape.dtype for c in choices} == {torch.bfloat16}
    expected = train(*masks[:2], low=True)
    assert train(model, optimizer, low=True) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("width", [16, 35, 64])
def test_an_input_of_another_width_is_refused_as_by_torch(width: int) -> None:
    """Packed products would read past its end, or not all of it."""
    _, (model, _, _) = both("ste")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[0](torch.randn(4, width))


def test_a_model_that_is_cast_afterwards() -> None:
    """Its weights are packed from what they are stored as."""
    model, plain, (x, target) = mlp(), mlp(), batch(0)
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    handle = sparsify(model, optimizer, "sr_ste", "2:4", total_steps=8, exclude=None)
    accelerate(handle, under_autocast(model, x), "packed")
    model.bfloat16(), plain.bfloat16()
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        z = model(x.bfloat16())
        torch.testing.assert_close(z, plain(x.bfloat16()), rtol=2e-2, atol=2e-2)
        F.cross_entropy(z, target).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_torch_func_follows_as_through_a_plain_model() -> None:
    """Packed products have no rules of its transforms; a tangent would be lost without a word."""
    _, (model, _, _) = both("ste")
    plain, (x, _) = mlp(), batch(0)
    plain.load_state_dict(model.state_dict())
    for follow in (
        lambda net: torch.func.jvp(net, (x,), (x.sin(),))[1],
        lambda net: torch.func.grad(lambda x: net(x).square().sum())(x),
        lambda net: torch.vmap(net)(x),
    ):
        torch.testing.assert_close(follow(model), follow(plain))


def test_gradients_of_gradients_are_refused() -> None:
    """The gradient of the input would have none for the weight."""
    model, x = nn.Sequential(nn.Linear(36, 8)), batch(0)[0].requires_grad_()
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "2:4", total_steps=8, exclude=None
    )
    accelerate(handle, lambda: model(x), "packed")
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_the_sample_leaves_batch_norm_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(36, 64), nn.BatchNorm1d(64))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = sparsify(model, optim.AdamW(model.parameters()), "dense", total_steps=8, exclude=None)
    accelerate(handle, lambda: model(batch(0)[0]))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_compiled_as_one_graph() -> None:
    (plain, optimizer, _), (model, other, _) = both("sr_ste")
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = train(plain, optimizer)
    assert train(whole, other) == pytest.approx(expected, rel=1e-3)


def test_recomputed_activations_give_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    _, (model, optimizer, _) = both("sr_ste")
    _, (other, again, _) = both("sr_ste")
    losses = train(model, optimizer)
    assert losses == train(lambda x: checkpoint(other, x, use_reentrant=False), again)


def test_resumed_equals_uninterrupted() -> None:
    resumes(lambda: both("step", switch=0.5)[1][:2])


def test_evaluation_and_state_dicts_know_nothing() -> None:
    _, (model, optimizer, handle) = both("ste")
    train(model, optimizer, range(2))
    x, _ = batch(3)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain(x))
    with handle.dense_weights():
        assert not torch.equal(model.train()(x), plain(x))


def test_accelerated_after_loading_it_goes_on_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first step computes the gradients of kept weights alone too."""
    times = {"dense": Times(0.0, 2.0, 2.0, 2.0), "packed": Times(0.0, 1.0, 1.0, 1.0)}
    monkeypatch.setattr(probe, "measure", lambda shape: times)
    runs = []
    for stop in (8, 5, 0):
        model = mlp()
        optimizer = optim.AdamW(model.parameters(), 1e-2)
        handle = sparsify(
            model, optimizer, "ste_periodic", "2:4", total_steps=8, interval=100, exclude=None
        )
        if not stop:
            for part, saved in zip((model, optimizer), runs[-1], strict=True):
                part.load_state_dict(copy.deepcopy(saved.state_dict()))
        accelerate(handle, lambda model=model: model(batch(0)[0]))
        train(model, optimizer, range(stop) if stop else range(5, 8))
        runs.append((model, optimizer))
    (whole, _), _, (resumed, _) = runs
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


@pytest.mark.parametrize("looks", [False, True])
def test_masked_gradients_are_sampled_unless_the_loop_looks_at_all(looks: bool) -> None:
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    handle = sparsify(
        model, optimizer, "ste_periodic", "1:4", total_steps=8, interval=100, exclude=None
    )
    accelerate(handle, lambda: model(batch(0)[0]), "packed", whole_gradients=looks)
    for weight in handle.sparse:
        weight.layer.packed.gradient_is_faster = True
    handle.refresh()
    x, target = batch(0)
    F.cross_entropy(model(x), target).backward()
    pruned = model[2].weight == 0
    assert bool((model[2].weight.grad[pruned] == 0).all()) is not looks


def test_lbc_scores_need_the_gradients_of_pruned_weights() -> None:
    _, (model, optimizer, handle) = both("lbc")
    train(model, optimizer)
    assert handle.recipe.is_sparse is False or not handle.recipe.masks_gradient(handle.sparse[0])


# --- the choice -----------------------------------------------------------------------------------


def choose(times: dict[str, Times], monkeypatch: pytest.MonkeyPatch, mode: str = "auto") -> Any:
    monkeypatch.setattr(probe, "measure", lambda shape: times)
    model = mlp()
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "1:4", total_steps=8, exclude=None
    )
    return model, handle, accelerate(handle, lambda: model(batch(0)[0]), mode)


def test_what_is_slower_or_wrong_is_left_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Times(0.0, 2.0, 2.0, 2.0)
    cases = {
        "faster": (Times(0.5, 1.0, 1.0, 2.0), True),
        "slower": (Times(2.5, 1.0, 1.0, 0.1), False),
        "faster by less than trials differ": (Times(0.0, 1.95, 1.95, 2.0), False),
        "wrong": (Times(wrong="WRONG results"), False),
    }
    for name, (packed, taken) in cases.items():
        monkeypatch.setattr(measurement, "recall", lambda *_: None)
        _model, _handle, choices = choose({"dense": dense, "packed": packed}, monkeypatch)
        assert [c.path for c in choices] == ["packed" if taken else None] * 3, name
        report = "\n".join(measurement.lines(choices))
        assert ("N:M products in 3 of 3" in report) is taken
    with pytest.raises(ConfigError, match=r"no layer can be accelerated here .*WRONG"):
        choose({"dense": dense, "packed": Times(wrong="WRONG results")}, monkeypatch, "force")


def test_small_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SMALLEST", 70 * 64 * 48)
    _, _, choices = choose(
        {"dense": Times(0, 2, 2, 2), "packed": Times(0, 1, 1, 1)}, monkeypatch, "auto"
    )
    assert [c.path for c in choices] == [None, "packed", None]
    assert "too small to gain (36 to 64, 70 tokens, float32 1:4" in choices[0].reason


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_what_is_missing() -> None:
    model = mlp()
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "2:4", total_steps=8, exclude=None
    )
    choices = accelerate(handle, lambda: model(batch(0)[0]))
    assert measurement.lines(choices) == [
        "masks only, nothing is accelerated: no C compiler works here (cc, gcc, clang or $CC)"
    ]


def test_measured_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = probe.LinearShape(64, 36, 70, torch.float32, Pattern(2, 4))
    first = probe.measured(shape)
    assert set(first) == {"dense", "onednn", "packed"}
    assert not first["packed"].wrong
    monkeypatch.setattr(probe, "measure", lambda shape: pytest.fail("measured again"))
    assert probe.measured(shape) == first
    other = {"dense": Times(0.0, 1.0, 1.0, 1.0)}
    monkeypatch.setattr(probe, "measure", lambda shape: other)
    monkeypatch.setattr(probe, "_version", lambda: "of another version")
    assert probe.measured(shape) == other


def test_a_run_that_goes_on_takes_the_paths_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "recall", lambda *_: None)
    fast, slow = Times(0.0, 1.0, 1.0, 1.0), Times(0.0, 2.0, 2.0, 2.0)
    _, _, before = choose({"dense": slow, "packed": fast}, monkeypatch)
    data = as_data({str(c.shape): c.times for c in before})
    monkeypatch.setattr(probe, "measure", lambda shape: {"dense": fast, "packed": slow})
    model = mlp()
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "1:4", total_steps=8, exclude=None
    )
    again = accelerate(handle, lambda: model(batch(0)[0]), known=from_data(data))
    assert [c.path for c in again] == [c.path for c in before] == ["packed"] * 3
    assert [c.path for c in accelerate(handle, lambda: model(batch(0)[0]))] == [None] * 3


def test_other_work_on_the_machine_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A takes 2 ms and B 3 ms; in most rounds another process takes the core from A for 5 ms."""
    now, rounds = [0.0], itertools.count()

    def a() -> None:
        now[0] += 0.002 if next(rounds) % 4 == 2 else 0.007

    def b() -> None:
        now[0] += 0.003

    monkeypatch.setattr(probe, "ROUNDS", 9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    assert probe.side_by_side(a, b) == pytest.approx([2.0, 3.0])


def test_a_single_thread_is_timed_by_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other processes do meanwhile: A waits 5 ms of the wall each time, B none."""
    work, wall = [0.0], [0.0]

    def a() -> None:
        work[0], wall[0] = work[0] + 0.002, wall[0] + 0.007

    def b() -> None:
        work[0], wall[0] = work[0] + 0.003, wall[0] + 0.003

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(probe.time, "thread_time", lambda: work[0])
    assert probe.side_by_side(a, b) == pytest.approx([2.0, 3.0])
