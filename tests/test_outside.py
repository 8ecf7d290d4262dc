"""Weights that others write, cast, copy or differentiate; steps that fail; closures."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import pydoc

import pytest
import torch
from torch import nn
from training import (
    KINDS,
    TOTAL,
    attach,
    batch,
    bits,
    by_sgd,
    everything,
    net,
    recipe_tensors,
    start,
    train,
)

import nmrun
from nmrun.errors import ConfigError, RunError
from nmrun.sparsity import hard_threshold
from nmrun.step import stepper as steppers


def events(handle: nmrun.Handle) -> list[str]:
    return [str(event) for event in handle.pop_events() if event.kind == "outside"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "init", "in place"])
@pytest.mark.filterwarnings("ignore:nmrun")
def test_what_was_written_is_the_new_dense_weight(how, fused):
    """And the rule goes by its mask at once."""
    model, optimizer, handle = start("sr_ste", fused=fused)
    train(model, optimizer, range(3))
    assert events(handle) == []
    with torch.no_grad():
        if how == "load_state_dict":
            model.load_state_dict(net(7).state_dict())
        elif how == "init":
            torch.manual_seed(3)
            nn.init.normal_(model[0].weight)
        else:
            model[0].weight.add_(1.0)
            model[2].weight.mul_(-1.0)
    values = [w.parameter.detach().clone() for w in handle.sparse]
    moments = {n: optimizer.state[p] for n, p in model.named_parameters()}
    model(batch(3)).square().mean().backward()
    grads = [w.grad.clone() for w in handle.sparse if w.grad is not None]
    expected = []
    for weight, value, grad in zip(handle.sparse, values, grads, strict=True):
        p = nn.Parameter(value.clone())
        stepper = torch.optim.AdamW([p], lr=0.02, fused=fused)
        state = {k: v.clone() for k, v in moments[weight.name].items() if not k.startswith("nmrun")}
        stepper.state[p] = state
        changed = how != "init" or weight.name == "0.weight"
        dense = value if changed else weight.dense.clone()
        p.data = dense.clone()
        p.grad = grad + 0.1 * (dense - hard_threshold(dense, "2:4"))
        stepper.step()
        expected.append(p.detach())
    optimizer.step()
    optimizer.zero_grad()
    (event,) = events(handle)
    names = "0.weight" if how == "init" else "0.weight and 1 more"
    assert event == (
        f"step 3: {names} changed outside the optimizer: the new values are the dense weights"
    )
    for weight, dense in zip(handle.sparse, expected, strict=True):
        torch.testing.assert_close(weight.dense, dense, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight.parameter, hard_threshold(weight.dense, "2:4"))
    train(model, optimizer, range(4, 6))
    assert events(handle) == []


def test_writing_what_is_there_already_changes_nothing():
    """As when model and optimizer of a checkpoint were loaded, or weights were clipped in vain."""
    (model, optimizer, handle), plain = start("sr_ste"), start("sr_ste")
    for step in range(6):
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        train(model, optimizer, [step])
        train(*plain[:2], [step])
    assert events(handle) == []
    assert everything(model, optimizer, handle) == everything(*plain)


@pytest.mark.filterwarnings("ignore:nmrun")
def test_a_write_past_the_version_is_noticed_after_a_while(monkeypatch):
    """A step writes the projection again, so it is only before that step that it can be seen.
    After one that was noticed, each step is looked at.
    """
    assert steppers.COMPARED_EVERY <= 500
    monkeypatch.setattr(steppers, "COMPARED_EVERY", 8)
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(4))
    noticed = []
    for step in range(4, 10):
        expected = torch.randn(8, 16)
        model[0].weight.data.copy_(expected)
        model(batch(step)).square().mean().backward()
        dense = handle.sparse[0].dense.clone()
        if step == 9:
            with pytest.raises(RunError, match="before each of 3 steps"):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
        noticed += [step for _ in events(handle)]
        from_written = (handle.sparse[0].dense - expected).abs().max() < 0.1
        from_before = (handle.sparse[0].dense - dense).abs().max() < 0.1
        assert (bool(from_written), bool(from_before)) == (step in noticed, step not in noticed)
    assert noticed == [7, 8]


@pytest.mark.filterwarnings("ignore:nmrun")
def test_other_memory_with_other_values_is_noticed_at_once():
    """As torch's ``vector_to_parameters`` gives it; with the same values it changes nothing."""
    (model, optimizer, handle), plain = start("sr_ste"), start("sr_ste")
    train(model, optimizer, range(4))
    train(*plain[:2], range(4))
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach().clone(), model.parameters()
    )
    train(model, optimizer, [4])
    train(*plain[:2], [4])
    assert everything(model, optimizer, handle) == everything(*plain)
    vector = torch.randn_like(nn.utils.parameters_to_vector(model.parameters()))
    nn.utils.vector_to_parameters(vector.clone(), model.parameters())
    train(model, optimizer, [5])
    assert len(events(handle)) == 1
    assert (handle.sparse[0].dense - vector[:128].view(8, 16)).abs().max() < 0.1


def test_a_start_that_is_written_past_the_version_is_the_start():
    """As by the idiom ``module.weight.data.normal_()``."""
    model, optimizer, handle = start("sr_ste")
    written = torch.randn(8, 16)
    model[0].weight.data.copy_(written)
    train(model, optimizer, [0])
    assert (handle.sparse[0].dense - written).abs().max() < 0.1
    assert torch.equal(model[0].weight, hard_threshold(handle.sparse[0].dense, "2:4"))


@pytest.mark.filterwarnings("ignore:nmrun")
def test_weights_that_are_no_numbers_were_not_written_from_outside():
    model, optimizer, handle = start("sr_ste")
    model(torch.full((2, 16), torch.nan)).sum().backward()
    optimizer.step()
    train(model, optimizer, range(1, 5))
    assert events(handle) == []


def test_in_a_dense_phase_the_parameter_is_the_weight():
    model, optimizer, handle = start("asp")
    plain = net()
    other = nmrun.optim.AdamW(plain.parameters(), lr=0.02)
    for step in range(5):
        if step == 2:
            for m in (model, plain):
                m.load_state_dict(net(4).state_dict())
        train(model, optimizer, [step])
        train(plain, other, [step])
        if step < 4:
            assert bits(model.state_dict()) == bits(plain.state_dict())
            assert recipe_tensors(optimizer) == {}
    assert events(handle) == []
    assert torch.equal(model[0].weight, hard_threshold(plain[0].weight.detach(), "2:4"))


# --- steps that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "t_sr_ste", "bi_mask", "s_ste"])
def test_a_step_that_raises_in_the_middle_recovers(recipe, fused, monkeypatch):
    """The next one begins with the projected weights, and is that of an optimizer without it."""
    (model, optimizer, handle), plain = start(recipe, fused=fused), start(recipe, fused=fused)

    def gradients(model, step):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    for step in range(TOTAL):
        if step == 3:
            gradients(model, 77)
            with monkeypatch.context() as patch:
                patch.setattr("nmrun.optim.adam.stock_step", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            assert [w.shows_dense for w in handle.sparse] == [True, True]
        for m, o, _ in ((model, optimizer, handle), plain):
            gradients(m, step)
            o.step()
        assert everything(model, optimizer, handle) == everything(*plain)
    handle.finalize()


@pytest.mark.parametrize("then", ["a closure", "refresh"])
def test_the_forward_pass_is_nm_again_after_a_step_that_failed(then):
    (model, optimizer, handle), plain = start("sr_ste"), start("sr_ste")
    for each in (model, optimizer), plain[:2]:
        train(*each, range(3))
    fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, [3])
    fails.remove()
    seen = []

    def evaluated() -> torch.Tensor:
        optimizer.zero_grad()
        seen.append(bits(list(model.parameters())))
        loss = model(batch(3)).square().mean()
        loss.backward()
        return loss

    used = bits(list(plain[0].parameters()))
    if then == "refresh":
        handle.refresh()
        evaluated()
        optimizer.step()
    else:
        optimizer.step(evaluated)
    assert seen == [used]
    train(*plain[:2], [3])
    assert everything(model, optimizer, handle) == everything(*plain)


# --- casts, copies, functional calls ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "step", "t_sr_ste", "s_ste", "bi_mask"])
def test_a_model_that_is_cast_after_sparsify(recipe, dtype):
    model, optimizer, handle = start(recipe)
    model.to(dtype)
    train(model, optimizer, range(TOTAL))
    assert handle.recipe.step == TOTAL
    for weight in handle.sparse:
        assert weight.parameter.dtype == weight.dense.dtype == dtype
        out = torch.empty_like(weight.dense)
        handle.recipe.project(weight, out)
        assert torch.equal(out, weight.parameter)
    assert events(handle) == []
    handle.finalize()
    for layer in (model[0], model[2]):
        nmrun.sparsity.check_nm(layer.weight, "2:4")


@pytest.mark.parametrize("recipe", ["lbc", "maskllm", "sqft", "cast"])
def test_a_cast_does_not_reach_parameters_that_a_recipe_added(recipe):
    """They are not the model's; cast before sparsify, all train on in half precision."""
    model, optimizer, _ = start(recipe)
    model.bfloat16()
    with pytest.raises(ConfigError, match=r"cast the model before sparsify"):
        train(model, optimizer, range(TOTAL))
    model = net().bfloat16()
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    handle = attach(model, optimizer, recipe)
    train(model, optimizer, range(TOTAL))
    handle.finalize()


@pytest.mark.parametrize("kind", ["torch.optim.AdamW", "torch.optim.SGD", "nmrun.optim.AdamW"])
def test_a_memory_format_that_is_chosen_after_sparsify(kind):
    """torch's fused kernels on the CPU take a weight and its gradient for stored alike."""
    ends = []
    for moment in "before", "after", "never":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
        if moment == "before":
            model.to(memory_format=torch.channels_last)
        optimizer = pydoc.locate(kind)(model.parameters(), lr=0.02, fused=True)
        handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", decay=0.1, exclude=None)
        if moment == "after":
            model.to(memory_format=torch.channels_last)
        for number in range(3):
            model(batch(number).reshape(1, 8, 4, 4).tile(1, 1, 2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.finalize()
        ends.append([p.detach() for p in model.parameters()])
    for before, after, never in zip(*ends, strict=True):
        assert torch.equal(before, after)
        torch.testing.assert_close(after, never, atol=1e-5, rtol=0)


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_cast_that_makes_weights_equal_keeps_the_dense_ones(step, monkeypatch):
    """In bfloat16 the second and the third of four are often equal, and the mask may be another."""
    monkeypatch.setattr(steppers, "COMPARED_EVERY", 6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256))
    optimizer, handle = by_sgd(model, "ste", "2:4", lr=0.0)

    def steps(number: int) -> None:
        for _ in range(number):
            model[0].weight.grad = torch.ones_like(model[0].weight)
            optimizer.step()

    steps(step)
    expected = handle.sparse[0].dense.bfloat16()
    model.bfloat16()
    steps(3)
    assert events(handle) == []
    assert torch.equal(handle.sparse[0].dense, expected)
    assert torch.equal(model[0].weight, hard_threshold(expected, "2:4"))


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("saved_before", [False, True])
@pytest.mark.parametrize(
    "recipe", ["sr_ste", "asp", "step", "t_sr_ste", "lbc", "cast", "maskllm", "sqft"]
)
def test_copies_of_model_and_optimizer_train_on_with_the_same_bits(recipe, saved_before, how):
    """Their clock and dense weights are those of the last step, whatever was saved meanwhile."""
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(3))
    if saved_before:
        optimizer.state_dict()
    train(model, optimizer, range(3, 7))
    if how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        torch.save((model, optimizer), file := io.BytesIO())
        file.seek(0)
        twin, other = torch.load(file, weights_only=False)
    second = attach(twin, other, recipe)
    assert second.recipe.step == 7
    train(model, optimizer, range(7, TOTAL))
    train(twin, other, range(7, TOTAL))
    assert everything(twin, other, second) == everything(model, optimizer, handle)


@pytest.mark.parametrize("kind", [*(f"torch.optim.{kind}" for kind in KINDS), "nmrun.optim.AdamW"])
def test_copies_where_a_layer_had_no_gradient_yet(kind):
    def steps(model, optimizer, numbers):
        for number in numbers:
            out = model[0](batch(number))
            if number >= 3:
                out = out + model[1](batch(number))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8))
    optimizer = pydoc.locate(kind)(model.parameters(), lr=0.02)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)
    steps(model, optimizer, range(2))
    twin, other = copy.deepcopy((model, optimizer))
    second = nmrun.sparsify(twin, other, "sr_ste", "2:4", exclude=None)
    for each in (model, optimizer), (twin, other):
        steps(*each, range(2, 5))
    assert everything(twin, other, second) == everything(model, optimizer, handle)


def test_a_second_moment_is_frozen_where_a_layer_had_no_gradient_yet():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8))
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)
    model[0](batch(0)).square().mean().backward()
    optimizer.step()
    optimizer.freeze_second_moment([model[1].weight])
    frozen = optimizer.state[model[1].weight]["frozen_denominator"]
    torch.testing.assert_close(frozen, torch.full((8, 16), 1e-2))  # sqrt(0 + eps)


def test_a_compiled_step_is_compiled_once():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)

    @functools.partial(torch.compile, backend="eager")
    def step():
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            step()


def test_a_copy_that_has_no_dense_weights_yet_is_refused():
    model, optimizer, handle = start("sr_ste")
    twin, other = copy.deepcopy((model, optimizer))
    before = bits([twin.state_dict(), other.state_dict()])
    with pytest.raises(ConfigError, match=r"no dense weight of 0\.weight.* after its first step"):
        attach(twin, other, "sr_ste")
    assert bits([twin.state_dict(), other.state_dict()]) == before
    train(model, optimizer, range(TOTAL))
    handle.finalize()


@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "bi_mask", "lbc", "s_ste"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_a_plain_model_of_its_own(recipe, how):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(7))
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert bits(twin.state_dict()) == bits(model.state_dict())
    before = bits(twin.state_dict())
    assert torch.equal(twin(batch(0)), model(batch(0)))
    train(model, optimizer, range(7, 9))
    assert bits(twin.state_dict()) == before
    other = torch.optim.SGD(twin.parameters(), 0.1)
    used = bits(model.state_dict())
    train(twin, other, range(2))  # a plain model: all its weights move
    assert bits(model.state_dict()) == used
    assert bool((twin[0].weight != 0).all()) or recipe == "s_ste"
    assert handle.recipe.step == 9


def test_functional_call_and_grad_see_the_projected_weight():
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(2))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(model, values, (x,)).square().mean()

    grads = torch.func.grad(loss)(parameters, batch(2))
    model(batch(2)).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)
    assert grads["0.weight"][model[0].weight == 0].any()
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch(2).unsqueeze(1))
    torch.testing.assert_close(each["0.weight"].mean(0), grads["0.weight"])
    assert events(handle) == []


def test_a_backward_pass_after_the_step_raises_as_ever():
    for recipe in ("sr_ste", "ste_periodic"):
        model, optimizer, _ = start(recipe)
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_that_shares_its_storage_gives_the_same_bits():
    """It keeps its memory, and the dense weight is copied to and fro."""
    results = []
    for shared in (False, True):
        model = net()
        if shared:
            flat = torch.cat([model[0].weight.detach().flatten(), torch.zeros(3)])
            model[0].weight = nn.Parameter(flat[:128].view(8, 16))
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
        handle = attach(model, optimizer, "sr_ste")
        assert [w.copies for w in handle.sparse] == [shared, False]
        address = model[0].weight.data_ptr()
        train(model, optimizer, range(TOTAL))
        assert model[0].weight.data_ptr() == address
        results.append(everything(model, optimizer, handle))
    assert results[0] == results[1]
    assert math.isfinite(float(model[0].weight.sum()))


def test_projected_once_a_step_however_often_it_is_read(monkeypatch):
    model, optimizer, handle = start("ste")
    train(model, optimizer, range(3))  # they are compared as well
    projected: list[str] = []
    project = handle.recipe.project
    monkeypatch.setattr(
        handle.recipe, "project", lambda w, out: (projected.append(w.name), project(w, out))
    )
    for step in range(3, 6):
        for _ in range(4):
            model(batch(step)).sum().backward()
        optimizer.step()
        model.eval()(batch(step))
    assert projected == ["0.weight", "2.weight"] * 3


@pytest.mark.filterwarnings("ignore:nmrun")
def test_weights_that_are_written_now_and_then_end_no_run():
    model, optimizer, handle = start("sr_ste")
    for step in range(TOTAL):
        if step % 2:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        train(model, optimizer, [step])
    assert len(events(handle)) == TOTAL // 2
