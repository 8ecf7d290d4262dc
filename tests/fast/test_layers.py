"""Layers of a deployed model one by one: in a state dict, a pickle, a copy, under tracers and the
compiler, with tensors that have no memory, and their gradients.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from deployed import share, stays_itself
from operands import DEFAULTS, by_default, normal, sparse
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from nmrun.fast import fused
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import int8, products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.onednn import Bf16OneDNNLinear, DenseInt8Linear, OneDNNLinear
from nmrun.fast.cpu.packed_convolution import Bf16Convolution, BlockConvolution, PackedConvolution
from nmrun.fast.cpu.packed_linear import (
    Bf16Linear,
    BlockLinear,
    Int8BlockLinear,
    Int8Linear,
    PackedLinear,
)
from nmrun.fast.fused import FusedAttention, FusedGELU


class Kind(NamedTuple):
    """How to make a layer by a pattern, and what it is for."""

    make: Callable[[str], nn.Module]
    why_not: str = ""
    dtype: torch.dtype = torch.float32
    inputs: tuple[tuple[int, ...], ...] = ((5, 32),)
    states: str = ""  # what its state dict has beside the bias
    patterns: tuple[str, str] = ("1:4", "2:4")


def linear(layer: Any, dtype: torch.dtype = torch.float32) -> Callable[[str], nn.Module]:
    def make(pattern: str) -> nn.Module:
        return layer(sparse(64, 32, pattern).to(dtype), normal(64, seed=1).to(dtype))

    return make


def convolution(layer: Any, taps: int = 2) -> Callable[[str], nn.Module]:
    def make(pattern: str) -> nn.Module:
        weight = sparse(64, 32 * taps**2, pattern).view(64, taps, taps, 32).permute(0, 3, 1, 2)
        return layer.of(weight, Window((taps, taps), stride=(1, 2)), normal(64, seed=1))

    return make


LOW, IMAGES, V = torch.bfloat16, ((3, 32, 4, 5),), ("32:4:16", "16:4:8")
NO_INT8 = int8.KERNELS.obstacle()
NO_ONEDNN = "" if onednn.available_int8() else "no oneDNN"
LINEAR = {
    "packed": Kind(linear(PackedLinear.of), states="values index counts"),
    "bf16": Kind(linear(Bf16Linear.of), dtype=LOW, states="values index counts"),
    "bf16 blocks": Kind(linear(BlockLinear.of), dtype=LOW, states="values index", patterns=V),
    "int8": Kind(linear(Int8Linear.of), NO_INT8, states="values index counts scales"),
    "int8 blocks": Kind(
        linear(Int8BlockLinear.of), NO_INT8, states="values index scales", patterns=V
    ),
    "dense int8": Kind(linear(DenseInt8Linear.of), NO_ONEDNN, states="values scales"),
    "onednn": Kind(linear(OneDNNLinear), NO_ONEDNN, states="weight"),
    "onednn low": Kind(linear(OneDNNLinear, LOW), NO_ONEDNN, LOW, states="weight"),
    "onednn lower": Kind(linear(Bf16OneDNNLinear), NO_ONEDNN, states="weight"),
}
CONVOLUTIONS = {
    "convolution": Kind(convolution(PackedConvolution), "", torch.float32, IMAGES, "values index start"),
    "bf16 convolution": Kind(convolution(Bf16Convolution), "", LOW, IMAGES, "values index counts"),
    "bf16 block convolution": Kind(convolution(BlockConvolution, 1), "", LOW, IMAGES, "", V),
}  # fmt: skip
FUSED = {
    "gelu": Kind(lambda pattern: FusedGELU(), fused.KERNELS.obstacle()),
    "attention": Kind(
        lambda pattern: FusedAttention(), fused.KERNELS.obstacle(), inputs=((2, 3, 5, 8),) * 3
    ),
}
WEIGHTS = LINEAR | CONVOLUTIONS


@pytest.fixture(params=[*WEIGHTS, *FUSED])
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param, request)


def of_kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("weighted", names, indirect=True)


@pytest.fixture(params=WEIGHTS)
def weighted(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param, request)


def kind_of(name: str, request: pytest.FixtureRequest) -> Kind:
    kind = (WEIGHTS | FUSED)[name]
    if name.startswith("bf16"):
        request.getfixturevalue("emulated_bf16")
    if why := products.KERNELS.obstacle() or kind.why_not:
        pytest.skip(why)
    return kind


def given(kind: Kind, seed: int = 0) -> list[Tensor]:
    return [normal(*s, seed=seed + i).to(kind.dtype) for i, s in enumerate(kind.inputs)]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["make_fx", "jit"])
def test_a_trace_computes_other_inputs(kind: Kind, how: str) -> None:
    module, first, other = kind.make(kind.patterns[0]).eval(), given(kind, 10), given(kind, 20)
    if how == "make_fx":
        traced = make_fx(lambda *x: module(*x))(*first)
    else:
        traced = torch.jit.trace(module, tuple(first), check_trace=False)
    torch.testing.assert_close(traced(*other), module(*other))


@torch.no_grad()
def test_tensors_without_memory(kind: Kind) -> None:
    module, inputs = kind.make(kind.patterns[0]).eval(), given(kind)
    expected = module(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = module(*map(mode.from_tensor, inputs))
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


def test_a_state_dict_a_pickle_a_copy_and_compiled(weighted: Kind) -> None:
    engine = torch.backends.quantized.engine
    model, other = (nn.Sequential(weighted.make(p)).eval() for p in weighted.patterns)
    assert torch.backends.quantized.engine == engine
    (x,) = given(weighted)
    if weighted.states:
        names = [*weighted.states.split(), "bias"]
        assert {*model.state_dict()} == {f"0.{name}" for name in names}
    with torch.no_grad():
        expected = other(x)
        reloaded = stays_itself(model, other, x)
        # what a layer holds beside its state dict is its own, and follows another state
        assert torch.equal(other(x), expected)
        reloaded.load_state_dict(other.state_dict())
        assert torch.equal(reloaded(x), expected)
        assert torch.equal(model[0](input=x), model(x))
        assert model(x[:0]).shape == (0, *model(x).shape[1:])
    if "index" in weighted.states:
        wrong = model.state_dict() | {"0.index": torch.full_like(model[0].index, 250)}
        with pytest.raises(RuntimeError, match=r"0: a column that is not of"):
            reloaded.load_state_dict(wrong)


def test_the_gradient_is_that_of_the_dense_weight(weighted: Kind) -> None:
    layer, x = weighted.make(weighted.patterns[0]), given(weighted)[0].requires_grad_()
    z = layer(x)
    dz = normal(*z.shape, seed=7).to(z.dtype)
    (dx,) = torch.autograd.grad(z, x, dz)
    weight = (layer.dense() if hasattr(layer, "dense") else layer.weight).double()
    leaf = x.detach().double().requires_grad_()
    exact = F.linear(leaf, weight) if x.dim() == 2 else F.conv2d(leaf, weight, stride=(1, 2))
    (expected,) = torch.autograd.grad(exact, leaf, dz.double())
    rounded = weighted.dtype == LOW or isinstance(layer, Bf16OneDNNLinear)
    assert share(dx, expected) < (0.01 if rounded else 1e-5)


@pytest.mark.parametrize("how", ["jvp", "dual numbers"])
def test_derivatives_in_forward_mode_are_torchs_or_refused(kind: Kind, how: str) -> None:
    layer, x = kind.make(kind.patterns[0]), tuple(given(kind))
    tangents = tuple(given(kind, seed=7))

    def derivative(function: Callable[..., Tensor]) -> Tensor:
        if how == "jvp":
            return torch.func.jvp(function, x, tangents)[1]
        with forward_ad.dual_level():
            pairs = map(forward_ad.make_dual, x, tangents)
            return forward_ad.unpack_dual(function(*pairs)).tangent

    if isinstance(layer, FusedGELU):
        torch.testing.assert_close(derivative(layer), derivative(F.gelu))
    else:
        with pytest.raises(RuntimeError, match=r"(?i)forward|jvp|functorch"):
            derivative(layer)
    assert layer(*x).isfinite().all()  # outside of it nothing has changed


@pytest.mark.parametrize("other", DEFAULTS, ids=str)
def test_the_dtype_and_device_that_torch_takes_by_default_change_nothing(
    weighted: Kind, other: torch.dtype | torch.device
) -> None:
    def results() -> list[Tensor]:
        layer, x = weighted.make(weighted.patterns[0]), given(weighted)[0].requires_grad_()
        z = layer(x)
        stored = layer.dense() if hasattr(layer, "dense") else layer.weight
        return [z, *torch.autograd.grad(z, x, normal(*z.shape, seed=7).to(z.dtype)), stored]

    expected = results()
    with by_default(other):
        again = results()
    assert all(map(torch.equal, again, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "bf16", "bf16 blocks", "int8", "dense int8", "onednn low",
                                  "convolution", "bf16 convolution"])  # fmt: skip
def test_operators_are_as_torch_wants_them(name: str, request: pytest.FixtureRequest) -> None:
    kind = kind_of(name, request)
    layer: Any = kind.make(kind.patterns[0])
    operators, x = torch.ops.nmrun, given(kind)[0].requires_grad_()
    if isinstance(layer, DenseInt8Linear):
        of, operands = operators.dense_int8, ([layer.values, layer.scales], layer.number)
    elif isinstance(layer, OneDNNLinear):
        of, operands = operators.onednn_linear, ([layer.weight], layer.bias, layer.number)
    else:
        about = layer.parts(), layer.bias, layer.shape, layer.MATRIX.__name__
        of, operands = operators.packed_linear, about
        if isinstance(layer, PackedConvolution):
            of, operands = operators.packed_convolution, (*about, layer.window.numbers)
    torch.library.opcheck(of.default, (x, *operands))


@pytest.mark.skipif(LOW not in onednn.dtypes(), reason="torch has no oneDNN in bfloat16 here")
def test_a_pickle_comes_to_a_processor_that_multiplies_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = LINEAR["onednn low"]
    layer, (x,) = kind.make("1:4"), given(kind)
    expected, stored = layer(x), pickle.dumps(layer)
    monkeypatch.setattr(onednn, "dtypes", lambda: {torch.float32})
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    torch.testing.assert_close(pickle.loads(stored)(x), expected)


# torch's own is that of oneDNN
@of_kinds(*(name for name in WEIGHTS if "onednn" not in name))
def test_integers_are_refused(weighted: Kind) -> None:
    """The result has the dtype of the input, and would be cut off."""
    layer, (size,) = weighted.make(weighted.patterns[0]), weighted.inputs
    with pytest.raises(RuntimeError, match=r"^x of torch.uint8: packed layers take floating-point"):
        layer(torch.ones(size, dtype=torch.uint8))


# the others have a plain weight
@of_kinds(*(n for n in WEIGHTS if "onednn" not in n and n != "bf16 block convolution"))
def test_a_cast_of_the_model_leaves_what_would_mean_something_else(weighted: Kind) -> None:
    """And numbers of float32 that are cast are those of the rounded weight."""
    layer, (x,) = weighted.make(weighted.patterns[0]), given(weighted)
    dense, z = layer.dense(), layer(x)
    layer.bfloat16() if weighted.dtype == torch.float32 else layer.float()
    if isinstance(layer, PackedLinear | PackedConvolution) and not layer.MATRIX.KEPT:
        dense = dense.bfloat16()
    elif layer.bias is not None:
        assert share(layer(x), z) < 0.01
    assert torch.equal(layer.dense(), dense)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.dense(), dense)


@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="packed layers need a compiler")
def test_a_state_of_another_precision_takes_that_of_the_layer():
    """As a state dict does that torch loads into a plain layer."""
    layer = PackedLinear.of(sparse(64, 32, "1:4")).bfloat16()
    other = PackedLinear.of(sparse(64, 32, "2:4"))
    layer.load_state_dict(other.state_dict())
    assert layer.values.dtype == torch.bfloat16
    assert torch.equal(layer.dense(), other.dense().bfloat16())
