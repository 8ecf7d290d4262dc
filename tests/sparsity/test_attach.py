"""The mechanism: whatever reads ``.weight`` sees the projection of the dense weight as it is now, in every kind of module."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nmrun
from nmrun.handle import Handle
from nmrun.sparsity import check_nm, hard_threshold
from nmrun.sparsity.weight import attached

MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ste": ("ste", {}),
    "s_ste": ("s_ste", {}),
    "asp": ("asp", {"prune_at": 0.5}),
    "step": ("step", {"switch": 0.5}),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def start(model: nn.Module, maker: str = "ste", **options: Any) -> tuple[torch.optim.Optimizer, Handle]:
    recipe, hyper = MAKERS[maker]
    optimizer = nmrun.optim.Adam(model.parameters(), lr=0.05)
    return optimizer, nmrun.sparsify(model, optimizer, recipe, "2:4", total_steps=8, **hyper, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, x: Tensor | None = None) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8) if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dense(model: nn.Module) -> Tensor:
    return attached(model)[0].dense


# --- the working copy follows the dense weight --------------------------------------------------------------------------------


def by_step(model: nn.Module) -> None:
    dense(model).grad = torch.randn(8, 8)
    torch.optim.SGD([dense(model)], 1.0).step()


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        dense(model).neg_().add_(torch.randn(8, 8))


def other_data(model: nn.Module) -> None:
    dense(model).data = torch.randn(8, 8)


def state(assign: bool) -> Callable[[nn.Module], None]:
    def load(model: nn.Module) -> None:
        twin = mlp()
        start(twin)
        with torch.no_grad():
            dense(twin).add_(torch.randn(8, 8))
            while dense(twin)._version < dense(model)._version:
                dense(twin).add_(0.0)
        model.load_state_dict(twin.state_dict(), assign=assign)

    return load


CHANGES = {
    "another optimizer": by_step,
    "in place": in_place,
    "new data": other_data,
    "load_state_dict": state(False),
    "load_state_dict(assign=True)": state(True),
    "moved and back": lambda model: model.half().float(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_the_dense_weight_goes_unseen(change: str) -> None:
    model = mlp()
    start(model)
    model(torch.randn(2, 8))
    CHANGES[change](model)
    weight = model[0].weight
    assert weight.dtype == dense(model).dtype
    assert torch.equal(weight, hard_threshold(dense(model), "2:4"))


def test_functional_call_uses_the_weights_it_is_given() -> None:
    model, plain = mlp(), mlp()
    start(model)
    x = torch.randn(2, 8)
    for _ in range(4):  # the freed tensors of one round lend their addresses to the next
        given = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        wanted = {
            name.replace("parametrizations.weight.original", "weight"): hard_threshold(t, "2:4") if t.dim() == 2 else t
            for name, t in given.items()
        }
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(model, given, (x,)), torch.func.functional_call(plain, wanted, (x,)))
    assert torch.equal(model[0].weight, hard_threshold(dense(model), "2:4"))


def test_inference_mode() -> None:
    model = mlp()
    optimizer, _ = start(model)
    with torch.inference_mode():
        model(torch.randn(2, 8))
        clone = copy.deepcopy(model)
        assert torch.equal(clone(torch.ones(1, 8)), model(torch.ones(1, 8)))
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, hard_threshold(dense(model), "2:4"))


def test_projected_once_a_step_however_often_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer, handle = start(model)
    projected: list[str] = []
    project = handle.recipe.project
    monkeypatch.setattr(handle.recipe, "project", lambda p, *args: (projected.append(p.name), project(p, *args)))
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        model.eval()(torch.randn(4, 8))
    assert projected == ["0.weight", "2.weight"] * 3


# --- copies of the model ------------------------------------------------------------------------------------------------------


def ema_by_hand() -> Callable[[nn.Module, nn.Module], None]:
    """Parameters alone, as most hand-written averages do."""

    @torch.no_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.5)

    return update


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("torchs_own", [True, False], ids=["AveragedModel", "by hand"])
@pytest.mark.parametrize("maker", MAKERS)
def test_average_of_weights_is_projected_too(maker: str, torchs_own: bool, compiled: bool) -> None:
    model = mlp()
    optimizer, handle = start(model, maker)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if torchs_own else copy.deepcopy(model)
    update = (lambda a, m: a.update_parameters(m)) if torchs_own else ema_by_hand()
    forward = torch.compile(average, backend="eager") if compiled else average
    x = torch.randn(4, 8)
    mean: list[Tensor] = []
    for step in range(8):
        train(model, optimizer, 1)
        now = [p.detach().clone() for p in model.parameters()]
        mean = now if torchs_own and step == 0 else [a.lerp(p, 0.5) for a, p in zip(mean or start_of(), now, strict=True)]
        update(average, model)
        if not handle.is_sparse:
            continue
        check_nm(average, "2:4")
        (bias0, weight0, bias2, weight2) = mean
        reads = [w.weight for w in attached(average)]
        if maker in ("ste", "step"):
            assert torch.equal(reads[0], hard_threshold(weight0, "2:4"))
        if maker == "asp":
            assert torch.equal(reads[0] != 0, model[0].weight != 0)
        by_hand = torch.relu(x @ reads[0].T + bias0) @ reads[1].T + bias2
        torch.testing.assert_close(forward(x).detach(), by_hand)
        assert not torch.equal(weight2, reads[1])
    handle.finalize(average)
    assert [tuple(p.shape) for p in average.parameters()] == [(8, 8), (8,), (4, 8), (4,)]
    check_nm(average, "2:4")
    assert len(handle.sparse) == 2
    train(model, optimizer, 1)  # the original goes on
    check_nm(model, "2:4")


def start_of() -> list[Tensor]:
    """The parameters of a fresh model in the order that a parametrized one has them."""
    weight0, bias0, weight2, bias2 = mlp().parameters()
    return [bias0.detach(), weight0.detach(), bias2.detach(), weight2.detach()]


# --- compiled code --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", MAKERS)
def test_compiled_training_equals_eager_and_compiles_once_a_phase(maker: str) -> None:
    torch._dynamo.reset()
    compiles: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiles.append(1)
        return graph.forward

    model, eager = mlp(), mlp()
    (optimizer, _), (eager_optimizer, _) = start(model, maker), start(eager, maker)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(4, 8)
    for _ in range(8):
        train(compiled, optimizer, 1, x)
        train(eager, eager_optimizer, 1, x)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert len(compiles) == (2 if maker in ("asp", "step") else 1)
    in_place(model)
    model.load_state_dict(eager.state_dict())
    assert torch.equal(compiled(x), eager(x))
    assert len(compiles) == (2 if maker in ("asp", "step") else 1)


def test_compiled_backward_graph() -> None:
    torch._dynamo.reset()
    model, eager = mlp(), mlp()
    (optimizer, handle), (eager_optimizer, _) = start(model, "step"), start(eager, "step")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    for _ in range(8):
        train(compiled, optimizer, 1, x)
        train(eager, eager_optimizer, 1, x)
    assert handle.is_sparse
    torch.testing.assert_close(list(model.parameters()), list(eager.parameters()))
    assert torch.equal(model[0].weight, hard_threshold(dense(model), "2:4"))
