"""What sparsify leaves behind where it cannot work: nothing at all."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from errors import one_line
from torch import Tensor, nn
from training import SPARSE, TOTAL, attach, batch, bits, everything, net, start, stored, train

import nmrun
from nmrun.errors import ConfigError
from nmrun.integrations.training import Training
from nmrun.recipes import ASP
from nmrun.recipes.lbc import LBC
from nmrun.recipes.ste import STE


class Sam(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Fails(LBC):
    """It has written weights, state and groups before it notices."""

    name = "fails"

    def attach(self, weights: Any, optimizer: torch.optim.Optimizer) -> None:
        super().attach(weights, optimizer)
        for weight in weights:
            weight.dense.mul_(2.0)
            weight.put_state(optimizer)
        raise ConfigError("it cannot")


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Values, state and groups, the hooks, and which objects there are."""
    groups = [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
    state = {id(p): bits(dict(s)) for p, s in optimizer.state.items()}
    hooks = [len(getattr(optimizer, name)) for name in vars(optimizer) if name.endswith("hooks")]
    names = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    modules = [sorted(vars(m)) for m in model.modules()]
    return bits(model.state_dict()), bits(groups), state, hooks, names, modules


class Floats(STE):
    name = "floats"

    def choose(self, weight: Any) -> Tensor:
        return torch.ones_like(weight.dense)


FAILURES: dict[str, dict[str, Any]] = {
    "Floats.choose gave": {"recipe": Floats()},
    "it cannot": {"recipe": Fails()},
    "needs a name other than dense": {"recipe": "test_sparsify.Overwrites"},
    "not a power of two": {"recipe": "sdgf_stepwise", "pattern": "3:8"},
    "mvue and fp8 can change nothing at conv.weight": {"mvue": "2:4", "include": "conv"},
    "makes the input gradient N:M by": {"recipe": "bi_mask", "input_gradient": "double_prune"},
    "input_gradient=double_prune can change nothing at head.weight: it is for": {
        "input_gradient": "double_prune", "pattern": "1:8", "include": "head",
    },
    "t_i=0.6 must be below t_f=0.5": {"recipe": "lbc", "t_i": 0.6, "t_f": 0.5},
    "decay=-1.0: it takes": {"decay": -1.0},
    "pad=no: it takes true or false": {"pad": "no"},
    "fp8=no: it takes true or false": {"fp8": "no"},
    "fp8 can change nothing at conv.weight": {"recipe": "sqft", "mvue": "2:4", "include": "conv"},
}  # fmt: skip


class Overwrites(LBC):
    name = "overwrites"

    def attach(self, weights: Any, optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            weight["dense"] = weight.dense.clone()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("message", FAILURES)
def test_a_failure_leaves_all_as_it_was(message, trained):
    layers = {"conv": nn.Conv1d(16, 16, 1), "flat": nn.Flatten(), "head": nn.Linear(16, 12)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)

    def step():
        model(torch.ones(2, 16, 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if trained:
        step()
    before = all_of(model, optimizer)
    options = {"pattern": "2:4", "total_steps": TOTAL, **FAILURES[message]}
    with one_line(ValueError, message):
        nmrun.sparsify(model, optimizer, **{"exclude": None, **options})
    assert all_of(model, optimizer) == before
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)
    step()
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


@pytest.mark.parametrize("trained", [False, True])
def test_a_failure_after_channels_were_reordered_puts_them_back(trained):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
    )
    model.append(nn.Linear(16, 6))
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    if trained:
        model(batch(0)[:, :8]).square().mean().backward()
        optimizer.step()
    before = all_of(model, optimizer)
    recipe = ASP(prune_at=0.0, permute=True)
    options: dict[str, Any] = {"input_gradient": "double_prune", "include": "5"}
    with one_line(ValueError, "input_gradient=double_prune can change nothing at 5.weight: it is"):
        nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, **{"exclude": None, **options})
    assert all_of(model, optimizer) == before


def test_a_failure_after_a_loaded_state_leaves_that_too():
    model, optimizer, _ = start("sr_ste")
    train(model, optimizer, range(3))
    other = net(5)
    second = nmrun.optim.AdamW(other.parameters(), lr=0.02)
    for part, state in zip((other, second), stored(model, optimizer), strict=True):
        part.load_state_dict(state)
    before = all_of(other, second)
    # found out when the layers' products are installed, after the state was taken
    with pytest.raises(
        ConfigError, match=r"mvue and fp8 can change nothing at 0\.weight, 2\.weight: it is"
    ):
        for layer in (other[0], other[2]):
            vars(layer)["forward"] = partial(type(layer).forward, layer)
        changed = all_of(other, second)
        attach(other, second, "sr_ste", mvue="2:4")
    assert all_of(other, second) == changed
    for layer in (other[0], other[2]):
        del vars(layer)["forward"]
    assert all_of(other, second) == before
    attach(other, second, "sr_ste")
    train(model, optimizer, range(3, 6))
    train(other, second, range(3, 6))
    assert bits(other.state_dict()) == bits(model.state_dict())


class ByGroup(torch.optim.Optimizer):
    """As Muon's authors and nanochat have it: keys in each group, and no defaults."""

    def __init__(self, params: Any, defaults: Any = None, **group: Any) -> None:
        super().__init__([{"params": list(params), "use_muon": False, **group}], defaults or {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() if group["use_muon"] else p.grad, alpha=group["lr"])


ADDING = ("lbc", "maskllm", "sqft", "proxsparse")


@pytest.mark.parametrize("recipe", ADDING)
def test_an_optimizer_without_a_learning_rate_by_default_is_refused(recipe):
    model = net()
    optimizer = ByGroup(model.parameters(), lr=0.02)
    before = all_of(model, optimizer)
    with pytest.raises(ConfigError, match=f"{recipe} freezes weights or adds parameters, and ByGr"):
        attach(model, optimizer, recipe)
    assert all_of(model, optimizer) == before
    attach(model, optimizer, "sr_ste")
    train(model, optimizer, range(2))


@pytest.mark.parametrize("recipe", ADDING)
def test_keys_that_all_groups_share_count_for_added_parameters_too(recipe):
    model, plain = net(), net()
    optimizer = ByGroup(model.parameters(), {"lr": 0.02})
    stock = torch.optim.SGD(plain.parameters(), lr=0.02)
    for trained, by in ((model, optimizer), (plain, stock)):
        torch.manual_seed(1)
        handle = attach(trained, by, recipe)
        train(trained, by, range(TOTAL), handle)
    assert bits(model.state_dict()) == bits(plain.state_dict())


def test_groups_of_two_kinds_are_refused_by_recipes_that_add_one():
    model = net()
    optimizer = ByGroup(model[0].parameters(), {"lr": 0.02})
    optimizer.add_param_group({"params": list(model[2].parameters()), "use_muon": True})
    before = all_of(model, optimizer)
    with pytest.raises(ConfigError, match="ByGroup has groups that differ in use_muon"):
        attach(model, optimizer, "lbc")
    assert all_of(model, optimizer) == before


@pytest.mark.parametrize("recipe", ["lbc", "maskllm", "sqft"])
def test_adagrad_is_refused_by_recipes_that_add_parameters(recipe):
    """It makes its state in its constructor."""
    model = net()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    before = all_of(model, optimizer)
    with one_line(ConfigError, "Adagrad makes its state in its constructor alone"):
        attach(model, optimizer, recipe)
    assert all_of(model, optimizer) == before
    attach(model, optimizer, "sr_ste")
    train(model, optimizer, range(2))


@pytest.mark.parametrize("recipe", ADDING)
def test_an_optimizer_of_named_parameters_serves(recipe):
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.02)
    handle = attach(model, optimizer, recipe)
    train(model, optimizer, range(TOTAL), handle)
    handle.finalize()


def test_a_layer_that_modelopt_masks_is_refused():
    kind: Any = type("SparseLinear", (nn.Linear,), {"__module__": "modelopt.torch.opt.dynamic"})
    model = nn.Sequential(kind(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nmrun.sparsify(model, optimizer, exclude=None).abandon()  # not masked yet
    model[0].register_buffer("_weight_mask", torch.ones(8, 8, dtype=torch.bool), persistent=False)
    before = all_of(model, optimizer)
    with pytest.raises(ConfigError, match="0 has a mask of ModelOpt's"):
        nmrun.sparsify(model, optimizer, exclude=None)
    assert all_of(model, optimizer) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates its closure several times a step"),
        (lambda p: torch.optim.SGD(p, 0.1, maximize=True), "maximize=True turns the gradient"),
        (lambda p: Sam(p, 0.1), "Sam moves weights between two backward passes"),
        (lambda p: object(), "object is no torch optimizer"),
    ],
)
def test_optimizers_that_cannot_serve(make, message):
    model = net()
    before = bits(model.state_dict())
    optimizer = make(list(model.parameters()))
    with one_line(ConfigError, message):
        nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=None)
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("second", ["ste", "dense"])
def test_parameters_that_are_sparse_already_are_refused(second):
    """By the same optimizer, through the model that holds them, and once they are free, not."""
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(2))
    outer = nn.Sequential(model, nn.Linear(4, 4))
    before = all_of(model, optimizer)
    for whole in (model, outer):
        with pytest.raises(ConfigError, match=r"sparse already: call finalize\(\) on its handle"):
            nmrun.sparsify(whole, optimizer, second, "2:4", exclude=None)
    assert all_of(model, optimizer) == before
    handle.finalize()
    nmrun.sparsify(model, optimizer, second, "2:4", exclude=None)


class Branches(nn.Module):
    """Two layers, of which the second may have no part in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.first(x) + (self.second(x) if both else 0)
        return y


@pytest.mark.parametrize(
    ("recipe", "key"),
    [("sqft", "up"), ("cast", "scales"), ("lbc", "scores"), ("maskllm", "scores")],
)
def test_added_parameters_of_a_layer_without_a_gradient_stay(recipe, key):
    """Though the loop clears the gradients of the model alone. Adam without momentum moves nothing
    whose gradient is missing."""
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, betas=(0.0, 0.999), weight_decay=0.0)
    options = {"dense": 0.0} if recipe == "maskllm" else {}
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", 100, **{"exclude": None, **options})
    values = []
    for step in range(5):
        model.zero_grad()
        model(batch(step), both=step < 2).square().mean().backward()
        optimizer.step()
        values.append([weight[key].clone() for weight in handle.sparse])
    assert not torch.equal(values[1][0], values[4][0])
    assert torch.equal(values[1][1], values[4][1])


@pytest.mark.parametrize("recipe", ["step", "asp", "t_sr_ste", "mdgf_linear"])
def test_a_recipe_that_has_trained_begins_anew(recipe):
    handle, fresh = start(recipe)[2], start(recipe)
    train(handle.model, handle.optimizer, range(TOTAL))
    model = net()
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    again = nmrun.sparsify(model, optimizer, handle.recipe, "2:4", TOTAL, exclude="4")
    assert (again.recipe.step, again.phase, again.pop_events()) == (0, fresh[2].phase, [])
    train(model, optimizer, range(TOTAL))
    train(*fresh[:2], range(TOTAL))
    assert bits(model.state_dict()) == bits(fresh[0].state_dict())
    assert handle.recipe.step == TOTAL


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((name, {}) for name in SPARSE),
        ("slope", {"mask": "random"}),
        ("asp", {"permute": True, "prune_at": 0.0}),
    ],
)
def test_the_default_device_changes_nothing(recipe, options):
    """It may be another than the model's, and than the one where random numbers are drawn."""
    expected = start(recipe, **options)
    model = net()
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, fused=False)
    with torch.device("meta"):
        handle = attach(model, optimizer, recipe, **options)
    train(model, optimizer, range(TOTAL))
    train(*expected[:2], range(TOTAL))
    assert everything(model, optimizer, handle) == everything(*expected)


@pytest.mark.parametrize("option", ["include", "exclude", "overrides", "dims"])
def test_a_layer_by_its_class_is_told_that_it_takes_names(option):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    named = {"overrides": {nn.Linear: "1:8"}, "dims": {nn.Linear: 1}}
    value: Any = named.get(option, [nn.Linear])
    with one_line(ConfigError, f"{option}: <class 'torch.*Linear'> is not a regular expression"):
        nmrun.sparsify(model, optimizer, **{"exclude": None, option: value})
    with pytest.raises(TypeError, match="sparsity: no such hyperparameter; did you mean pattern"):
        nmrun.sparsify(model, optimizer, sparsity="2:4", exclude=None)


@pytest.mark.parametrize("recipe", SPARSE)
def test_the_state_dict_is_plain_and_nm_at_every_step_of_a_sparse_phase(recipe):
    keys = list(net().state_dict())
    model, optimizer, handle = start(recipe)
    parameters = [id(p) for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    seen = 0
    for step in range(TOTAL):
        assert list(model.state_dict()) == keys
        assert all(type(p) is nn.Parameter for p in model.parameters())
        if handle.is_sparse:
            seen += 1
            fresh = net(9)
            fresh.load_state_dict(model.state_dict(), strict=True)
            for layer in (fresh[0], fresh[2]):
                nmrun.sparsity.check_nm(layer.weight, "2:4")
            assert torch.equal(fresh(torch.ones(1, 16)), model.eval()(torch.ones(1, 16)))
            model.train()
        train(model, optimizer, [step])
    assert handle.is_sparse
    late = recipe in ("maskllm", "proxsparse", "cast")  # they arrive with the last step
    assert seen or late
    assert [id(p) for p in model.parameters()] == parameters
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_parameter_keeps_its_gradient_and_its_hooks():
    model = net()
    called: list[Tensor] = []
    model[0].weight.register_hook(called.append)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attach(model, optimizer, "ste")
    train(model, optimizer, range(2))
    assert len(called) == 2


@pytest.mark.parametrize("make", [
    lambda model, optimizer: nmrun.sparsify(model, optimizer, "ste", "2:4"),
    lambda model, optimizer: Training("ste", "2:4")._begin(model, optimizer, None),
], ids=["sparsify", "callbacks"])  # fmt: skip
def test_the_first_layer_and_the_head_stay_dense_unless_told_otherwise(make):
    model, optimizer, told = start("ste", exclude=None)
    assert [weight.name for weight in told.sparse] == ["0.weight", "2.weight", "4.weight"]
    told.abandon()
    handle = make(model, optimizer)
    assert [weight.name for weight in handle.sparse] == ["2.weight"]
    assert nmrun.sparsity.check_nm(model, "2:4") == ["2.weight"]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_a_first_layer_and_a_head_alone_gets_a_line(layers):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with one_line(ConfigError, "an empty exclude allows"):
        nmrun.sparsify(model, optimizer)
    assert len(nmrun.sparsify(model, optimizer, exclude=()).sparse) == layers
