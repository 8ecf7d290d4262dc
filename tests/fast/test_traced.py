"""Layers of a deployed model under tracers, and with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operands import normal, sparse
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nmrun.fast import fused
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import bf16, int8, products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.onednn import DenseInt8Linear
from nmrun.fast.cpu.packed_convolution import Bf16Convolution, PackedConvolution
from nmrun.fast.cpu.packed_linear import Bf16Linear, Int8Linear, PackedLinear
from nmrun.fast.fused import FusedAttention, FusedGELU


def weight() -> Tensor:
    return sparse(24, 32, "2:4")


def kernel() -> Tensor:
    return sparse(24, 36, "2:4").view(24, 2, 2, 9).permute(0, 3, 1, 2)


WINDOW = Window((2, 2))
LAYERS: dict[str, tuple[str, Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "packed": (products.KERNELS.obstacle(), lambda: PackedLinear.of(weight()), [(5, 32)]),
    "bf16": (bf16.KERNELS.obstacle(), lambda: Bf16Linear.of(weight()), [(5, 32)]),
    "int8": (int8.KERNELS.obstacle(), lambda: Int8Linear.of(weight()), [(5, 32)]),
    "dense int8": (
        "" if onednn.available_int8() else "no oneDNN",
        lambda: DenseInt8Linear.of(weight()),
        [(5, 32)],
    ),
    "convolution": (
        products.KERNELS.obstacle(),
        lambda: PackedConvolution.of(kernel(), WINDOW),
        [(3, 9, 4, 4)],
    ),
    "bf16 convolution": (
        bf16.KERNELS.obstacle(),
        lambda: Bf16Convolution.of(kernel(), WINDOW),
        [(3, 9, 4, 4)],
    ),
    "gelu": (fused.KERNELS.obstacle(), FusedGELU, [(5, 32)]),
    "attention": (fused.KERNELS.obstacle(), FusedAttention, [(2, 3, 5, 8)] * 3),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> tuple[nn.Module, list[tuple[int, ...]]]:
    why, make, shapes = LAYERS[request.param]
    if why:
        pytest.skip(why)
    return make().eval(), shapes


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["make_fx", "jit"])
def test_a_trace_computes_other_inputs(
    layer: tuple[nn.Module, list[tuple[int, ...]]], how: str
) -> None:
    module, shapes = layer
    first, other = ([normal(*s, seed=10 * n + i) for i, s in enumerate(shapes)] for n in (1, 2))
    if how == "make_fx":
        traced = make_fx(lambda *x: module(*x))(*first)
    else:
        traced = torch.jit.trace(module, tuple(first), check_trace=False)
    torch.testing.assert_close(traced(*other), module(*other))


@torch.no_grad()
def test_tensors_without_memory(layer: tuple[nn.Module, list[tuple[int, ...]]]) -> None:
    module, shapes = layer
    inputs = [normal(*shape) for shape in shapes]
    expected = module(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = module(*map(mode.from_tensor, inputs))
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
