"""Convolutions with packed weights, against float64."""

from __future__ import annotations

import math
import platform
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from convolutions import GEOMETRIES
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.convolution import Window, convolve, convolve_back
from nmrun.fast.cpu.kernels.products import PackedMatrix, pack
from nmrun.kernels import compiler

pytestmark = pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here")

CASES = [  # and those of more images than a panel has
    *GEOMETRIES,
    (65, 130, 140, (5, 5), (3, 3), (1, 1), (2, 2), (2, 2)),
    (130, 3, 6, (7, 11), (5, 2), (3, 1), (2, 0), (1, 2)),
    (64, 128, 16, (2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
]


def packed(weight: Tensor) -> tuple[PackedMatrix, PackedMatrix]:
    rows, columns, height, width = weight.shape
    matrix = weight.permute(0, 2, 3, 1).contiguous().flatten(1)
    taps = height * width
    forward = PackedMatrix.empty(rows, columns, taps)
    backward = PackedMatrix.empty(columns, rows, taps)
    pack(matrix, forward, backward)
    assert torch.equal(forward.dense(), matrix)
    turned = weight.permute(1, 2, 3, 0).flatten(1)
    assert torch.equal(backward.dense(), turned)
    return forward, backward


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_against_float64(case: tuple, channels_last: bool) -> None:
    images, channels, out, size, taps, *moves = case
    weight = torch.randn(out, channels, *taps) * (torch.rand(out, channels, *taps) < 0.4)
    x, bias = torch.randn(images, channels, *size), torch.randn(out)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    forward, backward = packed(weight)
    window = Window(taps, *moves)
    exact_x = x.double().requires_grad_()
    exact = F.conv2d(exact_x, weight.double(), bias.double(), *moves)
    result = convolve(x, forward, bias, window)
    assert result.shape == exact.shape
    # of sums that cancel, the error is that of their sizes (Higham and Mary 2019: sqrt(n) u)
    sizes_x = x.double().abs().requires_grad_()
    sizes = F.conv2d(sizes_x, weight.double().abs(), bias.double().abs(), *moves)
    rounding = 2.0**-24 * math.sqrt(max(channels, out) * taps[0] * taps[1] + 1)
    assert ((result - exact).abs() <= rounding * sizes).all()
    dz = torch.randn(exact.shape)
    exact.backward(dz.double())
    sizes.backward(dz.double().abs())
    result = convolve_back(dz, backward, window, size)
    assert ((result - exact_x.grad).abs() <= rounding * sizes_x.grad).all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
def test_more_images_than_a_panel_has_without_avx(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*products.KERNELS.flags, "-march=x86-64")
    monkeypatch.setattr(products, "KERNELS", replace(products.KERNELS, flags=flags))
    weight = torch.randn(7, 5, 3, 3) * (torch.rand(7, 5, 3, 3) < 0.4)
    forward, backward = packed(weight)
    window, x, dz = Window((3, 3)), torch.randn(70, 5, 6, 4), torch.randn(70, 7, 4, 2)
    expected = F.conv2d(x.double(), weight.double())
    torch.testing.assert_close(convolve(x, forward, None, window), expected.float())
    expected = torch.nn.grad.conv2d_input(list(x.shape), weight.double(), dz.double())
    torch.testing.assert_close(convolve_back(dz, backward, window, (6, 4)), expected.float())


def test_the_bits_do_not_depend_on_threads_or_on_other_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "CHUNK", 1)
    weight = torch.randn(20, 12, 3, 3) * (torch.rand(20, 12, 3, 3) < 0.4)
    forward, _ = packed(weight)
    window, x = Window((3, 3), padding=(1, 1)), torch.randn(100, 12, 6, 5)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(convolve(x, forward, None, window))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(convolve(x[:7], forward, None, window), results[0][:7])
