"""Training through N:M products on the CPU, against masks in dense products: in float32 and in bfloat16,
whose instruction a test emulates where the processor has none.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operands import DEFAULTS, by_default, normal, under_autocast
from perceptrons import batch, mlp, resumes, start, train
from torch import Tensor, nn
from torch.autograd import forward_ad

from nmrun import accelerate, optim, sparsify
from nmrun.errors import ConfigError
from nmrun.fast import measurement
from nmrun.fast.cpu import linear, probe
from nmrun.fast.cpu.kernels import bf16, products
from nmrun.fast.cpu.linear import PRODUCTS, Bf16Forward, Bf16Products, BlockProducts, LinearProducts
from nmrun.fast.measurement import BF16, BF16_BLOCKS, BF16_FORWARD, Times, as_data, from_data
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold, mvue

pytestmark = [
    pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here"),
    pytest.mark.usefixtures("small_layers"),
]
KINDS = {
    "packed": LinearProducts,
    BF16: Bf16Products,
    BF16_FORWARD: Bf16Forward,
    BF16_BLOCKS: BlockProducts,
}
SLOW, FAST = Times(0.1, 2.0, 2.0, 2.0), Times(0.1, 1.0, 1.0, 1.0)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Any:
    """A path, and what the processor may lack for it."""
    if request.param not in (None, "packed"):
        request.getfixturevalue("emulated_bf16")
    return request.param


def packing(recipe: str, pattern: str = "2:4", **options: Any) -> tuple[nn.Module, Any, Any]:
    """A run by packed products."""
    model, optimizer, handle = start(recipe, pattern, **options)
    accelerate(handle, lambda: model(batch(0)[0]), "packed")
    return model, optimizer, handle


def both(recipe: str, pattern: str = "2:4", **options: Any) -> tuple[Any, Any]:
    """The same run by masks and by packed products."""
    return start(recipe, pattern, **options), packing(recipe, pattern, **options)


def found(monkeypatch: pytest.MonkeyPatch, **times: Times) -> None:
    """Times that a probe finds."""
    measured = {name.replace("_", " "): each for name, each in times.items()}
    monkeypatch.setattr(probe, "measure", lambda shape: measured)
    monkeypatch.setattr(measurement, "recall", lambda *_: None)


def near(result: Tensor, expected: Tensor, share: float) -> None:
    result, expected = result.detach().double(), expected.detach().double()
    assert float((result - expected).norm() / expected.norm()) < share


# --- the products ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "pattern", "outputs"),
    [
        *((path, pattern, 22) for path in ("packed", BF16, BF16_FORWARD)
          for pattern in ("2:4", "1:3", "3:8", "1:16", "5:32")),
        *((BF16_BLOCKS, *about) for about in
          (("16:4:8", 32), ("64:4:16", 128), ("48:2:9", 96), ("32:4:32", 32))),
    ],
    indirect=["path"],
)  # fmt: skip
@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("masked", [False, True])
def test_products_and_gradients(
    path: str, pattern: str, outputs: int, stored: str, masked: bool
) -> None:
    """Those of float64, of operands that are rounded; also with another weight for the input gradient."""
    p, low = Pattern.parse(pattern).over(41), path != "packed"
    dtype, share = (torch.bfloat16, 0.003) if low else (torch.float32, 1e-6)
    w, other = (hard_threshold(normal(outputs, 41, seed=s), p, 1).contiguous() for s in (0, 5))
    w = w.t().contiguous().t() if stored == "columns" else w
    packed = KINDS[path]((outputs, 41), dtype, p, gradient_is_faster=True)
    bias, dz = normal(outputs, seed=3), normal(2, 35, outputs, seed=2).to(dtype)
    kept = w != 0  # a block has all gradients of the columns that it keeps
    if path == BF16_BLOCKS:
        kept = kept.unflatten(0, (-1, p.v)).any(1).repeat_interleave(p.v, 0)
    for back in (None, other):
        packed.write(w, back, masked)
        x, weight = normal(2, 35, 41, seed=1).to(dtype).requires_grad_(), w.clone().requires_grad_()
        added = bias.clone().requires_grad_()
        z = packed(x, weight, added)
        z.backward(dz)
        assert (z.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)
        exact, backward = (t.to(dtype).double() for t in (w, w if back is None else back))
        near(z, x.double() @ exact.t() + bias.double(), share)
        near(x.grad, dz.double() @ backward, share)
        near(added.grad, dz.double().sum((0, 1)), 0.01)
        whole = dz.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
        near(weight.grad, whole * kept if masked else whole, 1e-6 if masked else share)
        assert bool((weight.grad[~kept] == 0).all()) is (masked or bool(kept.all()))


@pytest.mark.parametrize("path", KINDS, indirect=True)
@pytest.mark.parametrize("other", DEFAULTS, ids=str)
def test_they_do_not_depend_on_what_torch_takes_by_default(
    path: str, other: torch.dtype | torch.device
) -> None:
    p = Pattern.parse("16:4:8" if path == BF16_BLOCKS else "2:4")
    shape = probe.LinearShape(
        32, 40, 70, torch.float32 if path == "packed" else torch.bfloat16, p.over(40)
    )
    with by_default(other):
        test_products_and_gradients(path, str(p), 32, "rows", True)
        assert not probe.measure(shape)[path].wrong


@pytest.mark.slow
@pytest.mark.parametrize("path", ["packed", BF16], indirect=True)
def test_operators_are_as_torch_wants_them(path: str) -> None:
    dtype = torch.float32 if path == "packed" else torch.bfloat16
    w = hard_threshold(normal(8, 16), Pattern(2, 4), 1)
    packed = KINDS[path]((8, 16), dtype, Pattern(2, 4))
    packed.write(w, None)
    parts = [packed.parts(kind) for kind in PRODUCTS]
    for values, index, *_, start_ in parts:  # what lies behind the non-zeros is nobody's
        values[int(start_[-1]) :], index[int(start_[-1]) :] = 0, 0
    x, dz = normal(5, 16).to(dtype).requires_grad_(), normal(5, 8).to(dtype)
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


@pytest.mark.parametrize("path", ["packed", BF16], indirect=True)
@pytest.mark.parametrize("tiny", [0.0, 1e-42])
def test_a_kept_weight_that_is_zero_gets_its_gradient(path: str, tiny: float) -> None:
    """The packed matrix does not know it from a pruned one, nor one that is rounded to zero."""
    p, dtype = Pattern(2, 4), torch.float32 if path == "packed" else torch.bfloat16
    w, x, dz = hard_threshold(normal(8, 16), p, 1), normal(5, 16), normal(5, 8).to(dtype)
    w[0, w[0].nonzero()[:1]] = tiny
    packed = KINDS[path]((8, 16), dtype, p, gradient_is_faster=True)
    packed.write(w, None, masked=True)
    weight = w.clone().requires_grad_()
    packed(x, weight, None).backward(dz)
    mask = w != 0 if tiny and path == "packed" else torch.ones_like(w)
    near(weight.grad, dz.double().t() @ x.to(dtype).double() * mask, 0.01)


def test_a_backward_pass_of_an_earlier_step_raises() -> None:
    """As torch's own linear layer does, whose weight was changed in place."""
    model, optimizer, _ = packing("ste")
    x, target = batch(0)
    loss, stale = (F.cross_entropy(model(x), target) for _ in range(2))
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.usefixtures("emulated_bf16")
def test_the_probe_finds_them_right() -> None:
    times = probe.measured(probe.LinearShape(64, 36, 70, torch.bfloat16, Pattern(2, 4)))
    assert set(times) == {"dense", "packed", BF16, BF16_FORWARD}
    for path in (BF16, BF16_FORWARD):
        assert not times[path].wrong
        assert min(times[path].pack, times[path].forward, times[path].weight_gradient) > 0
    blocks = probe.measured(probe.LinearShape(64, 64, 70, torch.bfloat16, Pattern.parse("32:4:16")))
    assert set(blocks) == {"dense", "packed", BF16, BF16_FORWARD, BF16_BLOCKS}
    assert not blocks[BF16_BLOCKS].wrong


@pytest.mark.usefixtures("emulated_bf16")
def test_they_are_right_of_a_rounded_weight() -> None:
    """Of half a million results, some near zero are far from those of the weight as it was."""
    results = probe.measured(probe.LinearShape(512, 512, 1024, torch.bfloat16, Pattern(1, 16)))
    assert not any(results[path].wrong for path in ("packed", BF16, BF16_FORWARD))


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


def by_path(recipe: str, path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Model, optimizer and handle of a run in bfloat16 whose layers take a path."""
    times = {name: FAST if name == path else SLOW for name in ("dense", *KINDS)}
    found(monkeypatch, **times)
    model, optimizer, handle = start(recipe, **options)
    choices = accelerate(handle, under_autocast(model, batch(0)[0]))
    assert {c.path for c in choices} == {None if path == "dense" else path}
    if path != "dense":
        assert {type(w.layer.packed) for w in handle.sparse} == {KINDS[path]}
    return model, optimizer, handle


IN_BF16: dict[str, dict[str, Any]] = {
    "sr_ste": {}, "step": {"switch": 0.5}, "asp": {}, "ste_periodic": {"interval": 3},
    "ste": {"input_gradient": "double_prune", "exclude": ["4"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "recipe"),
    [(path, recipe) for path in KINDS for recipe in IN_BF16
     if path != BF16_BLOCKS or recipe in ("sr_ste", "step", "asp")],
    indirect=["path"],
)  # fmt: skip
def test_a_run_in_bfloat16_goes_as_it_does_with_masks_alone(
    path: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = IN_BF16[recipe]
    if path == BF16_BLOCKS:
        options = {**options, "pattern": "16:4:8", "pad": True, "exclude": ["4"]}
    expected, losses = (
        train(*by_path(recipe, name, monkeypatch, **options)[:2], low=True)
        for name in ("dense", path)
    )
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("width", [16, 35, 64])
def test_an_input_of_another_width_is_refused_as_by_torch(width: int) -> None:
    """Packed products would read past its end, or not all of it."""
    model, _, _ = packing("ste")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[0](torch.randn(4, width))


def test_a_layer_whose_groups_run_along_its_outputs_stays_dense() -> None:
    model, _, handle = start("ste", dims={r"2\.weight": 0})
    choices = accelerate(handle, lambda: model(batch(0)[0]), "packed")
    assert [c.path for c in choices if not c.always_dense] == ["packed", None, "packed"]
    assert "groups do not run along its inputs" in choices[1].reason
    x, used = batch(1)[0], [weight.weight for weight in handle.sparse]
    for layer, weight in zip(model[::2], used, strict=True):
        z = layer(x)
        torch.testing.assert_close(z, F.linear(x, weight, layer.bias))
        x = z.relu()


def test_a_model_that_is_cast_afterwards() -> None:
    """Its weights are packed from what they are stored as."""
    (model, optimizer, handle), plain, (x, target) = start("sr_ste"), mlp(), batch(0)
    accelerate(handle, under_autocast(model, x), "packed")
    model.bfloat16(), plain.bfloat16()
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        z = model(x.bfloat16())
        torch.testing.assert_close(z, plain(x.bfloat16()), rtol=2e-2, atol=2e-2)
        F.cross_entropy(z, target).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_torch_follows_as_through_a_plain_model() -> None:
    """Packed products have no rules of its transforms; a tangent would be lost without a word."""
    model, _, _ = packing("ste")
    plain, (x, _) = mlp(), batch(0)
    plain.load_state_dict(model.state_dict())

    def tangent(net: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            z = net(forward_ad.make_dual(x, x.sin()))
            return forward_ad.unpack_dual(z).tangent

    for follow in (
        tangent,
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


@pytest.mark.parametrize("path", [None, pytest.param(BF16, marks=pytest.mark.slow)], indirect=True)
def test_compiled_as_one_graph(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    low = path is not None
    (plain, optimizer, _), (model, other, _) = (
        by_path("sr_ste", path, monkeypatch) if path else packing("sr_ste") for _ in range(2)
    )
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = train(plain, optimizer, low=low)
    assert train(whole, other, low=low) == pytest.approx(expected, rel=1e-2 if low else 1e-3)


def test_recomputed_activations_give_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    (model, optimizer, _), (other, again, _) = packing("sr_ste"), packing("sr_ste")
    losses = train(model, optimizer)
    assert losses == train(lambda x: checkpoint(other, x, use_reentrant=False), again)


@pytest.mark.parametrize("path", [None, BF16, BF16_FORWARD], indirect=True)
def test_resumed_equals_uninterrupted(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> tuple[nn.Module, Any]:
        if path is None:
            return packing("step", switch=0.5)[:2]
        return by_path("step", path, monkeypatch, switch=0.5)[:2]

    resumes(begin, low=path is not None)


def test_evaluation_and_state_dicts_know_nothing() -> None:
    model, optimizer, handle = packing("ste")
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
    found(monkeypatch, dense=SLOW, packed=FAST)
    runs = []
    for stop in (8, 5, 0):
        model, optimizer, handle = start("ste_periodic", interval=100)
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
    model, _, handle = start("ste_periodic", "1:4", interval=100)
    accelerate(handle, lambda: model(batch(0)[0]), "packed", whole_gradients=looks)
    for weight in handle.sparse:
        weight.layer.packed.gradient_is_faster = True
    handle.refresh()
    x, target = batch(0)
    F.cross_entropy(model(x), target).backward()
    pruned = model[2].weight == 0
    assert bool((model[2].weight.grad[pruned] == 0).all()) is not looks


# --- the choice -----------------------------------------------------------------------------------


def choose(mode: str = "auto", **options: Any) -> Any:
    model, _, handle = start("ste", "1:4")
    return accelerate(handle, lambda: model(batch(0)[0]), mode, **options)


@pytest.mark.parametrize(
    ("packed", "taken"),
    [
        (Times(0.5, 1.0, 1.0, 2.0), True),
        (Times(2.5, 1.0, 1.0, 0.1), False),
        (Times(0.0, 1.95, 1.95, 2.0), False),  # faster by less than trials differ
        (Times(wrong="WRONG results"), False),
    ],
)
def test_what_is_slower_or_wrong_is_left_dense(
    packed: Times, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, dense=Times(0.0, 2.0, 2.0, 2.0), packed=packed)
    choices = choose()
    assert [c.path for c in choices] == ["packed" if taken else None] * 3
    assert ("N:M products in 3 of 3" in "\n".join(measurement.lines(choices))) is taken
    if packed.wrong:
        with pytest.raises(ConfigError, match=r"no layer can be accelerated here .*WRONG"):
            choose("force")


def test_small_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SMALLEST", 70 * 64 * 48)
    found(monkeypatch, dense=SLOW, packed=FAST)
    choices = choose()
    assert [c.path for c in choices] == [None, "packed", None]
    assert "too small to gain (36 to 64, 70 tokens, float32 1:4" in choices[0].reason


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_what_is_missing() -> None:
    assert measurement.lines(choose()) == [
        "masks only, nothing is accelerated: no C compiler works here (cc, gcc, clang or $CC)"
    ]


@pytest.mark.usefixtures("emulated_bf16")
def test_force_and_packed_take_the_fastest_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = Times(0.1, 3.0, 3.0, 3.0)
    found(monkeypatch, dense=FAST, packed=slower, packed_bf16=SLOW)
    model, _, handle = start("ste")
    sample = under_autocast(model, batch(0)[0])
    for mode, path in (("auto", None), ("force", BF16), ("packed", BF16)):
        assert [c.path for c in accelerate(handle, sample, mode)] == [path] * 3
    report = "\n".join(measurement.lines(accelerate(handle, sample, "force")))
    assert "packed bf16: 0.weight, 36 to 64, 70 tokens, bfloat16 2:4: dense 2.100 ms" in report


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
    found(monkeypatch, dense=SLOW, packed=FAST)
    before = choose()
    data = as_data({str(c.shape): c.times for c in before})
    found(monkeypatch, dense=FAST, packed=SLOW)
    again = choose(known=from_data(data))
    assert [c.path for c in again] == [c.path for c in before] == ["packed"] * 3
    assert [c.path for c in choose()] == [None] * 3


@pytest.mark.usefixtures("emulated_bf16")
def test_but_not_those_that_its_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, handle = start("ste")
    shape = probe.LinearShape(64, 36, 70, torch.bfloat16, Pattern(2, 4))
    known = from_data(as_data({str(shape): {"dense": SLOW, "packed": SLOW, BF16: FAST}}))
    found(monkeypatch, dense=SLOW, packed=FAST)
    sample = under_autocast(model, batch(0)[0])
    assert accelerate(handle, sample, known=known)[0].path == BF16
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    assert accelerate(handle, sample, known=known)[0].path == "packed"


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
