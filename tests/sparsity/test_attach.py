"""The mechanism: the parameter is the projection of the dense weight, in every plain model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nmrun
from nmrun.errors import ConfigError, RunError
from nmrun.sparsity import check_nm, hard_threshold, soft_threshold
from nmrun.step import stepper as steppers
from nmrun.step.handle import Handle

MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ste": ("ste", {}),
    "s_ste": ("s_ste", {}),
    "asp": ("asp", {"prune_at": 0.5}),
    "step": ("step", {"switch": 0.5}),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def start(
    model: nn.Module, maker: str = "ste", **options: Any
) -> tuple[torch.optim.Optimizer, Handle]:
    recipe, hyper = MAKERS[maker]
    optimizer = nmrun.optim.Adam(model.parameters(), lr=0.05)
    return optimizer, nmrun.sparsify(
        model, optimizer, recipe, "2:4", total_steps=8, **hyper, **options
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, x: Tensor | None = None
) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8) if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- the parameter follows the dense weight ------------------------------------------------------


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.neg_().add_(torch.randn(8, 8))


def other_data(model: nn.Module) -> None:
    model[0].weight.data = torch.randn(8, 8)


def write_through_data(model: nn.Module) -> None:
    model[0].weight.data.add_(torch.randn(8, 8))


def initialized(model: nn.Module) -> None:
    nn.init.normal_(model[0].weight)


def loaded(model: nn.Module) -> None:
    model.load_state_dict(mlp(3).state_dict())


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "in place": in_place,
    "initialized": initialized,
    "load_state_dict": loaded,
    "new data": other_data,
    "through .data": write_through_data,
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_are_written_from_outside_are_the_new_dense_weight(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next step at the latest; what ``.data`` hides is found when all weights are compared."""
    if "data" in change:
        monkeypatch.setattr(steppers, "COMPARED_EVERY", 1)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4")
    train(model, optimizer, 2)
    assert handle.pop_events() == []
    CHANGES[change](model)
    written, grad = model[0].weight.detach().clone(), torch.randn(8, 8)
    model[0].weight.grad = grad.clone()
    optimizer.step()
    (weight, _) = handle.sparse
    torch.testing.assert_close(weight.dense, written - grad, rtol=0, atol=0)
    assert torch.equal(model[0].weight, hard_threshold(weight.dense, "2:4"))
    (event,) = handle.pop_events()
    assert "0.weight" in event
    assert "changed outside the optimizer" in event
    train(model, optimizer, 2)
    assert handle.pop_events() == []


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "moved and back": lambda model: model.half().float(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_the_dense_weight_follows_a_cast_of_the_model(cast: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4")
    before = handle.sparse[0].dense.clone()
    CASTS[cast](model)
    dtype = model[0].weight.dtype
    grad = torch.randn(8, 8).to(dtype)
    model[0].weight.grad = grad.clone()
    optimizer.step()
    weight = handle.sparse[0]
    assert model[0].weight.dtype == weight.dense.dtype == dtype
    tolerance = {"moved and back": 2**-10, "double": 1e-6, "bfloat16": 2**-7}[cast]
    wanted = (before.double() - grad.double()).to(dtype)
    torch.testing.assert_close(weight.dense, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(model[0].weight, hard_threshold(weight.dense, "2:4"))
    check_nm(model, "2:4")


def test_functional_call_uses_the_weights_it_is_given() -> None:
    model, plain = mlp(), mlp()
    _, handle = start(model)
    x = torch.randn(2, 8)
    for _ in range(4):  # the freed tensors of one round lend their addresses to the next
        given = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        with torch.no_grad():
            found = torch.func.functional_call(model, given, (x,))
            assert torch.equal(found, torch.func.functional_call(plain, given, (x,)))
    assert torch.equal(model[0].weight, hard_threshold(handle.sparse[0].dense, "2:4"))


def test_inference_mode() -> None:
    model = mlp()
    optimizer, handle = start(model)
    with torch.inference_mode():
        model(torch.randn(2, 8))
        clone = copy.deepcopy(model)
        assert torch.equal(clone(torch.ones(1, 8)), model(torch.ones(1, 8)))
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, hard_threshold(handle.sparse[0].dense, "2:4"))


def test_projected_once_a_step_however_often_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer, handle = start(model)
    projected: list[str] = []
    project = handle.recipe.project
    monkeypatch.setattr(
        handle.recipe, "project", lambda w, out: (projected.append(w.name), project(w, out))
    )
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        model.eval()(torch.randn(4, 8))
    assert projected == ["0.weight", "2.weight"] * 3


# --- a plain model, for whoever looks at it ------------------------------------------------------


@pytest.mark.parametrize("maker", MAKERS)
def test_no_name_class_object_or_address_changes(maker: str) -> None:
    model = mlp()
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    objects = dict(model.named_parameters())
    optimizer, handle = start(model, maker)
    places: dict[bool, set[int]] = {True: set(), False: set()}
    for _ in range(8):
        train(model, optimizer, 1)
        places[handle.is_sparse].add(model[0].weight.data_ptr())
        assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (keys, kinds)
        assert all(p is objects[name] for name, p in model.named_parameters())
        if handle.is_sparse:
            check_nm(mlp_of(model.state_dict()), "2:4")
    assert len(places[True]) == 1
    handle.finalize()
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (keys, kinds)


def mlp_of(state: dict[str, Tensor]) -> nn.Module:
    plain = mlp(1)
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("torchs_own", [True, False], ids=["AveragedModel", "by hand"])
@pytest.mark.parametrize("maker", MAKERS)
def test_average_of_dense_weights_is_projected_in_the_end(
    maker: str, torchs_own: bool, compiled: bool
) -> None:
    model = mlp()
    optimizer, handle = start(model, maker)
    with handle.dense_weights():
        average = copy.deepcopy(model)
        if torchs_own:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    forward = torch.compile(average, backend="eager") if compiled else average
    x = torch.randn(4, 8)
    forward(x)
    mean = [p.detach().clone() for p in mlp().parameters()]
    for step in range(8):
        train(model, optimizer, 1)
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        now |= {w.name: w.dense.clone() for w in handle.sparse}
        first = torchs_own and step == 0
        mean = [n if first else m.lerp(n, 0.5) for m, n in zip(mean, now.values(), strict=True)]
        with handle.dense_weights(), torch.no_grad():
            if torchs_own:
                average.update_parameters(model)
            else:
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.5)
        assert not handle.is_sparse or check_nm(model, "2:4")
        for a, m in zip(average.parameters(), mean, strict=True):
            torch.testing.assert_close(a.detach(), m)
    handle.finalize(average)
    weight0, bias0, weight2, bias2 = (p.detach() for p in average.parameters())
    check_nm(average, "2:4")
    for used, averaged, weight in zip((weight0, weight2), mean[::2], handle.sparse, strict=True):
        if maker == "asp":
            assert torch.equal(used != 0, weight.weight != 0)
            torch.testing.assert_close(used, averaged * weight["mask"])
        elif maker == "s_ste":
            torch.testing.assert_close(used, weight["scale"] * soft_threshold(averaged, "2:4"))
        else:
            torch.testing.assert_close(used, hard_threshold(averaged, "2:4"))
        assert not torch.equal(used, averaged)
    by_hand = torch.relu(x @ weight0.T + bias0) @ weight2.T + bias2
    torch.testing.assert_close(forward(x).detach(), by_hand)
    assert len(handle.sparse) == 2
    train(model, optimizer, 1)  # the original goes on
    check_nm(model, "2:4")


def test_an_average_taken_in_a_dense_phase_is_pruned_by_magnitude() -> None:
    model = mlp()
    optimizer, handle = start(model, "asp")
    average = AveragedModel(model)
    train(model, optimizer, 1)
    average.update_parameters(model)
    wanted = hard_threshold(average.module[0].weight.detach(), "2:4")
    handle.finalize(average)
    assert torch.equal(average.module[0].weight, wanted)
    assert handle.phase == "dense"
    with pytest.raises(ConfigError, match=r"this model has no parameter 0\.weight"):
        handle.finalize(nn.Linear(8, 8))


# --- weights that are computed from others -------------------------------------------------------

NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm by hooks": torch.nn.utils.weight_norm,
    "spectral_norm by hooks": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("norm", NORMS)
def test_a_weight_that_is_computed_stays_dense_and_the_others_train(norm: str) -> None:
    model = mlp()
    NORMS[norm](model[0])
    keys = list(model.state_dict())
    optimizer, handle = start(model)
    assert [w.name for w in handle.sparse] == ["2.weight"]
    assert any(d.name.startswith("0") and "computed" in d.reason for d in handle.left_dense)
    train(model, optimizer, 3)
    assert (model[0].weight != 0).all()
    handle.finalize()
    assert nmrun.sparsity.check_nm(model[2], "2:4") == ["weight"]
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_weight_that_is_replaced_later_is_an_error_and_not_silence(norm: str) -> None:
    model = mlp()
    optimizer, handle = start(model)
    train(model, optimizer, 2)
    NORMS[norm](model[0])
    train(model, optimizer, 2)
    with pytest.raises(
        RunError, match=r"0\.weight is no longer the parameter that was made sparse"
    ):
        handle.finalize()


def test_loading_by_assignment_is_an_error_and_not_silence() -> None:
    model = mlp()
    optimizer, handle = start(model)
    train(model, optimizer, 1)
    model.load_state_dict(mlp(3).state_dict(), assign=True)
    with pytest.raises(
        RunError, match=r"0\.weight is no longer the parameter that was made sparse.*assign=True"
    ):
        handle.finalize()
