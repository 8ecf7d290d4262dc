"""Which weights are chosen, which stay dense, and the reason that is given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import reference
import torch
from errors import one_line
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training import Conv1D, by_sgd

from nmrun import Pattern
from nmrun.errors import ConfigError
from nmrun.sparsity.select import candidates, select


def layers(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def names(model: nn.Module, pattern: str = "2:4", **options: Any) -> list[str]:
    return [c.name for c in select(model, Pattern.parse(pattern), **options)[0]]


def reasons(model: nn.Module, pattern: str = "2:4", **options: Any) -> dict[str, str]:
    return {d.name: d.reason for d in select(model, Pattern.parse(pattern), **options)[1]}


# --- what can be sparse ---------------------------------------------------------------------------


# attributes, each with the dimension that it sums over the input
KINDS: dict[str, tuple[nn.Module, dict[str, int]]] = {
    "linear": (nn.Linear(8, 4), {"weight": 1}),
    "conv1d": (nn.Conv1d(8, 4, 3), {"weight": 1}),
    "conv2d": (nn.Conv2d(8, 4, 3), {"weight": 1}),
    "conv3d": (nn.Conv3d(8, 4, 1), {"weight": 1}),
    "grouped": (nn.Conv2d(16, 8, 3, groups=2), {"weight": 1}),
    "hugging face": (Conv1D(12, 8), {"weight": 0}),
    "attention": (nn.MultiheadAttention(8, 2), {"in_proj_weight": 1, "out_proj.weight": 1}),
    "attention of other widths": (
        nn.MultiheadAttention(8, 2, kdim=4, vdim=12),
        {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1, "out_proj.weight": 1},
    ),
    "embedding": (nn.Embedding(8, 8), {}),
    "normalisation": (nn.BatchNorm2d(8), {}),
    "transposed 1d": (nn.ConvTranspose1d(8, 4, 3), {"weight": 0}),
    "transposed 2d": (nn.ConvTranspose2d(8, 4, 3, groups=2), {"weight": 0}),
    "transposed 3d": (nn.ConvTranspose3d(8, 4, 1), {"weight": 0}),
    "lstm": (
        nn.LSTM(8, 12, 2, proj_size=4, bidirectional=True),
        {
            f"weight_{kind}_l{i}{way}": 1
            for i in (0, 1)
            for way in ("", "_reverse")
            for kind in ("ih", "hh", "hr")
        },
    ),
    "gru": (nn.GRU(8, 12), {"weight_ih_l0": 1, "weight_hh_l0": 1}),
    "rnn": (nn.RNN(8, 12), {"weight_ih_l0": 1, "weight_hh_l0": 1}),
    "lstm cell": (nn.LSTMCell(8, 12), {"weight_ih": 1, "weight_hh": 1}),
    "gru cell": (nn.GRUCell(8, 12), {"weight_ih": 1, "weight_hh": 1}),
    "bilinear": (nn.Bilinear(8, 12, 4), {"weight": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_multiplies_an_input_can_be_sparse(kind):
    module, expected = KINDS[kind]
    weights = {c.name.removeprefix("layer."): c for c in candidates(layers(layer=module))}
    assert {name: c.dim for name, c in weights.items()} == expected
    for name, candidate in weights.items():
        assert candidate.parameter is module.get_parameter(name)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Conv1D(6, 8), torch.randn(2, 8)), (nn.Linear(8, 6), torch.randn(2, 8)), (nn.Conv2d(8, 6, 1), torch.randn(2, 8, 1, 1)),
        (nn.Conv2d(8, 6, 3, groups=2), torch.randn(2, 8, 3, 3)), (nn.ConvTranspose1d(8, 6, 3), torch.randn(2, 8, 5)),
        (nn.ConvTranspose2d(8, 6, 3, stride=2), torch.randn(2, 8, 3, 3)), (nn.ConvTranspose3d(8, 6, 1), torch.randn(2, 8, 1, 1, 1)),
    ],
)  # fmt: skip
def test_groups_run_along_what_a_product_sums_over(module, x):
    """Without the weights' slice i along ``dim``, input i (of each group of channels) counts for
    nothing in the output.
    """
    (candidate,) = candidates(module)
    with torch.no_grad():
        candidate.parameter.select(candidate.dim, 3).zero_()
    before = module(x)
    changed = x.clone()
    changed[:, 3 :: candidate.parameter.shape[candidate.dim]] += 1.0
    torch.testing.assert_close(module(changed), before)
    changed[:, 2] += 1.0
    assert not torch.allclose(module(changed), before)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("embedding", "normalisation")])
def test_a_slice_of_the_outputs_makes_one_output(kind):
    """Weights of one index along ``outputs`` make one output, so that their number is the bias's,
    for all that has one.
    """
    module = KINDS[kind][0]
    for candidate in candidates(module):
        per_group = getattr(module, "groups", 1) if "transposed" in kind else 1
        bias = getattr(module, candidate.attribute.replace("weight", "bias"), None)
        if isinstance(bias, Tensor):
            assert candidate.parameter.shape[candidate.outputs] * per_group == len(bias)
        assert candidate.outputs != candidate.dim


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_matrices_sum_over_inputs_and_states(kind):
    module, x, state = getattr(nn, kind)(8, 12), torch.randn(1, 8), torch.randn(1, 12)
    for candidate in candidates(module):
        with torch.no_grad():
            candidate.parameter.select(candidate.dim, 3).zero_()

    def others(x, hidden):
        """One step's output but for unit 3, which a GRU blends with its old state."""
        out = module(x, (hidden, state) if "LSTM" in kind else hidden)
        return (out[0] if isinstance(out, tuple) else out)[:, torch.arange(12) != 3]

    fourth = torch.zeros(12).index_fill(0, torch.tensor([3]), 1.0)
    torch.testing.assert_close(others(x + fourth[:8], state), others(x, state))
    torch.testing.assert_close(others(x, state + fourth), others(x, state))
    assert not torch.allclose(others(x + fourth[:8].roll(1), state), others(x, state))


def test_bilinear_sums_over_its_second_input():
    module, x, y = nn.Bilinear(8, 12, 4), torch.randn(2, 8), torch.randn(2, 12)
    (candidate,) = candidates(module)
    with torch.no_grad():
        candidate.parameter.select(candidate.dim, 11).zero_()
    before = module(x, y)
    y[:, 11] += 1.0
    torch.testing.assert_close(module(x, y), before)


def test_a_group_of_a_transposed_convolution_has_whole_groups_of_m():
    model = layers(
        a=nn.ConvTranspose2d(16, 8, 3, groups=2), b=nn.ConvTranspose2d(16, 8, 3, groups=8)
    )
    depthwise = nn.ConvTranspose1d(8, 8, 3, groups=8)
    assert names(model) == ["a.weight"]
    assert reasons(model, pad=True) == {"b.weight": "2 inputs of one group are not a multiple of 4"}
    assert reasons(depthwise) == {"weight": "1 inputs of one group are not a multiple of 4"}


def test_in_the_order_of_the_modules_and_of_the_model_itself():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), nn.Linear(4, 4)
    )
    assert names(model) == ["0.weight", "1.0.weight", "1.1.weight", "2.weight"]
    assert names(nn.Linear(4, 4)) == ["weight"]
    assert names(nn.Linear(4, 4), include="") == ["weight"]
    assert names(nn.Embedding(4, 4)) == []


# --- which are chosen -----------------------------------------------------------------------------


def tower() -> nn.ModuleDict:
    return layers(**{name: nn.Linear(16, 4) for name in ("stem", "layer1", "layer10", "head")})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["stem", "layer1", "layer10", "head"]),
        ({"exclude": "layer1"}, ["stem", "layer10", "head"]),
        ({"exclude": ["stem", "head"]}, ["layer1", "layer10"]),
        ({"exclude": []}, ["stem", "layer1", "layer10", "head"]),
        ({"exclude": None}, ["stem", "layer1", "layer10", "head"]),
        ({"exclude": r"layer\d"}, ["stem", "layer10", "head"]),
        ({"include": r"layer\d+"}, ["layer1", "layer10"]),
        ({"include": "layer1"}, ["layer1"]),
        ({"include": "stem|head"}, ["stem", "head"]),
        ({"include": [".*1.*", "stem"], "exclude": "layer10"}, ["stem", "layer1"]),
        ({"include": []}, []),
        ({"overrides": {"layer.*": "dense"}}, ["stem", "head"]),
        ({"overrides": {"layer1": "dense"}}, ["stem", "layer10", "head"]),
        ({"exclude": ".*", "overrides": {"head": "1:4"}}, ["head"]),
    ],
)
def test_expressions_match_whole_names(options, expected):
    sparse, dense = select(tower(), Pattern(2, 4), **options)
    assert [c.module_name for c in sparse] == expected
    listed = [c.name for c in sparse] + [d.name for d in dense]
    assert sorted(listed) == sorted(f"{name}.weight" for name in tower())


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_forward_module"])
@pytest.mark.parametrize("prefixed", [False, True])
def test_expressions_match_the_names_with_and_without_a_wrapper(wrapper, prefixed):
    """Those of DDP, torch.compile and Fabric."""
    prefix = rf"{wrapper}\." if prefixed else ""
    options = {"exclude": f"{prefix}layer1", "overrides": {f"{prefix}head": "1:4"}}
    sparse, _ = select(layers(**{wrapper: tower()}), Pattern(2, 4), **options)
    assert [(c.name, str(c.pattern)) for c in sparse] == [
        (f"{wrapper}.stem.weight", "2:4"),
        (f"{wrapper}.layer10.weight", "2:4"),
        (f"{wrapper}.head.weight", "1:4"),
    ]


def test_the_first_override_that_matches_counts():
    ratios = {"layer10": "1:16", "layer1.*": Pattern(3, 8), "head": "dense", ".*": "4:8"}
    sparse, dense = select(tower(), Pattern(2, 4), exclude="stem", overrides=ratios)
    expected = {"stem": "4:8", "layer1": "3:8", "layer10": "1:16"}
    assert {c.module_name: str(c.pattern) for c in sparse} == expected
    (left,) = dense
    assert (left.name, left.shape, left.reason) == ("head.weight", (4, 16), "dense by overrides")
    reverse = select(tower(), Pattern(2, 4), overrides=dict(reversed(ratios.items())))[0]
    assert {str(c.pattern) for c in reverse} == {"4:8"}
    assert {str(c.pattern) for c in select(tower(), Pattern(2, 4))[0]} == {"2:4"}


def test_inputs_must_be_a_multiple_of_m():
    model = layers(
        a=nn.Linear(12, 8), b=nn.Conv2d(24, 8, 4), c=nn.Conv2d(24, 8, 4, groups=4), d=Conv1D(16, 12)
    )
    inputs = {"a.weight": 12, "b.weight": 24, "c.weight": 6, "d.weight": 12}
    for m in (2, 3, 4, 6, 8, 12, 24):
        assert names(model, f"1:{m}") == [name for name, count in inputs.items() if count % m == 0]
    by_name = reasons(model, "1:8")
    assert list(by_name) == ["a.weight", "c.weight", "d.weight"]
    for name, reason in by_name.items():
        assert reason.startswith(f"{inputs[name]} inputs are not a multiple of 8")
    # each by its own pattern
    assert names(model, "1:8", overrides={"a": "1:6"}) == ["a.weight", "b.weight"]
    assert names(model, "1:4", overrides={"[ab]": "1:8"}) == ["b.weight", "d.weight"]
    with pytest.raises(ConfigError, match=r"'a' fits no layer: a.weight with 1:5: 12 inputs"):
        select(model, Pattern(1, 4), overrides={"a": "1:5"})


# --- why the others stay dense --------------------------------------------------------------------


def test_every_reason_is_told():
    model = tower()
    owned = {id(p) for name, p in model.named_parameters() if name != "layer10.weight"}
    model["stem"].weight.requires_grad_(False)
    expected = {"stem.weight": "frozen", "layer10.weight": "not in the optimizer"}
    assert reasons(model, exclude="head", owned=owned) == {**expected, "head.weight": "excluded"}
    # whoever only looks trains nothing
    assert reasons(model, exclude="head") == {"head.weight": "excluded"}
    assert reasons(model, include="stem|layer1")["head.weight"] == "not in include"


def test_what_is_tied_to_an_embedding_stays_dense():
    why = {"embedding.weight": "an embedding", "head.weight": "tied to embedding.weight"}
    parts = {"embedding": nn.Embedding(12, 8), "free": nn.Linear(8, 12), "head": nn.Linear(8, 12)}
    parts["head"].weight = parts["embedding"].weight
    for model in (layers(**parts), layers(**dict(reversed(parts.items())))):
        assert names(model) == ["free.weight"]
        assert reasons(model) == why


def test_an_embedding_that_dims_names_is_sparse():
    embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12)
    model = layers(embedding=embedding, head=head)
    named = {"dims": {r"embedding\.weight": 1}, "exclude": None}
    assert names(model, **named) == ["embedding.weight", "head.weight"]
    head.weight = embedding.weight
    assert names(model, **named) == ["embedding.weight"]
    refused = {"sparse": {"sparse": True}, "in the forward pass": {"max_norm": 1.0}}
    for reason, options in refused.items():
        model = layers(embedding=nn.Embedding(12, 8, **options))
        assert reason in reasons(model, **named)["embedding.weight"]


def test_a_sparse_embedding_trains_as_a_masked_one():
    torch.manual_seed(0)
    embedding = nn.Embedding(12, 8)
    dense = embedding.weight.detach().clone()
    optimizer, handle = by_sgd(embedding, "ste", "2:4", lr=0.5, dims={"weight": 1})
    for step in range(4):
        tokens = torch.arange(step, step + 5)
        mask = reference.mask_of(dense)
        used = (dense * mask).requires_grad_()
        nn.functional.embedding(tokens, used).square().sum().backward()
        dense -= 0.5 * used.grad
        embedding(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.finalize()
    assert torch.equal(embedding.weight, dense * reference.mask_of(dense))


def test_shared_weights_are_sparse_once():
    shared, other = nn.Linear(8, 8), nn.Linear(8, 8)
    model = layers(a=shared, b=shared, c=other)
    other.weight = shared.weight
    assert names(model) == ["a.weight"]
    assert reasons(model) == {}
    assert names(model, include="c") == ["a.weight"]  # any of its names will do
    assert reasons(model, exclude="b") == dict.fromkeys(
        ["a.weight", "b.weight", "c.weight"], "excluded"
    )
    twice = nn.ModuleList([nn.Sequential(shared, shared)])
    assert reasons(twice, "1:3")["0.1.weight"] == "tied to 0.0.weight"
    (sparse,) = select(model, Pattern(2, 4), overrides={"b": "1:4"})[0]
    assert str(sparse.pattern) == "1:4"
    assert len(list(candidates(model))) == 1


def test_weights_tied_across_their_dimensions_stay_dense():
    model = layers(a=nn.Linear(8, 8), b=Conv1D(8, 8))
    model["b"].weight = model["a"].weight
    assert names(model) == []
    assert reasons(model) == {
        "a.weight": "tied to b.weight, which sums over another dimension",
        "b.weight": "tied to a.weight, which sums over another dimension",
    }


COMPUTED = "its weight is computed (weight_norm, spectral_norm or another parametrization)"


@pytest.mark.parametrize(
    ("norm", "originals"),
    [
        (parametrizations.weight_norm, [f"parametrizations.weight.original{i}" for i in (0, 1)]),
        (parametrizations.spectral_norm, ["parametrizations.weight.original"]),
        (nn.utils.weight_norm, ["weight_g", "weight_v"]),
        (nn.utils.spectral_norm, ["weight_orig"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_stays_dense(norm, originals):
    model = layers(normed=norm(nn.Linear(8, 8)), free=nn.Linear(8, 8))
    owned = {id(p) for p in model.parameters()}
    assert names(model, owned=owned) == ["free.weight"]
    assert reasons(model, owned=owned) == {f"normed.{name}": COMPUTED for name in originals}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("package", "name", "standardized"),
    [
        *(("timm.layers", f"{scaled}StdConv2d{same}", True)
          for scaled in ("", "Scaled") for same in ("", "Same")),
        ("timm.layers", "Conv2dSame", False),
        ("transformers.models.bit.modeling_bit", "WeightStandardizedConv2d", True),
    ],
)  # fmt: skip
def test_a_weight_that_forward_standardizes_stays_dense(package, name, standardized):
    """There an input counts where its weight is 0: the mean is subtracted."""
    layer = getattr(pytest.importorskip(package), name)(8, 4, 1)
    with torch.no_grad():
        layer.weight[:, 2:4] = layer.weight[:, 6:] = 0.0
    x = torch.randn(2, 8, 3, 3).requires_grad_()
    layer(x).square().sum().backward()
    assert bool(x.grad[:, 2].any()) == standardized
    sparse, dense = select(nn.Sequential(layer), Pattern(2, 4))
    assert [each.name for each in sparse] == ([] if standardized else ["0.weight"])
    assert not standardized or "standardizes the weight" in dense[0].reason


def test_only_the_computed_matrix_of_a_recurrent_layer_stays_dense():
    model = nn.utils.weight_norm(nn.LSTM(8, 8), "weight_hh_l0")
    assert names(model) == ["weight_ih_l0"]
    assert reasons(model) == {"weight_hh_l0_g": COMPUTED, "weight_hh_l0_v": COMPUTED}


def test_a_recipe_may_refuse():
    asked: list[tuple[tuple[int, ...], int, str]] = []

    def refuses(shape, outputs, pattern):
        asked.append((tuple(shape), outputs, str(pattern)))
        return "too wide" if shape[1 - outputs] > 8 else ""

    model = layers(a=nn.Linear(8, 4), b=nn.Linear(16, 4), c=Conv1D(16, 8))
    options: dict[str, Any] = {"overrides": {"b": "1:8"}, "refuses": refuses}
    assert reasons(model, **options) == {"b.weight": "too wide"}
    assert asked == [((4, 8), 0, "2:4"), ((4, 16), 0, "1:8"), ((8, 16), 1, "2:4")]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"include": "layer"}, "'layer' matches no layer's whole name; there are stem, layer1, la"),
        ({"exclude": ["(", "haed"]}, "exclude: '(' is not a regular expression: "),
        ({"exclude": ["auto", "hed"]}, "exclude: 'hed' matches no layer's"),
        (
            {"overrides": {"head.weight": "1:4"}},
            "overrides: 'head.weight' matches no layer's whole",
        ),
        ({"include": 5}, "include=5: it takes a regular expression or a list of them"),
        ({"exclude": False}, "exclude=False: it takes a regular expression or a list of them"),
        ({"overrides": ["stem"]}, "overrides=['stem']: it takes a dictionary"),
        ({"dims": ["stem.weight"]}, "dims=['stem.weight']: it takes a dictionary"),
        ({"overrides": {"stem": "5:4"}}, "overrides: 'stem': 5:4 is not an N:M pattern"),
        ({"dims": {"[": 1}}, "dims: '[' is not a regular expression"),
        ({"dims": {"nothing": 1}}, "dims: 'nothing' matches no parameter of two dimensions"),
        ({"dims": {"stem.weight": 2}}, "dims: 'stem.weight': 2 is no dimension of stem.weight [4,"),
        ({"dims": {"head.weight": -1}}, "dims: 'head.weight': -1 is no dimension of head.weight"),
    ],
)
def test_an_expression_for_nothing_is_a_mistake(options, line):
    with one_line(ConfigError, re.escape(line)):
        select(tower(), Pattern(2, 4), **options)


def test_of_many_layers_the_line_names_a_dozen():
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(13)])
    with pytest.raises(ConfigError, match=r"there are 0, 1, .*, 10, 11, \.\.\.$"):
        select(deep, Pattern(2, 4), exclude="head")
    with pytest.raises(ConfigError, match=r"there are \(the model itself\)$"):
        select(nn.Linear(4, 4), Pattern(2, 4), exclude="head")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_weights_stays_dense(shape):
    model = layers(empty=nn.Linear(*shape), other=nn.Linear(8, 8))
    assert names(model) == ["other.weight"]
    assert reasons(model) == {"empty.weight": "it has no weights"}
