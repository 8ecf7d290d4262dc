"""finalize says why a training is not finished, and changes nothing then; averages and copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import one_rank
import pytest
import torch
from errors import one_line
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from training import (
    SPARSE,
    TOTAL,
    Start,
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


def never_stepped(training: Start) -> None:
    train(training[0], torch.optim.SGD(training[0].parameters(), 0.1), range(3))


def three(training: Start) -> None:
    train(*training[:2], range(3))


def other_optimizer(training: Start) -> None:
    three(training)
    train(training[0], torch.optim.SGD(training[0].parameters(), 0.1), range(3))


def replaced(training: Start) -> None:
    three(training)
    training[0][2].weight = nn.Parameter(training[0][2].weight.detach().clone())


def new_layer(training: Start) -> None:
    three(training)
    training[0][2] = nn.Linear(8, 8)


def assigned(training: Start) -> None:
    three(training)
    training[0].load_state_dict(net(5).state_dict(), assign=True)


REASONS: list[tuple[str, Callable[[Start], None], str]] = [
    ("sr_ste", lambda training: None, "the optimizer that was given to sparsify never stepped"),
    ("sr_ste", never_stepped, "the optimizer that was given to sparsify never stepped"),
    ("asp", three, "training ended in a dense phase of asp, after step 3 of total_steps=10"),
    ("sr_ste", other_optimizer, r"0\.weight was changed, but not by the optimizer that sparsify"),
    ("sr_ste", replaced, r"2\.weight is no longer the parameter that was made sparse"),
    ("sr_ste", new_layer, r"2\.weight is no longer the parameter that was made sparse"),
    ("sr_ste", assigned, r"0\.weight is no longer the parameter that was made sparse"),
    ("mdgf_linear", three, r"0\.weight is not 2:4 after step 3 of total_steps=10\. Train on"),
    ("lbc", three, r"weight is not 2:4 after step 3 of total_steps=10\. Train on"),
    ("sdgf_stepwise", three, r"0\.weight is not 2:4 after step 3"),
]


@pytest.mark.parametrize(("recipe", "happens", "message"), REASONS)
def test_the_reason_is_told_and_nothing_changed(recipe, happens, message):
    training = start(recipe)
    happens(training)
    before = everything(*training)
    parameters = list(training[0].parameters())
    with one_line(RunError, message):
        training[2].finalize()
    assert everything(*training) == before
    assert all(a is b for a, b in zip(parameters, training[0].parameters(), strict=True))
    assert training[2].sparse


@pytest.mark.parametrize("recipe", ["sr_ste", "sqft"])
def test_a_handle_that_has_ended_leaves_the_next_training_alone(recipe):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(TOTAL))
    handle.finalize()
    again = attach(model, optimizer, recipe)
    train(model, optimizer, range(3))
    handle.finalize()
    handle.abandon()
    twin, other = copy.deepcopy((model, optimizer))
    second = attach(twin, other, recipe)
    assert everything(twin, other, second) == everything(model, optimizer, again)


def test_a_training_that_was_abandoned_is_not_finished():
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(3))
    handle.abandon()
    before = everything(model, optimizer)
    average = copy.deepcopy(model)
    for finish in (
        handle.finalize,
        lambda: handle.finalize(average),
        lambda: handle.projected(average).__enter__(),
    ):
        with one_line(RunError, r"abandon\(\) took nmrun out of this training"):
            finish()
    assert everything(model, optimizer) == before
    again = attach(model, optimizer, "sr_ste")
    train(model, optimizer, range(3))
    again.finalize()
    again.abandon()  # nothing is left to do
    again.finalize()


def test_refresh_returns_to_the_optimizer_s_weights():
    """As the message says."""
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(3))
    expected = [w.parameter.detach().clone() for w in handle.sparse]
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RunError, match=r"handle\.refresh\(\)"):
        handle.finalize()
    handle.refresh()
    handle.finalize()
    assert torch.equal(model[0].weight, expected[0])


def test_weights_of_a_sparse_phase_that_were_loaded_stay():
    """The best ones, kept by the loop; not those of the last step, and none that are not N:M."""
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(3))
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, TOTAL))
    assert not torch.equal(model[0].weight, best["0.weight"])
    model.load_state_dict(net(5).state_dict())
    with pytest.raises(RunError, match=r"and is not 2:4: .* load weights of a sparse phase"):
        handle.finalize()
    model.load_state_dict(best)
    handle.finalize()
    assert bits(model.state_dict()) == bits(best)


@pytest.mark.parametrize("joins", [False, True])
def test_weights_that_are_trained_later_are_warned_of(joins):
    """As with gradual unfreezing: they stayed dense."""
    model = net()
    model[0].requires_grad_(False)
    owned = [p for p in model.parameters() if p.requires_grad or not joins]
    optimizer = torch.optim.SGD(owned, 0.1)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", 4, exclude="4")
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    if joins:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, range(2, 4))
    with pytest.warns(match=r"0\.weight stayed dense"):
        handle.finalize()
    assert (model[0].weight != 0).all()
    nmrun.sparsity.check_nm(model[2].weight, "2:4")


def test_weights_that_are_no_numbers_are_named_so():
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(2))
    (model(torch.full((2, 16), torch.nan)).sum()).backward()
    optimizer.step()
    with pytest.raises(RunError, match=r"0\.weight has NaN: a loss or gradient was not finite"):
        handle.finalize()


@pytest.mark.parametrize("recipe", SPARSE)
def test_the_optimizer_forgets_all_but_its_own(recipe):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(TOTAL), handle)
    assert recipe_tensors(optimizer)
    handle.finalize()
    assert recipe_tensors(optimizer) == {}
    assert all("nmrun" not in group for group in optimizer.param_groups)
    stock = nmrun.optim.AdamW(net().parameters(), lr=0.02)
    assert optimizer.param_groups[0].keys() == stock.param_groups[0].keys()
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in model.parameters()}
    assert not any(value.signbit().logical_and(value == 0).any() for value in model.parameters())
    handle.finalize()  # a second time nothing is left to do


# --- averages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "step", "s_ste", "t_sr_ste", "bi_mask"])
def test_an_average_of_dense_weights_becomes_nm(recipe):
    model, optimizer, handle = start(recipe)
    average, seen = AveragedModel(model), []
    for step in range(TOTAL):
        train(model, optimizer, [step])
        dense = [w.dense.clone() for w in handle.sparse]
        if step >= 6:
            with handle.dense_weights():
                for weight, expected in zip(handle.sparse, dense, strict=True):
                    assert torch.equal(weight.parameter, expected)
                average.update_parameters(model)
            seen.append(dense)
    before = everything(model, optimizer, handle)
    for weight, every in zip(handle.sparse, zip(*seen, strict=True), strict=True):
        parameter = average.get_parameter(f"module.{weight.name}")
        torch.testing.assert_close(parameter.detach(), torch.stack(every).mean(0))
    mean = average.module[0].weight.detach().clone()
    handle.finalize(average)
    for layer in (average.module[0], average.module[2]):
        nmrun.sparsity.check_nm(layer.weight, "2:4")
    if recipe in ("sr_ste", "step"):
        assert torch.equal(average.module[0].weight, hard_threshold(mean, "2:4"))
    if recipe in ("asp", "t_sr_ste"):
        assert torch.equal(average.module[0].weight, mean * handle.sparse[0]["mask"])
    assert everything(model, optimizer, handle) == before
    handle.finalize()


def test_an_average_taken_in_a_dense_phase_is_pruned_by_magnitude():
    model, optimizer, handle = start("asp")
    average = AveragedModel(model)
    train(model, optimizer, [0])
    average.update_parameters(model)
    expected = hard_threshold(average.module[0].weight.detach(), "2:4")
    handle.finalize(average)
    assert torch.equal(average.module[0].weight, expected)
    assert handle.phase == "dense"


def test_an_average_by_proxsparse_has_the_old_values_to_the_end():
    """The weights that the regulariser moves are no part of the result, nor of an average's."""
    model, optimizer, handle = start("proxsparse", strength=3.0)
    average, old = copy.deepcopy(list(model.parameters())), []
    for step in range(TOTAL):
        train(model, optimizer, [step])
        with handle.dense_weights(), torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
            if handle.recipe.evaluates_final and not old:  # as the regulariser begins
                old = [p.clone() for p in model.parameters()]
        if old:
            with handle.projected(average):
                for mean, before in zip(average, old, strict=True):
                    if mean.shape in ((8, 16), (8, 8)):
                        assert (mean == 0).float().mean() == 0.5
                        assert torch.equal(mean, before * (mean != 0))
    assert handle.is_sparse


def averaged(recipe: str) -> tuple[Start, nn.Module, list[nn.Parameter]]:
    """A trained network and an average of its dense weights, as a module and as a list."""
    training = start(recipe)
    train(*training[:2], range(TOTAL))
    with training[2].dense_weights():
        average = copy.deepcopy(training[0])
    with torch.no_grad():
        for p in average.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)
    return training, average, [nn.Parameter(p.detach().clone()) for p in average.parameters()]


@pytest.mark.parametrize("recipe", ["lbc", "maskllm", "cast", "sqft"])
def test_an_average_may_have_another_dtype_than_the_model(recipe):
    """float32 beside a model in bfloat16, for recipes with parameters of their own."""
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", 3, exclude=None)
    average = copy.deepcopy(model).float()
    for _ in range(3):
        model(torch.randn(4, 16, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with handle.projected(average):
            nmrun.sparsity.check_nm(average[0].weight, "2:4")
    with handle.dense_weights(), torch.no_grad():
        for shadow, parameter in zip(average.parameters(), model.parameters(), strict=True):
            shadow.copy_(parameter)
    handle.finalize(average)
    handle.finalize()
    for name, parameter in model.named_parameters():
        shadow = average.get_parameter(name)
        assert shadow.dtype == torch.float32
        torch.testing.assert_close(shadow, parameter.float(), rtol=0.02, atol=0.002)


class Shadows:
    """As diffusers and torch_ema keep an average: no module, a list beside it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shadow_params = parameters


@pytest.mark.parametrize("recipe", SPARSE)
def test_the_order_of_average_and_end_does_not_matter(recipe):
    """Also for a list of parameters, and where an average is N:M for a while only."""
    training, before, shadows = averaged(recipe)
    after, looked = copy.deepcopy(before), copy.deepcopy(before)
    dense, state = everything(looked, training[1])["model"], everything(*training)
    with training[2].projected(looked):
        seen = copy.deepcopy(looked)
    assert everything(looked, training[1])["model"] == dense
    training[2].finalize(before)
    assert everything(*training) == state
    training[2].finalize()
    training[2].finalize(after)
    training[2].finalize(Shadows(shadows).shadow_params)
    for model in (before, after, seen):
        nmrun.sparsity.check_nm(model, "2:4", exclude="4")
        assert bits(model.state_dict()) == bits(before.state_dict())
    assert bits(shadows) == bits(list(before.parameters()))
    if recipe in ("ste", "sr_ste", "step"):
        mean = nn.Parameter(averaged(recipe)[1][0].weight.detach())
        assert torch.equal(hard_threshold(mean, "2:4") != 0, after[0].weight != 0)


def test_the_average_is_dense_again_after_an_error_inside():
    training, average, shadows = averaged("sr_ste")
    before = bits(shadows)
    with pytest.raises(ZeroDivisionError), training[2].projected(shadows):
        nmrun.sparsity.check_nm(shadows[0].detach(), "2:4")
        1 / 0  # noqa: B018
    assert bits(shadows) == before
    with pytest.raises(ZeroDivisionError), training[2].projected(average):
        1 / 0  # noqa: B018
    assert bits(list(average.parameters())) == before


def test_a_list_may_have_the_trained_parameters_alone():
    """As older torch_ema does."""
    model = net()
    model[4].requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", TOTAL, exclude=None)
    train(model, optimizer, range(3))
    with handle.dense_weights():
        shadows = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    handle.finalize(shadows)
    assert [bool((p == 0).any()) for p in shadows] == [True, False, True, False]


@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste"])
def test_an_average_in_shards_gets_what_a_whole_one_gets(recipe):
    def ends(shards: bool) -> list[torch.Tensor]:
        model, average = net(0), net(1)
        for each in (model, average) if shards else ():
            fully_shard(each)
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
        handle = attach(model, optimizer, recipe)
        train(model, optimizer, range(TOTAL))
        with torch.no_grad():  # after it FSDP keeps what it has gathered
            with handle.projected(average):
                inside = average(batch(0))
            after = average(batch(0))
        handle.finalize(average)
        values = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in average.parameters()]
        nmrun.sparsity.check_nm(values[2], "2:4")
        return [inside, after, *values]

    with one_rank.group():
        assert bits(ends(True)) == bits(ends(False))


def test_what_is_no_average_is_told():
    training, _, shadows = averaged("sr_ste")
    for wrong, message in (
        (Shadows(shadows), r"Shadows has no parameter 0\.weight: it takes a copy of the model"),
        (shadows[1:], r"list has no parameter 0\.weight"),
        (nn.Linear(3, 3), r"Linear has no parameter 0\.weight"),
        (training[0], "this is the model that trains, and not an average of it"),
        (training[0].parameters(), "this is the model that trains, and not an average of it"),
    ):
        with one_line(ConfigError, message):
            training[2].finalize(wrong)


def test_dense_weights_is_a_look_and_what_is_written_inside_stays():
    model, optimizer, handle = start("sr_ste")
    plain = start("sr_ste")
    train(model, optimizer, range(3))
    train(*plain[:2], range(3))
    before = everything(model, optimizer, handle)
    with handle.dense_weights():
        seen = copy.deepcopy(model)
        assert not (model[0].weight == 0).any()
        assert torch.equal(model[4].weight, plain[0][4].weight)
    assert everything(model, optimizer, handle) == before
    assert torch.equal(hard_threshold(seen[0].weight.detach(), "2:4"), model[0].weight)
    with pytest.raises(ZeroDivisionError), handle.dense_weights():
        1 / 0  # noqa: B018
    assert everything(model, optimizer, handle) == before
    with handle.dense_weights(), torch.no_grad():
        model[0].weight.mul_(2.0)
    assert torch.equal(handle.sparse[0].dense, seen[0].weight.detach() * 2)
    assert torch.equal(model[0].weight, plain[0][0].weight * 2)
    train(model, optimizer, [3])
    assert not [event for event in handle.pop_events() if event.kind == "outside"]


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_written_inside_past_the_version_stays(replaced):
    """As by ``copy_to`` of diffusers' and torch_ema's averages."""
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(6))
    averages = [torch.randn_like(p) for p in model.parameters()]
    with handle.dense_weights():
        for p, average in zip(model.parameters(), averages, strict=True):
            if replaced:
                p.data = average.clone()
            else:
                p.data.copy_(average)
    assert torch.equal(handle.sparse[0].dense, averages[0])
    handle.finalize()
    assert torch.equal(model[0].weight, hard_threshold(averages[0], "2:4"))
    assert torch.equal(model[2].weight, hard_threshold(averages[2], "2:4"))


def test_autocast_keeps_no_copy_of_the_other_weights():
    """It keeps casts of weights until its context is left."""
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(3))
    with handle.dense_weights():
        average = copy.deepcopy(model)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def look(context: Any, model: nn.Module) -> torch.Tensor:
        with context, torch.autocast("cpu", torch.bfloat16):
            return model(x)

    contexts = contextlib.nullcontext(), handle.dense_weights(), handle.projected(average)
    alone = [*map(look, contexts, (model, model, average))]
    assert not torch.equal(alone[0], alone[1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x), average(x)
        with handle.dense_weights():
            assert torch.equal(model(x), alone[1])
        assert torch.equal(model(x), alone[0])
        with handle.projected(average):
            assert torch.equal(average(x), alone[2])


def test_layers_compute_with_the_dense_weights_inside():
    """Also in training, and the gradient of their input: not with what was pruned again."""
    model = nn.Sequential(nn.Linear(16, 8))
    optimizer, handle = by_sgd(model, "sr_ste", "2:4", input_gradient="double_prune")
    x = torch.randn(4, 16, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    dense, dz = handle.sparse[0].dense.clone(), torch.randn(4, 8)
    with handle.dense_weights():
        assert torch.equal(torch.autograd.grad(model(x), x, dz)[0], dz @ dense)
    pruned_again = nmrun.sparsity.hard_threshold(model[0].weight.detach(), "2:4", 0)
    torch.testing.assert_close(torch.autograd.grad(model(x), x, dz)[0], dz @ pruned_again)


def test_an_evaluation_of_shards_leaves_the_training_as_it_is():
    """FSDP's outermost module keeps what it has gathered after a forward pass without a backward one."""

    def losses(evaluates: bool) -> list[float]:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
        options = {"recipe": "proxsparse", "total_steps": 6, "dense": 0.3}
        handle = nmrun.sparsify(model, optimizer, **{"exclude": None, **options})
        x, values = torch.randn(8, 16), []
        for _ in range(6):
            if evaluates:
                with handle.evaluation_weights(), torch.no_grad():
                    model(x)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    with one_rank.group():
        assert losses(True) == losses(False)


@pytest.mark.parametrize("recipe", ["maskllm", "proxsparse", "cast"])
def test_a_training_that_is_left_in_an_evaluation_has_its_dense_weights(recipe):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(TOTAL - 1))
    dense = [weight.dense.clone() for weight in handle.sparse]
    with handle.evaluation_weights():
        nmrun.sparsity.check_nm(model, "2:4", exclude="4")
        handle.abandon()
    assert all(map(torch.equal, (model[0].weight, model[2].weight), dense))


@pytest.mark.parametrize("inner", ["dense_weights", "evaluation_weights"])
@pytest.mark.parametrize("outer", ["dense_weights", "evaluation_weights"])
@pytest.mark.parametrize("recipe", ["maskllm", "proxsparse", "cast"])
def test_looks_within_looks_end_with_the_outer_ones(recipe, outer, inner):
    """As of one's own in an evaluation that a callback has begun."""
    training, plain = start(recipe), start(recipe)
    model, _, handle = training
    for each in training, plain:
        train(*each[:2], range(TOTAL - 3))
    before, used = everything(*training), bits(list(model.parameters()))
    dense = [weight.dense.clone() for weight in handle.sparse]
    with getattr(handle, outer)():
        seen = bits(list(model.parameters()))
        with getattr(handle, inner)():
            if "dense_weights" in (outer, inner):
                assert all(map(torch.equal, (model[0].weight, model[2].weight), dense))
        assert bits(list(model.parameters())) == seen
        assert (seen != used) or (recipe == "proxsparse" and outer == "dense_weights")
    assert everything(*training) == before
    for each in training, plain:
        train(*each[:2], range(TOTAL - 3, TOTAL))
    assert everything(*training) == everything(*plain)


def test_dense_weights_that_are_written_in_an_evaluation_are_evaluated():
    model, optimizer, handle = start("maskllm")
    train(model, optimizer, range(TOTAL - 3))
    written = torch.randn(8, 16)
    with handle.evaluation_weights():
        mask = model[0].weight != 0
        with handle.dense_weights():
            model[0].weight.data.copy_(written)
        assert torch.equal(model[0].weight, written * mask)
    assert torch.equal(handle.sparse[0].dense, written)


@pytest.mark.filterwarnings("ignore:nmrun. step 6")
@pytest.mark.parametrize("look", ["dense_weights", "evaluation_weights"])
@pytest.mark.parametrize("recipe", ["sr_ste", "cast"])
def test_a_look_between_loading_and_a_step_loses_nothing(recipe, look):
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(6))
    model.load_state_dict({name: value + 5.0 for name, value in net(3).state_dict().items()})
    loaded = [weight.weight.clone() for weight in handle.sparse]
    with getattr(handle, look)():
        pass
    train(model, optimizer, [6])
    for weight, expected in zip(handle.sparse, loaded, strict=True):
        assert (weight.dense - expected).abs().max() < 1


def test_an_average_keeps_casts_scales_after_the_end():
    """The average of dense weights that are 1 is the mask times the scales."""
    model, optimizer, handle = start("cast", interval=1, decay=0.1)
    train(model, optimizer, range(TOTAL - 1))
    average = copy.deepcopy(net())
    with torch.no_grad():
        for p in average.parameters():
            p.fill_(1.0)
    train(model, optimizer, [TOTAL - 1])
    scale = handle.recipe.scale(handle.sparse[0])
    assert not torch.equal(scale, torch.ones_like(scale))
    handle.finalize(average)
    kept = average[0].weight[average[0].weight != 0]
    expected = scale.expand(8, 16)[average[0].weight != 0]
    assert torch.equal(kept, expected)
    dense = handle.sparse[0].dense
    handle.finalize()
    left = dense * scale * (model[0].weight != 0)
    torch.testing.assert_close(model[0].weight, left, rtol=1e-6, atol=0)


@pytest.mark.parametrize("eps_mode", ["inside", "outside", "floor"])
@pytest.mark.parametrize("end", ["finalize", "abandon"])
@pytest.mark.parametrize("corrected", [True, False])
def test_after_step_adam_is_adam_again(eps_mode, end, corrected):
    """Its second moment goes on from where it was frozen, in torch's own Adam too."""
    options = {"switch": 0.5, "eps_mode": eps_mode, "bias_correction": corrected}
    model, optimizer, handle = start("step", **options)
    train(model, optimizer, range(5))
    state = optimizer.state[model[0].weight]
    assert "exp_avg_sq" not in state
    frozen = state["frozen_denominator"].double()
    train(model, optimizer, range(5, TOTAL))
    getattr(handle, end)()
    assert "frozen_denominator" not in state
    shift = {"outside": 1e-8, "floor": 1e-6}.get(eps_mode, 0.0)
    v = frozen**2 - 1e-8 if eps_mode == "inside" else (frozen - shift) ** 2
    v *= 1 - 0.999**TOTAL if corrected else 1.0
    torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-3, atol=1e-12)
    stock = torch.optim.AdamW(model.parameters())
    stock.load_state_dict(optimizer.state_dict())
    before = model[0].weight.detach().clone()
    train(model, stock, [0])
    assert not torch.equal(model[0].weight, before)
