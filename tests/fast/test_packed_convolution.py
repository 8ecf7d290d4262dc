"""Convolutions in nmrun.deploy: what the dense ones compute, in every geometry, or left alone with
a reason. Times are made up where the outcome depends on them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import prune
from test_deploy import by_name
from torch import Tensor, nn

import nmrun
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.cpu.packed_convolution import PackedConvolution
from nmrun.kernels import compiler

needs_compiler = pytest.mark.skipif(
    bool(products.KERNELS.obstacle()), reason="no C compiler works here"
)


@pytest.fixture
def faster(deploy_times: dict[str, float]) -> None:
    deploy_times.update({"dense, channels last": 2.0, "packed": 0.5})


def net(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(8, 20, 3, padding=1, **options)
    return nn.Sequential(first, nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 6, 1, bias=False))


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
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_against_float64(name: str, channels_last: bool) -> None:
    options, (images, channels, out), size = GEOMETRIES[name]
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Conv2d(channels, out, **options)), "2:4")
    x = torch.randn(images, channels, *size)
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    exact = copy.deepcopy(model).double()
    weight, expected = exact[0].weight.detach(), exact(x.double()).detach()
    (choice,) = nmrun.deploy(model, x)
    assert choice.path == "packed"
    assert choice.reason == (
        f"2:4, {images} images of {size[0]}x{size[1]}: dense 1 ms, dense, channels last 2 ms, "
        "packed 0.5 ms (2.00x)"
    )
    assert isinstance(model[0], PackedConvolution)
    assert torch.equal(model[0].dense().double(), weight)
    with torch.no_grad():
        torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x[0]).double(), expected[0], rtol=1e-5, atol=1e-5)
    assert not list(model.parameters())


@needs_compiler
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(("pattern", "share"), [("2:4", 1 / 2), ("1:8", 1 / 8)])
def test_the_memory_is_that_of_the_non_zeros_and_their_places(pattern: str, share: float) -> None:
    model = prune(nn.Sequential(nn.Conv2d(256, 64, 3, bias=False)), pattern)
    dense = model[0].weight.nbytes
    nmrun.deploy(model, torch.randn(2, 256, 4, 4))
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert nbytes == dense * 1.25 * share + 4 * (9 * 2 * 64 + 1)


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_what_is_wrong_is_said_in_one_line() -> None:
    model = prune(net(), "1:4")
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
    for x, message in (
        (torch.randn(2, 9, 6, 7), r"x is \[2, 9, 6, 7\] where the layer has 8 channels"),
        (torch.randn(2, 8, 6, 7).double(), "x of torch.float64: this layer takes float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model[0](x)
    small = PackedConvolution.of(torch.ones(2, 4, 5, 5), Window((5, 5)))
    with pytest.raises(RuntimeError, match=r"smaller than the kernel of \(5, 5\)"):
        small(torch.randn(1, 4, 4, 9))


@needs_compiler
@pytest.mark.parametrize(
    ("packed", "last", "path", "ratio"),
    [(0.8, 2.0, "packed", "1.25"), (0.8, 0.5, None, "0.62"), (1.5, 2.0, None, "0.67")],
)
def test_the_better_of_torchs_layouts_has_to_be_beaten(
    packed: float, last: float, path: str | None, ratio: str, deploy_times: dict[str, float]
) -> None:
    deploy_times.update({"dense, channels last": last, "packed": packed})
    model = prune(net(), "1:4")
    layers, choices = list(model), nmrun.deploy(model, torch.randn(5, 8, 6, 7))
    assert [c.path for c in choices] == [path] * 2
    assert f"({ratio}x)" in choices[0].reason
    assert (list(model) == layers) is (path is None)


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_a_layer_that_is_wrong_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prune(net(), "1:4")
    right = PackedConvolution.forward
    monkeypatch.setattr(PackedConvolution, "forward", lambda self, x: 1.05 * right(self, x))
    choices = nmrun.deploy(model, torch.randn(5, 8, 6, 7))
    assert {(c.path, c.reason) for c in choices} == {(None, "packed: WRONG results")}


@pytest.mark.usefixtures("faster")
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
    choices = nmrun.deploy(prune(net(), "2:4"), x)
    assert {c.reason for c in choices} == {compiler.NO_COMPILER}


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_an_image_has_the_same_bits_in_any_batch_and_under_autocast_it_stays_float32() -> None:
    model, x = prune(net(), "2:4"), torch.randn(70, 8, 6, 7)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    nmrun.deploy(model, x)
    with torch.no_grad():
        whole = model[0](x)
        assert torch.equal(model[0](x[3:5]), whole[3:5])
        with torch.autocast("cpu", torch.bfloat16):
            z = model[0](x)
            low = model[0](x.bfloat16())  # as a dense layer leaves it
    assert z.dtype == low.dtype == torch.float32
    torch.testing.assert_close(z, F.conv2d(x, weight, bias, padding=1))
    torch.testing.assert_close(low, F.conv2d(x.bfloat16().float(), weight, bias, padding=1))
