"""Convolutions in nmrun.deploy, in float32 and in bfloat16, whose products the processor has or a test
emulates: what the dense ones compute, in every geometry, or left alone with a reason. Times are made up.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import prune
from deployed import share
from operands import normal_bf16
from test_deploy import by_name
from torch import Tensor, nn

import nmrun
from nmrun.fast.cpu.kernels import bf16, products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.packed_convolution import Bf16Convolution, BlockConvolution, PackedConvolution
from nmrun.kernels import compiler

needs_compiler = pytest.mark.skipif(
    bool(products.KERNELS.obstacle()), reason="no C compiler works here"
)
FLOAT32, BF16 = torch.float32, torch.bfloat16
KINDS = {FLOAT32: ("packed", PackedConvolution), BF16: ("packed bf16", Bf16Convolution)}


@pytest.fixture(autouse=True)
def faster(deploy_times: dict[str, float]) -> None:
    deploy_times.update({"dense, channels last": 2.0, "packed": 0.5, "packed bf16": 0.5})


def net(pattern: str = "1:4") -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Conv2d(8, 20, 3, padding=1), nn.Conv2d(20, 6, 1, bias=False)
    return prune(nn.Sequential(first, nn.BatchNorm2d(20), nn.ReLU(), last), pattern)


GEOMETRIES: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int]]] = {
    "tails": ({"kernel_size": 3, "padding": 1}, (5, 131, 33), (7, 5)),
    "stride": ({"kernel_size": 3, "padding": 1, "stride": 2}, (17, 20, 24), (9, 6)),
    "stride of two kinds": ({"kernel_size": (5, 2), "stride": (3, 1)}, (3, 12, 7), (11, 8)),
    "dilation": ({"kernel_size": 3, "padding": 2, "dilation": 2}, (66, 16, 8), (6, 6)),
    "one pixel": ({"kernel_size": 1, "bias": False}, (1, 40, 17), (1, 1)),
    "same": ({"kernel_size": (3, 5), "padding": "same"}, (4, 8, 8), (5, 6)),
    "valid": ({"kernel_size": 2, "padding": "valid"}, (4, 8, 8), (5, 6)),
}


@needs_compiler
@pytest.mark.usefixtures("emulated_bf16")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_against_float64(name: str, channels_last: bool, dtype: torch.dtype) -> None:
    options, (images, channels, out), size = GEOMETRIES[name]
    path, kind = KINDS[dtype]
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Conv2d(channels, out, **options)), "2:4").to(dtype)
    x = torch.randn(images, channels, *size).to(dtype)
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    exact = copy.deepcopy(model).double()
    weight, expected = exact[0].weight.detach(), exact(x.double()).detach()
    (choice,) = nmrun.deploy(model, x)
    assert choice.path == path
    assert choice.reason == (
        f"2:4, {images} images of {size[0]}x{size[1]}: dense 1 ms, dense, channels last 2 ms, "
        f"{path} 0.5 ms (2.00x)"
    )
    assert type(model[0]) is kind
    assert torch.equal(model[0].dense().double(), weight)
    bound = 1e-5 if dtype == FLOAT32 else 0.05
    with torch.no_grad():
        whole = model(x)
        assert whole.dtype == dtype
        torch.testing.assert_close(whole.double(), expected, rtol=bound, atol=bound)
        assert torch.equal(model(x[0]), whole[0])
        assert torch.equal(model(x[1:3]), whole[1:3])
    assert not list(model.parameters())


@needs_compiler
@pytest.mark.parametrize(("pattern", "part"), [("2:4", 1 / 2), ("1:8", 1 / 8)])
def test_the_memory_is_that_of_the_non_zeros_and_their_places(pattern: str, part: float) -> None:
    model = prune(nn.Sequential(nn.Conv2d(256, 64, 3, bias=False)), pattern)
    dense = model[0].weight.nbytes
    nmrun.deploy(model, torch.randn(2, 256, 4, 4))
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert nbytes == dense * 1.25 * part + 4 * (9 * 2 * 64 + 1)


@needs_compiler
def test_what_is_wrong_is_said_in_one_line() -> None:
    model = net()
    nmrun.deploy(model, torch.randn(5, 8, 6, 7))
    state = model.state_dict()
    for change, message in (
        ({"0.index": torch.full_like(state["0.index"], 8)}, "0: a column that is not of its block"),
        ({"0.index": state["0.index"].int()}, "0: index of torch.int32, not uint8"),
        ({"0.values": state["0.values"][1:]}, "0: 359 values where start says 360"),
        ({"0.start": state["0.start"].flip(0)}, "0: start is not that of 20 x 72"),
        ({"0.start": state["0.start"][1:]}, "0: start is not that of 20 x 72"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state | change)
    small = PackedConvolution.of(torch.ones(2, 4, 5, 5), Window((5, 5)))
    for layer, x, message in (
        (model[0], torch.randn(2, 9, 6, 7), r"x is \[2, 9, 6, 7\] where the layer has 8 channels"),
        (
            model[0],
            torch.randn(2, 8, 6, 7).double(),
            "x of torch.float64: this layer takes float32",
        ),
        (small, torch.randn(1, 4, 4, 9), r"smaller than the kernel of \(5, 5\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer(x)


@needs_compiler
@pytest.mark.parametrize(
    ("packed", "last", "path", "ratio"),
    [(0.8, 2.0, "packed", "1.25"), (0.8, 0.5, None, "0.62"), (1.5, 2.0, None, "0.67")],
)
def test_the_better_of_torchs_layouts_has_to_be_beaten(
    packed: float, last: float, path: str | None, ratio: str, deploy_times: dict[str, float]
) -> None:
    deploy_times.update({"dense, channels last": last, "packed": packed})
    model = net()
    layers, choices = list(model), nmrun.deploy(model, torch.randn(5, 8, 6, 7))
    assert [c.path for c in choices] == [path] * 2
    assert f"({ratio}x)" in choices[0].reason
    assert (list(model) == layers) is (path is None)


def test_what_is_left_dense_has_a_reason(request: pytest.FixtureRequest) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Conv2d(8, 8, 1, groups=2)
            self.reflected = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
            self.uneven = nn.Conv2d(8, 8, 2, padding="same")
            self.dense = nn.Conv2d(8, 8, 1)
            self.low = nn.Conv2d(8, 8, 1).half()

        def forward(self, x: Tensor) -> Tensor:
            x = self.dense(self.uneven(self.reflected(self.grouped(x))))
            return self.low(x.half())

    model, x = prune(Mixed(), "2:4"), torch.randn(2, 8, 4, 4)
    model.dense.weight.data.fill_(1.0)
    reasons = {n: c.reason for n, c in by_name(nmrun.deploy(model, x)).items()}
    assert reasons == {
        "grouped.weight": "grouped convolutions are not packed",
        "reflected.weight": "padding reflect, (1, 1) is not packed",
        "uneven.weight": "padding zeros, same is not packed",
        "dense.weight": "its weight is not N:M",
        "low.weight": "float16: packed weights on the CPU are float32 or bfloat16",
    }
    request.getfixturevalue("no_compiler")
    choices = nmrun.deploy(net("2:4"), torch.randn(2, 8, 4, 4))
    assert {c.reason for c in choices} == {compiler.NO_COMPILER}


@needs_compiler
def test_under_autocast_it_stays_float32() -> None:
    model, x = net("2:4"), torch.randn(7, 8, 6, 7)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    nmrun.deploy(model, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        z = model[0](x)
        low = model[0](x.bfloat16())  # as a dense layer leaves it
    assert z.dtype == low.dtype == torch.float32
    torch.testing.assert_close(z, F.conv2d(x, weight, bias, padding=1))
    torch.testing.assert_close(low, F.conv2d(x.bfloat16().float(), weight, bias, padding=1))


# --- in bfloat16 ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("emulated_bf16")
def test_one_of_a_single_position_is_the_linear_layer_of_its_pixels(
    deploy_times: dict[str, float],
) -> None:
    deploy_times["packed blocks bf16"] = 0.2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 1, stride=(1, 2)), nn.Conv2d(64, 32, 1, bias=False))
    prune(model, "32:4:16").bfloat16()
    exact, x = copy.deepcopy(model).double(), normal_bf16(5, 32, 6, 7)
    assert [c.path for c in nmrun.deploy(model, x)] == ["packed blocks bf16"] * 2
    assert [type(layer) for layer in model] == [BlockConvolution] * 2
    assert torch.equal(model[0].dense().double(), exact[0].weight)
    with torch.no_grad():
        z = model(x)
        assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), z)
        assert torch.equal(model(x[1]), z[1])
        assert model[0](x.float()).dtype == torch.float32
        assert share(z, exact(x.double())) < 0.01
    assert z.dtype == torch.bfloat16
    assert z.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("emulated_bf16")
def test_blocks_are_for_a_single_position_without_padding(deploy_times: dict[str, float]) -> None:
    deploy_times["packed blocks bf16"] = 0.2
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 1, padding=1))
    prune(model, "32:4:16").bfloat16()
    choices = nmrun.deploy(model, normal_bf16(5, 32, 6, 7))
    assert [c.path for c in choices] == ["packed bf16"] * 2


@pytest.mark.usefixtures("emulated_bf16")
@pytest.mark.parametrize(("ms", "last"), [(0.5, True), (2.0, False)])
def test_dense_ones_are_channels_last_where_others_are_packed(
    ms: float, last: bool, deploy_times: dict[str, float]
) -> None:
    deploy_times["packed bf16"] = ms
    model, x = nn.Sequential(nn.Conv2d(8, 20, 3), net("2:4")[3]), normal_bf16(5, 8, 9, 9)
    model.bfloat16()
    expected = model(x).detach()
    first, second = nmrun.deploy(model, x)
    assert (first.path, second.path) == (None, "packed bf16" if last else None)
    with torch.no_grad():
        assert model[0](x).is_contiguous(memory_format=torch.channels_last) == last
        assert share(model(x), expected) < 0.01


@needs_compiler
def test_where_the_processor_has_none_they_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    choices = nmrun.deploy(net("2:4").bfloat16(), normal_bf16(5, 8, 6, 7))
    assert {(c.path, c.reason) for c in choices} == {
        (None, "bfloat16: this processor has no AVX-512 with BF16")
    }
