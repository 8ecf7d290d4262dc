"""nmrun.deploy in int8: linear layers that are near enough and faster, and nothing else."""

from __future__ import annotations

import pytest
import torch
from deployed import share
from perceptrons import pruned
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError
from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.onednn import DenseInt8Linear, dtypes
from nmrun.fast.cpu.packed_linear import Int8Linear, PackedLinear
from nmrun.sparsity import nm_mask

needs_int8 = pytest.mark.skipif(bool(int8.KERNELS.obstacle()), reason=int8.KERNELS.obstacle())


@pytest.fixture
def faster(deploy_times: dict[str, float]) -> None:
    """int8 is faster than packed, and that than dense."""
    deploy_times.update({"packed": 0.5, "int8": 0.25})


@needs_int8
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_int8(dtype: torch.dtype) -> None:
    model, x = pruned().to(dtype), torch.randn(3, 5, 80).to(dtype)
    expected = model(x).detach()
    choices = nmrun.deploy(model, x, precision="int8")
    assert [(c.path, c.is_sparse) for c in choices] == [("int8", True)] * 2
    assert all("int8 0.25 ms" in c.reason and "(4.00x); " in c.reason for c in choices)
    assert all("; dense int8 outputs 0.0" in c.reason for c in choices)
    with torch.no_grad():
        z = model(x)
    assert z.dtype == dtype
    assert 0 < share(z, expected) < 0.03
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert not list(model.parameters())


@needs_int8
@pytest.mark.usefixtures("emulated_bf16")
def test_bfloat16_is_taken_for_float32_where_int8_is_slower_or_too_far_off(
    deploy_times: dict[str, float],
) -> None:
    deploy_times.update({"packed": 0.5, "packed bf16": 0.2})
    model, x = pruned(), torch.randn(40, 80)
    assert [c.path for c in nmrun.deploy(model, x)] == ["packed"] * 2  # nobody allowed for less
    model, dense = pruned(), pruned()
    choices = nmrun.deploy(model, x, precision="int8", tolerance=0.006)
    assert [c.path for c in choices] == ["packed bf16"] * 2
    assert all("packed bf16 outputs 0.00" in c.reason for c in choices)
    assert 0 < share(model(x), dense(x)) < 0.006


@needs_int8
def test_rows_that_share_their_columns_are_packed_in_blocks(deploy_times: dict[str, float]) -> None:
    deploy_times["int8 blocks"] = 0.1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(40, 80)
    for layer in (model[0], model[2]):
        layer.weight.data = nmrun.sparsity.hard_threshold(layer.weight.data, "32:4:16")
    expected = model(x)
    assert [c.path for c in nmrun.deploy(model, x, precision="int8")] == ["int8 blocks"] * 2
    assert 0 < share(model(x), expected) < 0.05


@needs_int8
@pytest.mark.usefixtures("faster")
def test_layers_that_compute_under_autocast_are_packed_too() -> None:
    model, x = pruned(), torch.randn(40, 80)
    expected = model(x).detach()

    def sample() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    choices = nmrun.deploy(model, sample, precision="int8")
    assert [(c.path, c.is_sparse) for c in choices] == [("int8", True)] * 2
    assert all(isinstance(model[i], Int8Linear) for i in (0, 2))
    with torch.no_grad():
        assert 0 < share(sample(), expected) < 0.03


@needs_int8
@pytest.mark.usefixtures("faster")
def test_a_layer_that_is_too_far_off_stays_float32() -> None:
    """Outliers among a layer's inputs leave few steps to the rest."""
    model, x = pruned(), torch.randn(40, 80)
    model[0].weight.data[:, 0] = 0.0
    x[:, 0] = 1000.0  # nothing is multiplied with it
    choices = nmrun.deploy(model, x, precision="int8")
    assert [c.path for c in choices] == ["packed", "int8"]
    assert type(model[0]) is PackedLinear
    assert isinstance(model[2], Int8Linear)
    assert "off, more than 0.05" in choices[0].reason
    assert "int8: outputs" in repr(choices[0])
    strict = pruned()
    choices = nmrun.deploy(strict, torch.randn(40, 80), precision="int8", tolerance=0.0)
    assert [c.path for c in choices] == ["packed", "packed"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, None, False, causal)[0]


@needs_int8
@pytest.mark.usefixtures("faster")
def test_the_output_of_attention_is_judged_by_what_it_is_given() -> None:
    """Which has an outlier that its input has not."""
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 40, 256)
    attention = model.attention
    for weight in (attention.in_proj_weight, attention.out_proj.weight):
        weight.data *= nm_mask(weight.data, "1:16", 1)
    attention.in_proj_bias.data[2 * 256] = 300.0  # nothing is multiplied with it
    attention.out_proj.weight.data[:, 0] = 0.0
    expected = model(x).detach()
    choices = nmrun.deploy(model, x, precision="int8", tolerance=0.05)
    assert [c.path for c in choices[:3]] == ["int8", "int8", "packed"]
    assert "off, more than 0.05" in choices[2].reason
    with torch.no_grad():
        assert share(model(x), expected) < 0.05


class Across(Attention):
    def forward(self, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(key, key, value, None, False)[0]


@needs_int8
@pytest.mark.usefixtures("faster")
def test_the_projection_of_keys_and_values_is_judged_by_both() -> None:
    """The values have an outlier, and the keys have none."""
    torch.manual_seed(0)
    model, (key, value) = Across().eval(), torch.randn(2, 2, 40, 256)
    for weight in (model.attention.in_proj_weight, model.attention.out_proj.weight):
        weight.data *= nm_mask(weight.data, "1:16", 1)
    value[..., 3] *= 3000.0
    model.attention.in_proj_weight.data[:, 3] *= 1e-5
    expected = model(key, value).detach()
    choices = nmrun.deploy(model, (key, value), precision="int8", tolerance=0.05)
    assert [c.path for c in choices[:3]] == ["int8", "packed", "int8"]
    with torch.no_grad():
        assert share(model(key, value), expected) < 0.05


@needs_int8
@pytest.mark.usefixtures("faster")
def test_a_sample_of_zeros_shows_nothing() -> None:
    model = nn.Sequential(pruned()[0])
    model[0].bias = None
    (choice,) = nmrun.deploy(model, torch.zeros(40, 80), precision="int8")
    assert choice.path == "packed"
    assert "int8: its outputs for the sample are all 0" in choice.reason
    assert "nan" not in choice.reason


@needs_int8
@pytest.mark.usefixtures("faster")
def test_what_is_not_finite_or_no_linear_layer_is_not_int8() -> None:
    model, x = pruned(), torch.randn(40, 80)
    x[3, 3] = float("nan")
    choices = nmrun.deploy(model, x, precision="int8")
    assert "int8" not in [c.path for c in choices]
    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 8)).eval()
    for layer in (images[0], images[2]):
        layer.weight.data *= nm_mask(layer.weight.data, "2:4", 1)
    choices = nmrun.deploy(images, torch.randn(20, 16, 4, 4), precision="int8")
    assert [c.path for c in choices] == ["packed", "int8"]


@needs_int8
def test_a_precision_and_a_tolerance_that_are_none() -> None:
    model, x = pruned(), torch.randn(3, 80)
    layers = list(model)
    for words, message in (
        ({"precision": "int4"}, "precision=int4: it takes int8, or None"),
        ({"tolerance": -1.0}, "tolerance=-1.0: it takes a number at least 0 and at most 1"),
        ({"tolerance": "a"}, "tolerance=a: it takes a number at least 0 and at most 1"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            nmrun.deploy(model, x, **words)
    assert list(model) == layers


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_there_is_one_line() -> None:
    model = pruned()
    layers = list(model)
    with pytest.raises(ConfigError, match=r"^precision=int8: no C compiler works here .*$"):
        nmrun.deploy(model, torch.randn(3, 80), precision="int8")
    assert list(model) == layers


@pytest.fixture
def dense_faster(deploy_times: dict[str, float]) -> None:
    deploy_times.update({"onednn": 0.7, "packed": 0.5, "int8": 0.4, "dense int8": 0.25})


@needs_int8
@pytest.mark.usefixtures("dense_faster")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_int8_is_taken_where_it_is_the_fastest(dtype: torch.dtype) -> None:
    """Of N:M weights and of others; its weight is the one that a packed layer would have."""
    model, x = pruned().to(dtype), torch.randn(3, 5, 80).to(dtype)
    model[2].weight.data = torch.randn(30, 50).to(dtype)
    weight, expected = model[0].weight.data.clone(), model(x).detach()
    choices = nmrun.deploy(model, x, precision="int8")
    assert [(c.path, c.is_sparse) for c in choices] == [("dense int8", False)] * 2
    assert all("; dense int8 outputs 0.0" in c.reason for c in choices)
    assert all(isinstance(model[i], DenseInt8Linear) for i in (0, 2))
    assert torch.equal(model[0].dense(), Int8Linear.of(weight).dense())
    with torch.no_grad():
        z = model(x)
        assert model(x[:0]).shape == (0, 5, 30)
    assert z.dtype == dtype
    assert 0 < share(z, expected) < 0.03
    x[1, 2, 3] = float("nan")
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        model(x)


@needs_int8
@pytest.mark.parametrize("power", [-8, -12, -20, -60, -100])
def test_dense_int8_is_as_near_for_small_inputs(power: int) -> None:
    """A power of two changes no rounding, so neither the error."""
    weight, bias, x, by = torch.randn(24, 40), torch.randn(24), torch.randn(9, 40), 2.0**power
    layer = DenseInt8Linear.of(weight)
    assert 0 < share(layer(x), x @ weight.t()) < 0.03
    assert torch.equal(layer(x * by) / by, layer(x))
    biased = DenseInt8Linear.of(weight, bias)
    torch.testing.assert_close(biased(x * by), layer(x) * by + bias)
    assert torch.equal(biased(x * 0.0), bias.expand(9, -1))


@needs_int8
@pytest.mark.skipif(torch.bfloat16 not in dtypes(), reason="oneDNN multiplies no bfloat16 here")
def test_dense_bfloat16_is_taken_for_float32_where_int8_is_slower_or_too_far_off(
    deploy_times: dict[str, float],
) -> None:
    """Of N:M weights and of others."""
    deploy_times.update({"onednn": 0.7, "packed": 0.5, "dense int8": 0.2, "dense bf16": 0.3})
    models, x = [], torch.randn(3, 5, 80)
    for pattern in ("2:4", "1:16"):
        model = pruned(pattern)
        model[2].weight.data = torch.randn(30, 50)
        models.append(model)
    model, _ = models
    expected = model(x).detach()
    for one in models:
        choices = nmrun.deploy(one, x, precision="int8", tolerance=0.006)
        assert [(c.path, c.is_sparse) for c in choices] == [("dense bf16", False)] * 2
        assert all("dense bf16 outputs 0.00" in c.reason for c in choices)
    with torch.no_grad():
        z = model(x)
        assert model(x[:0]).shape == (0, 5, 30)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
    assert z.dtype == torch.float32
    assert 0 < share(z, expected) < 0.006
    low = pruned().bfloat16()  # which has oneDNN's products anyway
    choices = nmrun.deploy(low, x.bfloat16(), precision="int8", tolerance=0.006)
    assert not any("dense bf16" in c.reason for c in choices)
