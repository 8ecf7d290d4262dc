"""Convolutions of bfloat16 with packed weights, against float64, and in training against masks alone;
a test emulates the instruction where the processor has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import GEOMETRIES, batch, net, train
from operands import normal_bf16, under_autocast
from torch import Tensor

from nmrun import accelerate, optim, sparsify
from nmrun.fast.cpu import convolution
from nmrun.fast.cpu.convolution import Bf16ConvolutionProducts, by_taps
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.convolution import Window, convolve, convolve_back
from nmrun.fast.measurement import BF16
from nmrun.kernels import compiler
from nmrun.sparsity.masks import hard_threshold

pytestmark = pytest.mark.usefixtures("every_bf16", "small_layers")

CASES = [  # and those of more than one block, or of more images than a panel has
    *GEOMETRIES,
    (17, 130, 70, (4, 4), (3, 3), (1, 1), (2, 2), (2, 2)),
    (30, 3, 6, (7, 11), (5, 2), (3, 1), (2, 0), (1, 2)),
    (16, 128, 16, (2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 600, 20, (5, 5), (3, 3), (2, 2), (0, 2), (1, 1)),
    (2, 40, 1100, (3, 3), (3, 2), (1, 1), (2, 2), (1, 1)),
    (3, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 8, 8, (3, 3), (1, 1), (1, 4), (0, 0), (1, 1)),
]


def uneven(*shape: int) -> Tensor:
    """A weight, rounded, of which any number of entries is zero."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.4
    return normal_bf16(*shape).float() * mask


def packed(weight: Tensor) -> tuple[Bf16Matrix, Bf16Matrix]:
    out, channels, *taps = weight.shape
    backward = Bf16Matrix.empty(channels, out, taps[0] * taps[1])
    forward = Bf16Matrix.packed(by_taps(weight), backward.taps)
    assert backward.pack(by_taps(weight), turned=True) == int((weight != 0).sum())
    return forward, backward


def near(result: Tensor, expected: Tensor, sizes: Tensor, steps: int) -> bool:
    """Within the rounding of float32 in each step of the sum, and of bfloat16 at its end."""
    bound = 2**-8 * expected.abs() + 1.01 * (steps + 4) * 2**-24 * sizes
    return bool(((result.double() - expected).abs() <= bound).all())


# --- the products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_against_float64(case: tuple, channels_last: bool) -> None:
    images, channels, out, size, taps, *moves = case
    weight, bias = uneven(out, channels, *taps), normal_bf16(out, seed=2).float()
    x = normal_bf16(images, channels, *size, seed=3)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    forward, backward = packed(weight)
    assert torch.equal(forward.dense().float(), by_taps(weight))
    assert torch.equal(backward.dense().float(), by_taps(weight.transpose(0, 1)))
    window, steps = Window(taps, *moves), max(channels, out) * taps[0] * taps[1]
    exact_x, sizes_x = (t.requires_grad_() for t in (x.double(), x.double().abs()))
    exact = F.conv2d(exact_x, weight.double(), bias.double(), *moves)
    sizes = F.conv2d(sizes_x, weight.double().abs(), bias.double().abs(), *moves)
    result = convolve(x, forward, bias, window)
    assert result.shape == exact.shape
    assert result.dtype == torch.bfloat16
    assert near(result, exact, sizes, steps)
    dz = normal_bf16(*exact.shape, seed=4)
    exact.backward(dz.double())
    sizes.backward(dz.double().abs())
    result = convolve_back(dz, backward, window, size)
    assert near(result, exact_x.grad, sizes_x.grad, steps)


@pytest.mark.parametrize(("size", "channels"), [((6, 5), 12), ((4, 4), 200), ((1, 2), 700)])
def test_the_bits_do_not_depend_on_threads_or_on_other_images(
    size: tuple[int, int], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though in other company other taps are outside of the image for all pixels of a panel."""
    monkeypatch.setattr(compiler, "CHUNK", 1)
    forward, _ = packed(uneven(20, channels, 3, 3))
    window, x = Window((3, 3), padding=(1, 1)), normal_bf16(50, channels, *size)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(convolve(x, forward, None, window))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for images in (1, 7, 16):
        assert torch.equal(convolve(x[:images], forward, None, window), results[0][:images])


def test_subnormal_numbers_are_zero() -> None:
    tiny, one = torch.full((1, 4, 3, 3), 2.0**-130), torch.ones(16, 4, 1, 1)
    window = Window((1, 1))
    forward, _ = packed(one)
    assert not convolve(tiny.bfloat16(), forward, None, window).any()
    assert convolve(torch.ones(1, 4, 3, 3).bfloat16(), forward, None, window).eq(4).all()


def test_all_gradients_are_those_of_float64() -> None:
    weight = hard_threshold(normal_bf16(6, 8, 3, 2).float(), "2:4", 1)
    layer = Bf16ConvolutionProducts((6, 8), Window((3, 2), (2, 1), (1, 1)))
    layer.write(weight, None)
    x, bias = normal_bf16(3, 8, 5, 4, seed=1).float(), normal_bf16(6, seed=2).float()
    own = [t.clone().requires_grad_() for t in (x, weight, bias)]
    z = layer(*own)
    assert z.dtype == torch.bfloat16
    dz = normal_bf16(*z.shape, seed=3)
    gradients = torch.autograd.grad(z, own, dz)
    assert {t.dtype for t in gradients} == {torch.float32}
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(F.conv2d(*exact, (2, 1), (1, 1)), exact, dz.double())
    for a, b in zip(gradients, expected, strict=True):
        assert torch.allclose(a.double(), b, rtol=2**-7, atol=2**-7)


def test_another_weight_for_the_input_gradient() -> None:
    weight, other = (
        hard_threshold(normal_bf16(8, 8, 3, 3, seed=s).float(), "2:4", 1) for s in (0, 1)
    )
    layer = Bf16ConvolutionProducts((8, 8), Window((3, 3)))
    layer.write(weight, other)
    x, dz = normal_bf16(2, 8, 5, 5).requires_grad_(), normal_bf16(2, 8, 3, 3)
    layer(x, weight, None).backward(dz)
    expected = torch.nn.grad.conv2d_input(x.shape, other.double(), dz.double())
    assert torch.allclose(x.grad.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.slow
def test_operators_are_as_torch_wants_them() -> None:
    weight = hard_threshold(normal_bf16(6, 8, 3, 3).float(), "2:4", 1)
    layer = Bf16ConvolutionProducts((6, 8), Window((3, 3), padding=(1, 1)))
    layer.write(weight, None)
    parts = [layer.parts(kind) for kind in ("forward", "backward")]
    for values, index, _, start in parts:  # what lies behind the slots is nobody's
        values[int(start[-1]) :], index[int(start[-1]) :] = 0, 0
    window = layer.window.numbers
    x, dz = normal_bf16(3, 8, 5, 4).requires_grad_(), normal_bf16(3, 6, 5, 4)
    operands = (x, weight.clone().requires_grad_(), None, *parts, window)
    torch.library.opcheck(convolution.convolution, operands)
    torch.library.opcheck(convolution.convolution_back, (dz, weight, parts[1], [5, 4], window))


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "pattern", "options"),
    [
        ("sr_ste", "2:4", {}),
        ("step", "1:8", {"switch": 0.3}),
        ("ste", "1:4", {"input_gradient": "double_prune"}),
        ("asp", "3:7", {"pad": True}),
    ],
)
def test_trains_as_with_masks_alone(recipe: str, pattern: str, options: dict[str, Any]) -> None:
    _, _, expected = train("off", recipe, pattern, low=True, **options)
    handle, choices, losses = train("packed", recipe, pattern, low=True, **options)
    assert [c.path for c in choices if not c.always_dense] == [BF16] * 3
    assert all(isinstance(w.layer.packed, Bf16ConvolutionProducts) for w in handle.sparse)
    assert losses == pytest.approx(expected, rel=3e-2)
    assert losses[-1] != losses[0]


def test_grouped_ones_are_not_packed() -> None:
    model = net(groups=2)
    handle = sparsify(model, optim.AdamW(model.parameters()), "ste", "2:4", exclude=["7"])
    sample = under_autocast(model, batch(0)[0])
    choices = [c for c in accelerate(handle, sample, "packed") if not c.always_dense]
    assert "grouped" in choices[0].reason
    assert [c.path for c in choices] == [None, BF16, BF16]


def test_where_the_processor_has_none_they_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    model = net()
    handle = sparsify(model, optim.AdamW(model.parameters()), "ste", "2:4", exclude=["7"])
    sample = under_autocast(model, batch(0)[0])
    choices = [c for c in accelerate(handle, sample) if not c.always_dense]
    assert {c.path for c in choices} == {None}
    assert all("this processor has no AVX-512 with BF16" in c.reason for c in choices)
