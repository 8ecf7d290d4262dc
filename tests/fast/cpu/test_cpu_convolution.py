"""Convolutions that train through N:M products on the CPU, against masks in dense ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import batch, net, train
from torch import Tensor, nn

from nmrun import accelerate, optim, sparsify
from nmrun.fast.cpu import convolution
from nmrun.fast.cpu.convolution import ConvolutionProducts
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.packed_convolution import PackedConvolution
from nmrun.sparsity.masks import hard_threshold

pytestmark = [
    pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here"),
    pytest.mark.usefixtures("small_layers"),
]


@pytest.mark.parametrize(
    ("recipe", "pattern", "options"),
    [
        ("sr_ste", "2:4", {}),
        ("step", "1:8", {"switch": 0.3}),
        ("s_ste", "2:4", {}),
        ("ste", "1:4", {"input_gradient": "double_prune"}),
        ("ste", "3:7", {"pad": True}),
    ],
)
def test_trains_as_with_masks_alone(recipe: str, pattern: str, options: dict[str, Any]) -> None:
    _, _, expected = train("off", recipe, pattern, **options)
    handle, choices, losses = train("packed", recipe, pattern, **options)
    assert [c.path for c in choices if not c.always_dense] == ["packed"] * 3
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] != losses[0]
    assert all(isinstance(w.layer.packed, ConvolutionProducts) for w in handle.sparse)
    assert all(int(w.layer.packed.forward_start[-1]) for w in handle.sparse)


def test_a_weight_that_is_not_a_number_stays_beside_the_n_largest() -> None:
    weight = hard_threshold(torch.randn(8, 8, 3, 3), "2:4", 1)
    weight[:, :, 1, 1] = torch.nan
    packed = ConvolutionProducts((8, 8), Window((3, 3)))
    packed.write(weight, None)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(packed(x, weight, None).isnan(), F.conv2d(x, weight).isnan())


def test_all_gradients_are_those_of_finite_differences() -> None:
    weight = hard_threshold(torch.randn(6, 8, 3, 2), "2:4", 1).requires_grad_()
    packed = ConvolutionProducts((6, 8), Window((3, 2), (2, 1), (1, 1)))
    packed.write(weight, None)
    x, bias = torch.randn(3, 8, 5, 4, requires_grad=True), torch.randn(6, requires_grad=True)
    dz = torch.randn(packed(x, weight, bias).shape)
    gradients = torch.autograd.grad(packed(x, weight, bias), (x, weight, bias), dz)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    z = F.conv2d(*exact, (2, 1), (1, 1))
    for a, b in zip(gradients, torch.autograd.grad(z, exact, dz.double()), strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 5, 5), (8, 5, 5)], ids=str)
def test_what_comes_out_may_be_written_in_place(shape: tuple[int, ...]) -> None:
    """As by ``nn.ReLU(inplace=True)``: in training and in inference with gradients."""
    weight = hard_threshold(torch.randn(6, 8, 3, 3), "2:4", 1).requires_grad_()
    packed = ConvolutionProducts((6, 8), Window((3, 3)))
    packed.write(weight, None)
    deployed = PackedConvolution.of(weight.detach(), Window((3, 3)))
    x = torch.randn(shape, requires_grad=True)
    in_training = [partial(packed, weight=weight, bias=None)] if x.dim() == 4 else []
    for convolve in (deployed, *in_training):
        (expected,) = torch.autograd.grad(convolve(x).relu().square().sum(), x)
        (gradient,) = torch.autograd.grad(convolve(x).relu_().square().sum(), x)
        assert torch.equal(gradient, expected)


def accelerated(**options: Any) -> tuple[nn.Conv2d, Tensor]:
    """A convolution that is packed, in training, and images for it."""
    model, x = nn.Sequential(nn.Conv2d(8, 16, 3, **options)), torch.randn(4, 8, 6, 6)
    handle = sparsify(
        model, optim.AdamW(model.parameters()), "ste", "2:4", total_steps=8, exclude=None
    )
    assert accelerate(handle, lambda: model(x), "packed")[0].path == "packed"
    return model[0], x


@pytest.mark.parametrize("shape", [(4, 4, 6, 6), (4, 12, 6, 6), (4, 8, 2, 6)], ids=str)
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    convolve, _ = accelerated()
    with pytest.raises(RuntimeError, match=r"channels|smaller than the kernel"):
        convolve(torch.randn(shape))


@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
def test_outputs_are_stored_as_by_torch(images_last: bool, weight_last: bool) -> None:
    """A network may take a view of them."""
    convolve, x = accelerated()
    if weight_last:
        convolve.to(memory_format=torch.channels_last)
    if images_last:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = F.conv2d(x, convolve.weight, convolve.bias)
    result = convolve(x)
    assert result.stride() == expected.stride()
    assert torch.allclose(result, expected, atol=1e-5)


def test_gradients_of_gradients_are_refused() -> None:
    convolve, x = accelerated()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(convolve(x).sum(), x, create_graph=True)


def test_a_weight_of_another_dtype_is_packed_as_float32() -> None:
    weight, x = (
        hard_threshold(torch.randn(6, 8, 3, 3), "2:4", 1).bfloat16(),
        torch.randn(2, 8, 5, 5),
    )
    packed = ConvolutionProducts((6, 8), Window((3, 3)))
    packed.write(weight, None)
    assert torch.allclose(packed(x, weight, None), F.conv2d(x, weight.float()), atol=1e-4)


@pytest.mark.slow
def test_operators_are_as_torch_wants_them() -> None:
    weight = hard_threshold(torch.randn(6, 8, 3, 3), "2:4", 1)
    packed = ConvolutionProducts((6, 8), Window((3, 3), padding=(1, 1)))
    packed.write(weight, None)
    parts = [[getattr(packed, f"{kind}_{part}") for part in ("values", "index", "start")]
             for kind in ("forward", "backward")]  # fmt: skip
    for values, index, start in parts:  # what lies behind the non-zeros is nobody's
        values[int(start[-1]) :], index[int(start[-1]) :] = 0, 0
    window = packed.window.numbers
    x = torch.randn(3, 8, 5, 4, requires_grad=True)
    operands = (x, weight.clone().requires_grad_(), None, *parts, window)
    torch.library.opcheck(convolution.convolution, operands)
    dz = torch.randn(3, 6, 5, 4)
    torch.library.opcheck(convolution.convolution_back, (dz, weight, parts[1], [5, 4], window))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": 2}, "grouped"),
        ({"padding_mode": "reflect"}, "padding reflect"),
    ],
)
def test_what_is_not_packed_says_why(options: dict[str, Any], reason: str) -> None:
    model = net(**options)
    handle = sparsify(model, optim.AdamW(model.parameters()), "ste", "2:4", exclude=["7"])
    choices = accelerate(handle, lambda: model(batch(0)[0]), "packed")
    assert reason in choices[0].reason
    assert [c.path for c in choices if not c.always_dense] == [None, "packed", "packed"]
