"""Convolutions in nmrun.deploy of models in bfloat16, whose products the processor has or a test
emulates.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from convolutions import prune
from deployed import gradient, share, stays_itself
from operands import normal_bf16
from torch import nn

import nmrun
from nmrun.fast.cpu.kernels import bf16
from nmrun.fast.cpu.packed_convolution import Bf16Convolution, BlockConvolution
from nmrun.kernels.compiler import find_compiler


@pytest.fixture(autouse=True)
def faster(deploy_times: dict[str, float]) -> None:
    deploy_times["packed bf16"] = 0.5


def net(pattern: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 20, 3, padding=1),
        nn.BatchNorm2d(20),
        nn.ReLU(),
        nn.Conv2d(20, 40, (3, 2), stride=2, bias=False),
    )
    return prune(model, pattern).bfloat16()


@pytest.mark.usefixtures("emulated_bf16")
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "3:7"])
def test_against_float64(pattern: str) -> None:
    model, x = net(pattern), normal_bf16(5, 8, 6, 7)
    weights = [model[i].weight.detach().clone() for i in (0, 3)]
    exact = copy.deepcopy(model).double()(x.double()).detach()
    choices = [c for c in nmrun.deploy(model, x) if not c.always_dense]
    assert [c.path for c in choices] == ["packed bf16"] * 2
    assert [type(model[i]) for i in (0, 3)] == [Bf16Convolution] * 2
    for i, weight in zip((0, 3), weights, strict=True):
        assert torch.equal(model[i].dense(), weight)
    with torch.no_grad():
        z = model(x)
        assert torch.equal(model(x[1:3]), z[1:3])
        assert torch.equal(model[0](x[0]), model[0](input=x)[0])
        assert model(x[:0]).shape == (0, *z.shape[1:])
        assert model[0](x.float()).dtype == torch.float32
        with pytest.raises(RuntimeError, match=r"^x of torch\.uint8: packed layers take floating"):
            model[0](x.to(torch.uint8))
    assert z.dtype == torch.bfloat16
    assert float((z.double() - exact).norm() / exact.norm()) < 0.01


@pytest.mark.usefixtures("emulated_bf16")
def test_one_of_a_single_position_is_the_linear_layer_of_its_pixels(
    deploy_times: dict[str, float],
) -> None:
    deploy_times["packed blocks bf16"] = 0.2
    models = []
    for pattern in ("32:4:16", "16:4:8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(32, 64, 1, stride=(1, 2)), nn.Conv2d(64, 32, 1, bias=False))
        models.append(prune(model, pattern).bfloat16())
    model, other = models
    dense, x = copy.deepcopy(model), normal_bf16(5, 32, 6, 7)
    exact = copy.deepcopy(model).double()(x.double()).detach()
    for one in models:
        assert [c.path for c in nmrun.deploy(one, x)] == ["packed blocks bf16"] * 2
        assert [type(layer) for layer in one] == [BlockConvolution] * 2
    assert torch.equal(model[0].dense(), dense[0].weight)
    with torch.no_grad():
        z = model(x)
        assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), z)
        assert torch.equal(model(x[1]), z[1])
        assert model(x[:0]).shape == (0, *z.shape[1:])
        assert model[0](x.float()).dtype == torch.float32
    assert z.dtype == torch.bfloat16
    assert z.is_contiguous(memory_format=torch.channels_last)
    assert share(z, exact) < 0.01
    assert share(gradient(model, x), gradient(dense, x)) < 0.02
    stays_itself(model, other, x)


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


@pytest.mark.usefixtures("emulated_bf16")
def test_a_state_of_another_shape_is_refused() -> None:
    model, x = net("1:4"), normal_bf16(5, 8, 6, 7)
    nmrun.deploy(model, x)
    state = model.state_dict()
    for change, message in (
        ({"0.index": torch.full_like(state["0.index"], 31)}, "a column that is not of its segment"),
        ({"0.values": state["0.values"][1:]}, "values where the counts say"),
        ({"0.counts": state["0.counts"][1:]}, "are not those of 20 x 8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state | change)


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")
def test_where_the_processor_has_none_they_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    choices = [c for c in nmrun.deploy(net("2:4"), normal_bf16(5, 8, 6, 7)) if not c.always_dense]
    assert {(c.path, c.reason) for c in choices} == {
        (None, "bfloat16: this processor has no AVX-512 with BF16")
    }
