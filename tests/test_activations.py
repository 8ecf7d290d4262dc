"""Activations pruned in a user's own loop: which modules, when, and what is measured."""

from __future__ import annotations

import copy

import pytest
import torch
from errors import one_line
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.models import images, texts
from nmrun.patterns import Pattern
from nmrun.step.activations import SquaredReLU, keep_largest

TOTAL = 10


class FeedForward(nn.Sequential):
    """16 features, of 8 inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), SquaredReLU(), nn.Linear(16, 4))


def by_hand(model: FeedForward, x: Tensor, pattern: str) -> Tensor:
    """The layer written out."""
    first, second = model[0], model[2]
    activations = functional.linear(x, first.weight, first.bias).clamp_min(0) ** 2
    pruned = keep_largest(activations, Pattern.parse(pattern))
    return functional.linear(pruned, second.weight, second.bias)


@pytest.fixture
def model() -> FeedForward:
    torch.manual_seed(0)
    return FeedForward()


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "4:2:8"])
def test_the_second_product_sees_the_pattern(model, pattern):
    seen: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    nmrun.sparse_activations(model, pattern)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(model(x), by_hand(model, x, pattern), rtol=0, atol=0)
    groups = (seen[0] != 0).unflatten(-1, (-1, Pattern.parse(pattern).m))
    assert int(groups.sum(-1).max()) <= Pattern.parse(pattern).n
    assert float(groups.float().mean()) > 0.05


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"dense_start": 0.2, "dense_end": 0.3}, [True] * 2 + [False] * 5 + [True] * 3),
        # shorter than a step it is one step: an export takes dense activations for granted
        ({"dense_end": 0.01}, [False] * 9 + [True]),
    ],
)
def test_dense_steps_at_both_ends_have_the_bits_of_a_dense_model(model, ends, expected):
    dense, x = copy.deepcopy(model), torch.randn(6, 8)
    activations = nmrun.sparse_activations(model, "1:8", total_steps=TOTAL, **ends)
    alike = []
    for step in range(TOTAL):
        activations.at(step)
        alike.append(torch.equal(model(x), dense(x)))
    assert alike == expected


def test_steps_beyond_the_last_are_as_the_last(model):
    """As where a loop counts from 1, or makes more steps than it planned."""
    dense, x = copy.deepcopy(model), torch.randn(6, 8)
    for options, alike in (({"dense_start": 0.2}, False), ({"dense_end": 0.3}, True)):
        activations = nmrun.sparse_activations(model, "1:8", total_steps=TOTAL, **options)
        for step in (TOTAL - 1, TOTAL, TOTAL + 5):
            activations.at(step)
            assert torch.equal(model(x), dense(x)) == alike
        activations.remove()
    assert torch.equal(model(x), dense(x))


def test_a_copy_of_the_model_is_in_the_same_phase(model):
    activations = nmrun.sparse_activations(model, "1:8", total_steps=TOTAL, dense_end=0.5)
    twin, x = copy.deepcopy(model), torch.randn(6, 8)
    for step in (0, 9):
        activations.at(step)
        assert torch.equal(twin(x), model(x))
    assert not torch.equal(model(x), by_hand(model, x, "1:8"))


@pytest.mark.minutes
def test_compiled_as_a_whole_it_computes_the_same(model):
    activations = nmrun.sparse_activations(model, "2:4", total_steps=TOTAL, dense_end=0.5)
    compiled, x = torch.compile(model, fullgraph=True), torch.randn(6, 8)
    for step in (0, 9, 0):
        activations.at(step)
        ends = []
        for run in (model, compiled):
            y = run(x)
            ends.append((y, *torch.autograd.grad(y.sum(), list(model.parameters()))))
        torch.testing.assert_close(*ends)


@pytest.mark.parametrize("pattern", ["2:4", "4:2:8"])
def test_a_compiler_is_told_how_the_result_lies_in_memory(pattern):
    turned = torch.randn(16, 8).t()
    with FakeTensorMode() as mode:
        told = keep_largest(mode.from_tensor(turned), Pattern.parse(pattern))
    assert keep_largest(turned, Pattern.parse(pattern)).stride() == told.stride()


def test_what_is_measured(model):
    activations = nmrun.sparse_activations(model, "2:4", total_steps=TOTAL, dense_end=0.5)
    x = torch.randn(50, 8)
    plain = functional.relu(model[0](x)).square().detach()
    kept_energy = plain.unflatten(-1, (-1, 4)).sort(-1).values[..., 2:].square().sum()
    for step in (0, 9):
        activations.at(step)
        with activations.measured() as sums:
            model(x[:20])
            model(x[20:])
        shares = activations.shares(sums)
        assert shares["activation_zeros"] == pytest.approx(float((plain == 0).float().mean()))
        assert shares["activation_kept"] == pytest.approx(
            float(kept_energy / plain.square().sum()), rel=1e-6
        )
    assert 0.3 < shares["activation_zeros"] < 0.7
    assert shares["activation_kept"] < 1


@pytest.mark.parametrize(
    "build",
    [
        lambda a: (texts.GPTNetwork(19, 12, 2, 2, 16, 0.0, True, a), (torch.arange(12)[None],)),
        lambda a: (images.vit((1, 8, 8), 10, 2, 2, 16, 4, 0.0, 0.0, a), (torch.randn(3, 1, 8, 8),)),
        lambda a: (
            texts.TextEncoderNetwork(19, 12, 3, 2, 4, 16, 0.1, a),
            (torch.arange(12)[None], torch.ones(1, 12).bool(), torch.zeros(1, 12).long()),
        ),
    ],
    ids=["gpt", "vit", "text_encoder"],
)
def test_networks_with_squared_relus(build):
    """Every feed-forward layer has one, in evaluation too, and the weights are those of GELU's."""
    usual, inputs = build("gelu")
    model, _ = build("relu2")
    for network in (usual.eval(), model.eval()):
        torch.manual_seed(0)
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.3)
    assert [*usual.state_dict()] == [*model.state_dict()]
    activations = nmrun.sparse_activations(model, "2:4")
    assert len(activations.modules) == 2
    with torch.no_grad(), activations.measured() as sums:
        pruned = model(*inputs)
    assert 0 < activations.shares(sums)["activation_zeros"] < 1
    assert not torch.allclose(pruned, usual(*inputs))
    with pytest.raises(ConfigError, match="this model has none"):
        nmrun.sparse_activations(usual, "2:4")


def test_squared_relus_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    model = nn.Sequential(nn.Linear(8, 16), activations.ACT2FN["relu2"], nn.Linear(16, 4))
    sparse = nmrun.sparse_activations(model, "2:4")
    assert sparse.modules == ["1"]


def test_other_modules_by_name():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert nmrun.sparse_activations(model, "2:4", include="1").modules == ["1"]
    x = torch.randn(5, 8)
    pruned = keep_largest(model[0](x).relu(), Pattern(2, 4))
    assert torch.equal(model(x), model[2](pruned))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "5:4"}, "5:4 is not an N:M pattern"),
        ({"pattern": "8:2:4"}, "is not a V:N:M pattern"),
        ({"include": "nothing"}, "include: 'nothing' is the name of no module"),
        ({"include": "(1"}, r"include: '\(1' is not a regular expression: missing"),
        ({"dense_end": 0.5}, "dense_start and dense_end need total_steps"),
        ({"dense_end": 0.5, "dense_start": 0.5, "total_steps": 9}, "less than 1 together"),
        ({"dense_end": -0.5, "total_steps": 9}, "dense_end=-0.5: it takes"),
        ({"dense_start": "a", "total_steps": 9}, "dense_start=a: it takes"),
        (
            {"dense_start": 0.5, "dense_end": 0.4, "total_steps": 2},
            "leave no step of 2 that is sparse",
        ),
        ({"include": 3}, "include=3: it takes a regular expression or a list of them"),
        ({"include": ["1", 2]}, "include: 2 is not a regular expression"),
        ({"total_steps": -3}, "total_steps=-3: it takes a whole number, 1 or more"),
    ],
)
def test_mistakes_get_one_line(model, options, message):
    x = torch.randn(3, 8)
    before = model(x)
    with one_line(ValueError, message):
        nmrun.sparse_activations(model, **options)
    assert torch.equal(model(x), before)


def test_features_that_m_does_not_divide(model):
    nmrun.sparse_activations(model, "2:5")
    with pytest.raises(ConfigError, match="2:5 activations: 1 has 16 features, which 5 does not"):
        model(torch.randn(3, 8))


def test_an_output_that_is_no_tensor():
    layer = nn.MultiheadAttention(8, 2)
    nmrun.sparse_activations(nn.ModuleDict({"attention": layer}), "2:4", include="attention")
    with one_line(ConfigError, "attention gives a tuple, and not a tensor"):
        layer(*[torch.randn(3, 2, 8)] * 3)
