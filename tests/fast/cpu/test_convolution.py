"""Convolutions with packed weights against float64, and in training against masks alone: in float32, and
in bfloat16 by the instruction and by its definition.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bf16_emulated import HAS_INSTRUCTION
from convolutions import GEOMETRIES, batch, net, train
from operands import DEFAULTS, by_default, normal, under_autocast
from test_cpu_products import resident
from torch import Tensor, nn

from nmrun import accelerate, optim, sparsify
from nmrun.fast.cpu import convolution
from nmrun.fast.cpu.convolution import Bf16ConvolutionProducts, ConvolutionProducts, by_taps
from nmrun.fast.cpu.kernels import bf16, products
from nmrun.fast.cpu.kernels import convolution as kernels
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import Window, convolve, convolve_back
from nmrun.fast.cpu.kernels.products import PackedMatrix
from nmrun.fast.cpu.linear import PRODUCTS
from nmrun.fast.cpu.packed_convolution import PackedConvolution
from nmrun.fast.measurement import BF16
from nmrun.kernels import compiler
from nmrun.sparsity.masks import hard_threshold

pytestmark = [
    pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here"),
    pytest.mark.usefixtures("small_layers"),
]
CASES = [  # and those of more than one block, or of more images than a panel has
    *GEOMETRIES,
    (65, 130, 140, (5, 5), (3, 3), (1, 1), (2, 2), (2, 2)),
    (130, 3, 6, (7, 11), (5, 2), (3, 1), (2, 0), (1, 2)),
    (64, 128, 16, (2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 600, 20, (5, 5), (3, 3), (2, 2), (0, 2), (1, 1)),
    (2, 40, 1100, (3, 3), (3, 2), (1, 1), (2, 2), (1, 1)),
    (3, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 8, 8, (3, 3), (1, 1), (1, 4), (0, 0), (1, 1)),
]


@dataclass(frozen=True)
class Precision:
    """What packs a convolution, the dtype of its products, and its path."""

    products: type[ConvolutionProducts]
    dtype: torch.dtype
    path: str
    close: float  # of gradients

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, seed=seed).to(self.dtype)

    def sparse(self, *shape: int, seed: int = 0, pattern: str = "2:4") -> Tensor:
        """A weight in float32 that this dtype has."""
        return hard_threshold(self.normal(*shape, seed=seed).float(), pattern, 1)

    def bound(self, expected: Tensor, sizes: Tensor, steps: int) -> Tensor:
        """Of sums that cancel, the error is that of their sizes (Higham and Mary 2019: sqrt(n) u); in
        bfloat16 each step rounds, and so does the end."""
        if self.dtype == torch.float32:
            return 2.0**-24 * math.sqrt(steps + 1) * sizes
        return 2**-8 * expected.abs() + 1.01 * (steps + 4) * 2**-24 * sizes


PRECISIONS = {
    "float32": Precision(ConvolutionProducts, torch.float32, "packed", 1e-4),
    "bf16": Precision(Bf16ConvolutionProducts, torch.bfloat16, BF16, 2**-7),
}


@pytest.fixture(params=[*PRECISIONS, *(["bf16 by the instruction"] if HAS_INSTRUCTION else [])])
def precision(request: pytest.FixtureRequest) -> Iterator[Precision]:
    kind, _, instruction = request.param.partition(" ")
    if kind == "bf16" and not instruction:
        request.getfixturevalue("emulated_bf16")
    return PRECISIONS[kind]


def uneven(*shape: int) -> Tensor:
    """A weight that bfloat16 has, of which any number of entries is zero."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.4
    return normal(*shape).bfloat16().float() * mask


def packed(weight: Tensor, precision: Precision) -> tuple[Any, Any]:
    """A weight for the forward product, and for the input gradient."""
    out, channels, *taps = weight.shape
    matrix: type[Any] = Bf16Matrix if precision.dtype == torch.bfloat16 else PackedMatrix
    sides = (out, channels), (channels, out)
    forward, backward = (matrix.empty(*side, math.prod(taps)) for side in sides)
    assert forward.pack_both(by_taps(weight), None, backward) == int((weight != 0).sum())
    assert torch.equal(forward.dense().float(), by_taps(weight))
    assert torch.equal(backward.dense().float(), by_taps(weight.transpose(0, 1)))
    return forward, backward


# --- the products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_against_float64(case: tuple, channels_last: bool, precision: Precision) -> None:
    images, channels, out, size, taps, *moves = case
    weight, bias = uneven(out, channels, *taps), precision.normal(out, seed=2).float()
    x = precision.normal(images, channels, *size, seed=3)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    forward, backward = packed(weight, precision)
    window, steps = Window(taps, *moves), max(channels, out) * taps[0] * taps[1]
    exact_x, sizes_x = (t.requires_grad_() for t in (x.double(), x.double().abs()))
    exact = F.conv2d(exact_x, weight.double(), bias.double(), *moves)
    sizes = F.conv2d(sizes_x, weight.double().abs(), bias.double().abs(), *moves)
    result = convolve(x, forward, bias, window)
    assert (result.shape, result.dtype) == (exact.shape, precision.dtype)
    assert ((result.double() - exact).abs() <= precision.bound(exact, sizes, steps)).all()
    dz = precision.normal(*exact.shape, seed=4)
    exact.backward(dz.double())
    sizes.backward(dz.double().abs())
    off = convolve_back(dz, backward, window, size).double() - exact_x.grad
    assert (off.abs() <= precision.bound(exact_x.grad, sizes_x.grad, steps)).all()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
def test_more_images_than_a_panel_has_without_avx(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*products.KERNELS.flags, "-march=x86-64")
    monkeypatch.setattr(products, "KERNELS", replace(products.KERNELS, flags=flags))
    weight = uneven(7, 5, 3, 3)
    forward, backward = packed(weight, PRECISIONS["float32"])
    window, x, dz = Window((3, 3)), torch.randn(70, 5, 6, 4), torch.randn(70, 7, 4, 2)
    expected = F.conv2d(x.double(), weight.double())
    torch.testing.assert_close(convolve(x, forward, None, window), expected.float())
    expected = torch.nn.grad.conv2d_input(list(x.shape), weight.double(), dz.double())
    torch.testing.assert_close(convolve_back(dz, backward, window, (6, 4)), expected.float())


@pytest.mark.parametrize(("size", "channels"), [((6, 5), 12), ((4, 4), 200), ((1, 2), 700)])
def test_the_bits_do_not_depend_on_threads_or_on_other_images(
    size: tuple[int, int], channels: int, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though in other company other taps are outside of the image for all pixels of a panel."""
    monkeypatch.setattr(compiler, "CHUNK", 1)
    forward, _ = packed(uneven(20, channels, 3, 3), precision)
    window, x = Window((3, 3), padding=(1, 1)), precision.normal(100, channels, *size)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(convolve(x, forward, None, window))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for images in (1, 7, 16):
        assert torch.equal(convolve(x[:images], forward, None, window), results[0][:images])


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize(("kept", "most"), [(kernels.KEPT, 100), (0, 25)])
def test_one_image_keeps_little_memory(
    kept: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The panels of 64 such images have 205 MB; those of this one alone 51 MB at most."""
    monkeypatch.setattr(kernels, "KEPT", kept)
    forward, _ = packed(uneven(1, 64, 1, 1), PRECISIONS["float32"])
    x, growth = normal(1, 64, 112, 112), []

    def serve() -> None:  # what stays is the thread's
        before = resident()
        convolve(x, forward, None, Window((1, 1)))
        growth.append(resident() - before)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert growth[0] < most << 20


@pytest.mark.usefixtures("every_bf16")
def test_subnormal_numbers_are_zero_in_bfloat16() -> None:
    tiny, window = torch.full((1, 4, 3, 3), 2.0**-130), Window((1, 1))
    forward, _ = packed(torch.ones(16, 4, 1, 1), PRECISIONS["bf16"])
    assert not convolve(tiny.bfloat16(), forward, None, window).any()
    assert convolve(torch.ones(1, 4, 3, 3).bfloat16(), forward, None, window).eq(4).all()


# --- layers in training ---------------------------------------------------------------------------


def test_all_gradients_are_those_of_float64(precision: Precision) -> None:
    """Also with another weight for the input gradient."""
    weight, other = (precision.sparse(6, 8, 3, 2, seed=s) for s in (0, 1))
    layer = precision.products((6, 8), Window((3, 2), (2, 1), (1, 1)))
    x, bias = precision.normal(3, 8, 5, 4).float(), precision.normal(6).float()
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    z = F.conv2d(*exact, (2, 1), (1, 1))
    dz = precision.normal(*z.shape, seed=3)
    expected = [*torch.autograd.grad(z, exact, dz.double())]
    for back in (None, other):
        layer.write(weight, back)
        own = [t.clone().requires_grad_() for t in (x, weight, bias)]
        result = layer(*own)
        assert result.dtype == precision.dtype
        gradients = torch.autograd.grad(result, own, dz)
        assert {t.dtype for t in gradients} == {torch.float32}
        if back is not None:
            moves = (2, 1), (1, 1)
            expected[0] = torch.nn.grad.conv2d_input(x.shape, back.double(), dz.double(), *moves)
        for a, b in zip(gradients, expected, strict=True):
            assert torch.allclose(a.double(), b, rtol=precision.close, atol=precision.close)


@pytest.mark.parametrize("other", DEFAULTS, ids=str)
def test_they_do_not_depend_on_what_torch_takes_by_default(
    precision: Precision, other: torch.dtype | torch.device
) -> None:
    with by_default(other):
        test_all_gradients_are_those_of_float64(precision)


@pytest.mark.slow
def test_operators_are_as_torch_wants_them(precision: Precision) -> None:
    weight = precision.sparse(6, 8, 3, 3)
    layer = precision.products((6, 8), Window((3, 3), padding=(1, 1)))
    layer.write(weight, None)
    parts = [layer.parts(kind) for kind in PRODUCTS]
    for values, index, *_, start in parts:  # what lies behind the slots is nobody's
        values[int(start[-1]) :], index[int(start[-1]) :] = 0, 0
    x, dz = precision.normal(3, 8, 5, 4).requires_grad_(), precision.normal(3, 6, 5, 4)
    operands = (x, weight.clone().requires_grad_(), None, *parts, layer.window.numbers)
    torch.library.opcheck(convolution.convolution, operands)
    back = (dz, weight, parts[1], [5, 4], layer.window.numbers)
    torch.library.opcheck(convolution.convolution_back, back)


def test_a_weight_that_is_not_a_number_stays_beside_the_n_largest() -> None:
    weight = hard_threshold(torch.randn(8, 8, 3, 3), "2:4", 1)
    weight[:, :, 1, 1] = torch.nan
    layer = ConvolutionProducts((8, 8), Window((3, 3)))
    layer.write(weight, None)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(layer(x, weight, None).isnan(), F.conv2d(x, weight).isnan())


@pytest.mark.parametrize("shape", [(2, 8, 5, 5), (8, 5, 5)], ids=str)
def test_what_comes_out_may_be_written_in_place(shape: tuple[int, ...]) -> None:
    """As by ``nn.ReLU(inplace=True)``: in training and in inference with gradients."""
    weight = hard_threshold(torch.randn(6, 8, 3, 3), "2:4", 1).requires_grad_()
    layer = ConvolutionProducts((6, 8), Window((3, 3)))
    layer.write(weight, None)
    deployed = PackedConvolution.of(weight.detach(), Window((3, 3)))
    x = torch.randn(shape, requires_grad=True)
    in_training = [partial(layer, weight=weight, bias=None)] if x.dim() == 4 else []
    for convolve_ in (deployed, *in_training):
        (expected,) = torch.autograd.grad(convolve_(x).relu().square().sum(), x)
        (gradient,) = torch.autograd.grad(convolve_(x).relu_().square().sum(), x)
        assert torch.equal(gradient, expected)


def test_a_weight_of_another_dtype_is_packed_as_float32() -> None:
    weight = hard_threshold(torch.randn(6, 8, 3, 3), "2:4", 1).bfloat16()
    x = torch.randn(2, 8, 5, 5)
    layer = ConvolutionProducts((6, 8), Window((3, 3)))
    layer.write(weight, None)
    assert torch.allclose(layer(x, weight, None), F.conv2d(x, weight.float()), atol=1e-4)


# --- a network in training --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "pattern", "options"),
    [
        ("sr_ste", "2:4", {}),
        ("step", "1:8", {"switch": 0.3}),
        ("s_ste", "2:4", {}),
        ("ste", "1:4", {"input_gradient": "double_prune"}),
        ("asp", "3:7", {"pad": True}),
    ],
)
def test_trains_as_with_masks_alone(
    recipe: str, pattern: str, options: dict[str, Any], precision: Precision
) -> None:
    low = precision.dtype == torch.bfloat16
    _, _, expected = train("off", recipe, pattern, low=low, **options)
    handle, choices, losses = train("packed", recipe, pattern, low=low, **options)
    assert [c.path for c in choices if not c.always_dense] == [precision.path] * 3
    assert losses == pytest.approx(expected, rel=3e-2 if low else 1e-3)
    assert losses[-1] != losses[0]
    assert all(type(w.layer.packed) is precision.products for w in handle.sparse)
    assert all(int(w.layer.packed.forward_start[-1]) for w in handle.sparse)


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
    layer, _ = accelerated()
    with pytest.raises(RuntimeError, match=r"channels|smaller than the kernel"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
def test_outputs_are_stored_as_by_torch(images_last: bool, weight_last: bool) -> None:
    """A network may take a view of them."""
    layer, x = accelerated()
    if weight_last:
        layer.to(memory_format=torch.channels_last)
    if images_last:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = F.conv2d(x, layer.weight, layer.bias)
    result = layer(x)
    assert result.stride() == expected.stride()
    assert torch.allclose(result, expected, atol=1e-5)


def test_gradients_of_gradients_are_refused() -> None:
    layer, x = accelerated()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("options", "dims", "reason"),
    [
        ({"groups": 2}, {}, "grouped"),
        ({"padding_mode": "reflect"}, {}, "padding"),
        ({}, {r"0\.weight": 0}, "groups do not run along its inputs"),
    ],
)
def test_what_is_not_packed_says_why(
    options: dict[str, Any], dims: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(**options)
    optimizer = optim.AdamW(model.parameters())
    handle = sparsify(model, optimizer, "ste", "2:4", exclude=["7"], dims=dims)
    choices = accelerate(handle, lambda: model(batch(0)[0]), "packed")
    assert reason in choices[0].reason
    assert [c.path for c in choices if not c.always_dense] == [None, "packed", "packed"]
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    sample = under_autocast(model, batch(0)[0])
    choices = [c for c in accelerate(handle, sample) if not c.always_dense]
    assert {c.path for c in choices} == {None}
    assert "this processor has no AVX-512 with BF16" in choices[1].reason
