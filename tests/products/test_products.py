"""The three products of a linear layer: finite differences, statistics of the estimate, FP8 by
torch's own casts, and on layers.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import operands
import pytest
import torch
import torch.nn.functional as F
from runs import config
from torch import Tensor, nn
from training import Conv1D, by_sgd

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.train import build, console
from nmrun.patterns import Pattern
from nmrun.products import simulation

PAIRS = Pattern(2, 4)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS: dict[str, dict[str, Any]] = {
    "mvue": {"mvue": "2:4"},
    "fp8": {"fp8": True},
    "both": {"mvue": "1:4", "fp8": True},
    "input": {"input_gradient": "mvue"},
}


normal = functools.partial(operands.normal, dtype=torch.float64)


def gradients(
    dz: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """dX, dW and db (or None) of ``simulation.linear``."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    z = simulation.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None, *options)
    grads = torch.autograd.grad(z, leaves, dz)
    return grads if bias is not None else (*grads, None)


# --- plain, and with another weight for the input gradient ----------------------------------------


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (0, 6)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_finite_differences(shape, bias):
    leaves = [normal(*shape), normal(4, 6, seed=1)] + ([normal(4, seed=2)] if bias else [])
    assert torch.autograd.gradcheck(simulation.linear, [t.requires_grad_() for t in leaves])
    torch.testing.assert_close(simulation.linear(*leaves), F.linear(*leaves), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_comes_out_may_be_written_in_place(shape, bias, fp8):
    """As by ``nn.ReLU(inplace=True)``."""
    leaves = [normal(*shape), normal(4, 6, seed=1), normal(4, seed=2) if bias else None]
    leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves]
    wanted = [leaf for leaf in leaves if leaf is not None]
    z = simulation.linear(*leaves, fp8=fp8)
    expected = torch.autograd.grad(z.relu().square().sum(), wanted)
    z = simulation.linear(*leaves, fp8=fp8)
    gradients = torch.autograd.grad(z.relu_().square().sum(), wanted)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("bias", [True, False])
def test_input_gradient_with_the_weight_given(bias):
    x, w, v = normal(2, 3, 6), normal(4, 6, seed=1), normal(4, 6, seed=2)
    dz = normal(2, 3, 4, seed=3)
    b = normal(4, seed=4) if bias else None
    dx, dw, db = gradients(dz, x, w, b, v)
    torch.testing.assert_close(dx, torch.einsum("bto,oi->bti", dz, v))
    torch.testing.assert_close(dw, torch.einsum("bto,bti->oi", dz, x))
    assert db is None or torch.allclose(db, torch.einsum("bto->o", dz))
    v.requires_grad_()
    simulation.linear(x.requires_grad_(), w, b, v).sum().backward()
    assert v.grad is None


@pytest.mark.parametrize(
    ("shape", "kernel", "geometry"),
    [
        ((2, 8, 9), (4, 8, 3), ([2], [1], [2], 1)),
        ((2, 8, 7, 6), (4, 8, 3, 3), ([1, 2], [1, 0], [1, 1], 1)),
        ((2, 8, 7, 6), (4, 4, 3, 1), ([1, 1], [2, 1], [2, 1], 2)),
        ((1, 4, 5, 4, 6), (4, 4, 2, 1, 3), ([1, 2, 1], [0, 1, 1], [1, 1, 2], 1)),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(shape, kernel, geometry, bias):
    plain = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    x, w, v = normal(*shape), normal(*kernel, seed=1), normal(*kernel, seed=2)
    b = normal(kernel[0], seed=3) if bias else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    z = simulation.convolution(x, w, b, v, *geometry)
    at_w, at_v = plain(x, w, b, *geometry), plain(x, v, None, *geometry)
    torch.testing.assert_close(z, at_w)
    dz = normal(*z.shape, seed=4)
    actual, expected = (torch.autograd.grad(y, leaves, dz) for y in (z, at_w))
    torch.testing.assert_close(actual[1:], expected[1:])
    torch.testing.assert_close(actual[0], torch.autograd.grad(at_v, x, dz)[0])
    assert not torch.allclose(actual[0], expected[0])


def test_the_input_gradient_is_estimated_in_linear_layers_whose_outputs_fit():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)).double()
    _, handle = by_sgd(model, "s_ste", "2:4", input_gradient="mvue")
    (event,) = handle.pop_events()
    assert str(event) == "input_gradient=mvue can change nothing at 2.weight"
    x, dz, used = normal(5, 8).requires_grad_(), normal(5, 16, seed=1), handle.sparse[0].weight
    one, two = (torch.autograd.grad(model[0](x), x, dz)[0] for _ in range(2))
    assert not torch.equal(one, two)
    torch.testing.assert_close(model[0](x), F.linear(x, used, model[0].bias))
    model.eval()
    torch.testing.assert_close(torch.autograd.grad(model[0](x), x, dz)[0], dz @ used)


# --- the estimate in the weight gradient ----------------------------------------------------------


def test_the_last_tokens_are_a_group_with_zeros():
    """Ten tokens at 2:4: of the last two, alone with zeros, nothing is left to chance."""
    dz, eye, w = normal(10, 300), torch.eye(10).double(), normal(300, 10)
    estimate = gradients(dz, eye, w, None, None, Pattern(2, 4))[1].T
    torch.testing.assert_close(estimate[8:], dz[8:])
    assert ((estimate[:8] != 0).reshape(2, 4, 300).sum(1) == 2).all()
    dx, _, db = gradients(dz, eye, w, normal(300), None, Pattern(2, 4))
    torch.testing.assert_close(dx, dz @ w)
    torch.testing.assert_close(db, dz.sum(0))


# --- FP8 ------------------------------------------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the format's grid and back, in double precision but for torch's cast itself."""
    scale = {E4M3: 448.0, E5M2: 57344.0}[dtype] / float(x.abs().max())
    return (x.float() * torch.tensor(scale)).to(dtype).double() / scale


def close(actual: Tensor, expected: Tensor, size: float = 1.0) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e15])
def test_fp8_products_by_hand(size):
    x, w, b = normal(6, 8).float() * size, normal(5, 8, seed=1).float(), normal(5).float() * size
    dz = normal(6, 5, seed=3).float()
    z = simulation.linear(x, w, b, fp8=True)
    dx, dw, db = gradients(dz, x, w, b, None, None, True)
    low_x, low_w, low_dz = rounded(x, E4M3), rounded(w, E4M3), rounded(dz, E5M2)
    close(z, low_x @ low_w.T + b.double(), size)
    close(dx, low_dz @ rounded(w, E5M2))
    close(dw, low_dz.T @ rounded(x, E5M2), size)
    torch.testing.assert_close(db, dz.sum(0), rtol=0, atol=0)
    assert z.dtype == dx.dtype == dw.dtype == torch.float32


def test_estimate_first_then_the_cast():
    dz, eye, w = normal(8, 50, dtype=torch.float32), torch.eye(8), normal(50, 8).float()
    pattern = Pattern(1, 4)
    torch.manual_seed(1)
    estimate = nmrun.sparsity.mvue(dz, pattern, 0)
    assert estimate.abs().max() > 1.5 * dz.abs().max()
    torch.manual_seed(1)
    dx, dw, _ = gradients(dz, eye, w, None, None, pattern, True)
    torch.testing.assert_close(dw.T.double(), rounded(estimate, E5M2))
    close(dx, rounded(dz, E5M2) @ rounded(w, E5M2))


def test_fp8_of_zeros_and_extremes_is_finite():
    for dtype in (E4M3, E5M2):
        values, scale = simulation.quantize(torch.zeros(3, 4), dtype)
        assert (values.float() == 0).all()
        assert scale == 1
        for numbers in ([1e-45, 0.0], [3.4e38, -1.0], [1e-38, -1e-40]):
            values, scale = simulation.quantize(torch.tensor(numbers), dtype)
            assert values.float().isfinite().all()
            assert math.isfinite(scale)
            assert scale > 0
        values, scale = simulation.quantize(torch.tensor([1.0, math.inf]), dtype)
        assert values.float().isnan().any()
    zeros = torch.zeros(4, 8)
    for dz, x in ((zeros, zeros), (zeros, normal(4, 8).float()), (normal(4, 8).float(), zeros)):
        assert (simulation.linear(x, zeros, fp8=True) == 0).all()
        grads = gradients(dz[:, :4], x, zeros, torch.zeros(4), None, Pattern(2, 4), True)
        for gradient in grads:
            assert gradient.isfinite().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast_casts_as_linear_does(fp8, backward_too):
    x, w, b = (normal(*s, dtype=torch.float32).requires_grad_() for s in ((6, 8), (4, 8), (4,)))
    v, low = normal(4, 8, seed=5, dtype=torch.float32), torch.bfloat16
    dz = normal(6, 4, seed=6).to(low)
    with torch.autocast("cpu", low):
        z, plain = simulation.linear(x, w, b, v, fp8=fp8), F.linear(x, w, b)
        grads = torch.autograd.grad(z, (x, w, b), dz) if backward_too else None
    grads = grads or torch.autograd.grad(z, (x, w, b), dz)
    assert z.dtype == plain.dtype == low
    assert {g.dtype for g in grads} == {torch.float32}
    to = rounded if fp8 else lambda t, _: t.double()
    low_x, low_w, low_b = (t.detach().to(low) for t in (x, w, b))
    by_hand = to(low_x, E4M3) @ to(low_w, E4M3).T + low_b.double()
    dx, dw = to(dz, E5M2) @ to(v.to(low), E5M2), to(dz, E5M2).T @ to(low_x, E5M2)
    for actual, expected in ((z, by_hand), (grads[0], dx), (grads[1], dw)):
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2**-8)
    doubles = x.detach().double(), w.detach().double()
    with torch.autocast("cpu", low):  # which leaves double precision alone
        torch.testing.assert_close(simulation.linear(*doubles), F.linear(*doubles), rtol=0, atol=0)


# --- on layers ------------------------------------------------------------------------------------


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)).to(dtype)


def sparsify(
    model: nn.Module, recipe: str = "ste", **options: Any
) -> tuple[torch.optim.Optimizer, nmrun.Handle]:
    optimizer = nmrun.optim.Adam(model.parameters(), lr=0.01)
    return optimizer, nmrun.sparsify(
        model, optimizer, recipe, "2:4", total_steps=8, **{"exclude": None, **options}
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def grads_of(model: nn.Module, x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class ByName(nn.Module):
    """A layer whose input is given by its name in torch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


@pytest.mark.parametrize("options", [{}, {"input_gradient": "double_prune"}, {"fp8": True}])
def test_layers_that_are_called_by_keyword(options):
    x = normal(6, 8, dtype=torch.float32)
    gradients = []
    for call in (nn.Sequential, ByName):
        model = mlp()
        for i in (0, 2):
            model[i] = call(model[i])
        sparsify(model, **options)
        gradients.append(list(grads_of(model, x).values()))
    assert all(map(torch.equal, *gradients))


def test_convolutions_that_are_called_by_keyword():
    model = ByName(nn.Conv2d(8, 8, 3))
    _, handle = sparsify(model, input_gradient="double_prune")
    x = normal(2, 8, 5, 5, dtype=torch.float32)
    expected = F.conv2d(x, handle.sparse[0].weight, model.layer.bias)
    assert torch.allclose(model(x), expected, atol=1e-5)


PENALIZED: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    **{name: (nn.Linear(8, 8), options) for name, options in OPTIONS.items()},
    "double_prune": (nn.Linear(8, 8), {"input_gradient": "double_prune"}),
    "convolution": (nn.Conv1d(8, 8, 1), {"input_gradient": "double_prune"}),
    "bi_mask": (nn.Linear(8, 8), {"recipe": "bi_mask"}),
}


@pytest.mark.parametrize(("layer", "options"), PENALIZED.values(), ids=PENALIZED)
def test_a_penalty_on_a_gradient_is_refused(layer, options):
    """For such a critic ``x.grad`` depends on the weights alone, which are constants in these products."""
    model = nn.Sequential(copy.deepcopy(layer))
    sparsify(model, **options)
    x = normal(3, 8, 8, dtype=torch.float32).requires_grad_()
    with pytest.raises(RuntimeError, match="simulated products have no gradients of gradients"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.any()


@pytest.mark.parametrize("recipe", ["ste", "s_ste"])
def test_a_layer_computes_so_by_hand(recipe):
    """Both layers by hand: the projected weight in all three products, the gradient straight
    through to the dense weight.
    """
    model, x = mlp(), normal(6, 8, dtype=torch.float32)
    _, handle = sparsify(model, recipe, mvue="2:4", fp8=True)
    first, last = (w.weight.clone() for w in handle.sparse)
    seed = torch.Generator().manual_seed(9)
    hidden = (rounded(x, E4M3) @ rounded(first, E4M3).T).float() + model[0].bias.detach()
    used = hidden.relu()
    out = (rounded(used, E4M3) @ rounded(last, E4M3).T).float()
    dz = 2 * out
    estimate = nmrun.sparsity.mvue(F.pad(dz, (0, 0, 0, 2)), "2:4", 0, seed)[:6]
    d_last = rounded(estimate, E5M2).T @ rounded(used, E5M2)
    dz = (rounded(dz, E5M2) @ rounded(last, E5M2)).float() * (hidden > 0)
    estimate = nmrun.sparsity.mvue(F.pad(dz, (0, 0, 0, 2)), "2:4", 0, seed)[:6]
    d_first = rounded(estimate, E5M2).T @ rounded(x, E5M2)
    torch.manual_seed(9)
    z = model(x)
    torch.testing.assert_close(z, out, rtol=1e-5, atol=1e-5)
    z.square().sum().backward()
    close(handle.sparse[1].parameter.grad, d_last, 10)
    close(handle.sparse[0].parameter.grad, d_first, 10)
    close(model[0].bias.grad, dz.sum(0), 10)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("recipe", "hyper"), [("step", {"switch": 0.5}), ("asp", {})])
def test_evaluation_and_dense_phases_are_as_they_were(recipe, hyper, options):
    model, plain = mlp(), mlp()
    optimizer, handle = sparsify(model, recipe, **hyper, **options)
    other, plain_handle = sparsify(plain, recipe, **hyper)
    x = normal(6, 8, dtype=torch.float32)
    for step in range(8):
        torch.manual_seed(step)
        train(model, optimizer, 1)
        torch.manual_seed(step)
        train(plain, other, 1)
        same = all(map(torch.equal, model.parameters(), plain.parameters()))
        assert same == (step < 4), step
    assert handle.phase == plain_handle.phase == "sparse"
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain.eval()(x))
    exact, actual = grads_of(plain, x), grads_of(model, x)
    assert all(torch.equal(actual[name], exact[name]) for name in exact)


PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("ste", options) for name, options in OPTIONS.items()},
    "bi_mask": ("bi_mask", {"candidates": 3}),
    "double_prune": ("ste", {"input_gradient": "double_prune"}),
}


@pytest.mark.parametrize("products", PRODUCTS)
def test_a_copy_of_the_model_computes_as_a_plain_one(products):
    """Forward and backward; what is installed belongs to the model that trains."""
    recipe, options = PRODUCTS[products]
    model, plain, x = mlp(), mlp(), normal(6, 8, dtype=torch.float32)
    optimizer, handle = sparsify(model, recipe, **options)
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    assert twin.training
    exact = grads_of(plain, x)
    assert exact.keys() == {name for name, _ in plain.named_parameters()}
    assert torch.equal(twin(x), plain(x))
    assert all(torch.equal(g, exact[name]) for name, g in grads_of(twin, x).items())
    grads = grads_of(model, x)
    assert any(not torch.equal(grads[name], exact[name]) for name in exact)
    train(model, optimizer, 1)  # which the copy knows nothing of
    assert torch.equal(twin(x), plain(x))
    assert not torch.equal(twin[0].weight, model[0].weight)
    handle.finalize(twin)
    assert torch.equal(twin(x), plain(x))
    assert handle.sparse[0].layer is not None
    assert "forward" in vars(model[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_wrapper_around_a_layer_stays_and_calls_the_plain_layer(options):
    """As accelerate's hooks, which take the layer's ``forward`` and set their own."""
    model, x = mlp(), normal(6, 8, dtype=torch.float32)
    optimizer, handle = sparsify(model, **options)
    calls, inner = [], model[0].forward

    @functools.wraps(inner)
    def wrapper(x: Tensor) -> Tensor:
        calls.append(1)
        return inner(x)

    model[0].forward = wrapper
    train(model, optimizer, 2)
    handle.finalize()
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    calls.clear()
    actual, expected = grads_of(model, x), grads_of(plain, x)
    assert calls == [1]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert model[0].forward is wrapper


@pytest.mark.parametrize("products", ["bi_mask", "double_prune"])
def test_the_weight_of_the_input_gradient_follows_every_step(products):
    recipe, options = PRODUCTS[products]
    model = mlp()
    optimizer, handle = sparsify(model, recipe, **options)
    weight = handle.sparse[0]
    place, seen = weight.layer.input_weight.data_ptr(), []
    for _ in range(4):
        train(model, optimizer, 1)
        other, used = weight.layer.input_weight, weight.weight
        assert other.data_ptr() == place
        # pruned once more, of these values
        assert torch.equal(other, torch.where(other != 0, used, 0.0))
        order = torch.arange(16)
        if products == "bi_mask":
            order = weight["permutation"].view(torch.int64)
        assert ((other[order] != 0).reshape(4, 4, 8).sum(1) <= 2).all()
        assert other.any()
        seen.append(other.clone())
        x, dz = normal(6, 8, dtype=torch.float32).requires_grad_(), normal(6, 16, seed=1).float()
        (dx,) = torch.autograd.grad(model[0](x), x, dz)
        torch.testing.assert_close(dx, dz @ other)
    assert not any(map(torch.equal, seen, seen[1:]))


def test_weights_stored_the_other_way_round():
    model = nn.Sequential(Conv1D(5, 8))
    _, handle = sparsify(model, fp8=True, mvue="2:4")
    x = normal(2, 4, 8, dtype=torch.float32).requires_grad_()
    used = handle.sparse[0].weight
    assert ((used != 0).reshape(2, 4, 5).sum(1) == 2).all()
    z = model[0](x=x)  # by its own keyword
    close(z, rounded(x.detach(), E4M3) @ rounded(used, E4M3))
    dz = normal(2, 4, 5, seed=1, dtype=torch.float32)
    torch.manual_seed(2)
    z.backward(dz)
    estimate = nmrun.sparsity.mvue(dz.reshape(8, 5), "2:4", 0, torch.Generator().manual_seed(2))
    expected = rounded(x.detach().reshape(8, 8), E5M2).T @ rounded(estimate, E5M2)
    close(handle.sparse[0].parameter.grad, expected)
    close(x.grad, rounded(dz, E5M2) @ rounded(used, E5M2).T)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_whose_groups_run_along_its_outputs_is_left_alone(options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _, handle = sparsify(model, dims={r"1\.weight": 0}, **options)
    (event,) = handle.pop_events()
    assert str(event).endswith("can change nothing at 1.weight")
    used = handle.sparse[1].weight
    assert ((used != 0).reshape(2, 4, 8).sum(1) == 2).all()
    x, dz = (normal(6, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    z = model[1](x)
    torch.testing.assert_close(z, F.linear(x, used, model[1].bias))
    torch.testing.assert_close(torch.autograd.grad(z, x, dz)[0], dz @ used)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_is_no_plain_linear_layer_is_named_and_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.scaled = Scaled(8, 8)
            self.conv, self.fc, self.patched = nn.Conv1d(8, 8, 1), nn.Linear(8, 8), nn.Linear(8, 8)
            self.patched.forward = lambda x: -F.linear(x, self.patched.weight)

        def forward(self, x):
            x = self.scaled(self.attention(x, x, x)[0])
            return self.patched(self.fc(self.conv(x.mT).mT))

    torch.manual_seed(0)
    model, x = Net(), normal(2, 4, 8, dtype=torch.float32)
    plain = copy.deepcopy(model)
    plain.patched.forward = lambda x: -F.linear(x, plain.patched.weight)
    optimizer, handle = sparsify(model, mvue="1:4")
    sparsify(plain)
    (event,) = handle.pop_events()
    left = "attention.in_proj_weight, attention.out_proj.weight, scaled.weight, conv.weight, patched.weight"
    assert left in str(event)
    torch.testing.assert_close(model(x), plain(x))
    actual, exact = grads_of(model, x), grads_of(plain, x)
    changed = [name for name in exact if not torch.allclose(actual[name], exact[name])]
    assert changed == ["fc.weight"]
    optimizer.step()
    handle.finalize()
    assert "forward" in vars(model.patched)


def test_a_model_without_sparse_linear_layers_is_refused_and_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    with pytest.raises(
        ConfigError, match=r"fp8 can change nothing at 0\.weight.*: it is for linear"
    ):
        sparsify(model, fp8=True)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match="4:2 is not an N:M pattern"):
        sparsify(mlp(), mvue="4:2")


@pytest.mark.parametrize(
    ("options", "precision"),
    [("both", torch.bfloat16), pytest.param("input", torch.float32, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_compiled_in_one_graph(options, precision):
    """aot_eager compiles the backward pass too, and draws the same random numbers as without
    compilation.
    """
    model, eager = mlp(), mlp()
    (optimizer, _), (eager_optimizer, _) = (
        sparsify(net, **OPTIONS[options]) for net in (model, eager)
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        for net, update in ((compiled, optimizer), (eager, eager_optimizer)):
            torch.manual_seed(step)
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                loss = net(normal(6, 8, seed=step, dtype=torch.float32)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
        torch.testing.assert_close(list(model.parameters()), list(eager.parameters()))


# --- on the command line --------------------------------------------------------------------------


def test_config_keys(tmp_path):
    mlps = ("model=mlp", "model.hidden=[16,16,16]", "recipe=s_ste")
    both = config(tmp_path, *mlps, "trainer.mvue=2of4", "trainer.fp8=true")
    parts = build.build(both)
    assert console.plan_lines(both, parts)  # which counts FLOPs on the meta device
    batch = parts.task.micro_batches(0, 0, 1)[0]
    parts.task.loss(parts.model, batch).backward()
    installed = [w.module for w in parts.handle.sparse]
    assert installed
    assert all(module.forward.__module__ == "nmrun.products.layer" for module in installed)
