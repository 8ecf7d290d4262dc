"""FP8 products of 2:4 weights: against products that are rounded and dense, with cuSPARSELt's two
functions played on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from played_gpu import Machine, along_inputs, both_ways, normal, play
from runs import config
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import nmrun
from nmrun.errors import ConfigError
from nmrun.fast import measurement
from nmrun.fast.acceleration import accelerate
from nmrun.fast.gpu import linear, probe, semi_structured
from nmrun.fast.gpu.kernels import cusparselt
from nmrun.fast.gpu.linear import SemiStructuredProducts
from nmrun.lab.train import build
from nmrun.products import simulation


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return play(monkeypatch.setattr, tmp_path)


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """``x`` as numbers of an FP8 format and a scale represent it, in float64."""
    scale = torch.finfo(kind).max / x.float().abs().max()
    return (x.float() * scale).to(kind).double() / scale.double()


def near(actual: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    """Within one rounding to each dtype, and float32's of the sum."""
    allowed = sum({torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] for dtype in dtypes)
    expected = expected.detach()
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=allowed, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("tokens", "bias"), [(48, True), (5, True), (21, False)])
def test_products_and_gradients(dtype, both, tokens, bias):
    x, dz = (
        normal(tokens, 64, dtype=torch.float32).to(dtype),
        normal(tokens, 32, seed=1, dtype=torch.float32).to(dtype) * 8,
    )
    weight = (both_ways if both else along_inputs)(32, 64).to(dtype) / 8
    b = normal(32, seed=2, dtype=torch.float32).to(dtype) if bias else None
    leaves = [t.requires_grad_() for t in (x, weight, b) if t is not None]
    packed = SemiStructuredProducts("cusparselt_fp8", weight, None, dtype, both)
    z = packed(x, weight, b)
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    product = F.linear(rounded(x, forward), rounded(weight, forward))
    # what the library writes in bfloat16, before it is scaled and the bias is added
    off = 2**-8 * product.abs() * (dtype == torch.bfloat16)
    expected = product if b is None else product + b.double()
    allowed = off + {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * expected.abs() + 1e-4
    assert bool(((z.double() - expected).abs() <= allowed).all())
    dx, dw, *db = torch.autograd.grad(z, leaves, dz)
    between = [
        torch.bfloat16
    ] * both  # what the product of bfloat16 numbers gives, before it is scaled
    near(dx, rounded(dz, backward) @ rounded(weight, backward), *between, dtype)
    near(dw, rounded(dz, backward).t() @ rounded(x, backward), dtype)
    assert not bias or torch.equal(db[0], dz.sum(0))
    assert (z.dtype, z.is_contiguous(), dx.dtype, dw.dtype) == (dtype, True, dtype, dtype)


def test_it_is_remembered_by_what_it_rounds(machine):
    shape = probe.SemiStructuredShape(32, 64, 16, torch.bfloat16)
    rounding = probe.SemiStructuredShape(32, 64, 16, torch.bfloat16, fp8=True)
    device = torch.device("cpu")
    assert set(probe.measured(shape, device)) == {"dense", "compressed"}
    assert set(probe.measured(rounding, device)) == {"dense", "cusparselt_fp8"}
    assert not probe.measured(rounding, device)["cusparselt_fp8"].wrong
    timed = machine.timed
    assert set(probe.measured(shape, device)) == {"dense", "compressed"}
    assert machine.timed == timed


def test_what_no_memory_was_free_for_is_tried_again(monkeypatch):
    shape, device = (
        probe.SemiStructuredShape(32, 64, 16, torch.bfloat16, fp8=True),
        torch.device("cpu"),
    )

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as for_now:
        for_now.setattr(cusparselt, "multiply", full)
        times = probe.measured(shape, device)
    assert times["cusparselt_fp8"].wrong == "not enough memory is free to try it"
    assert not probe.measured(shape, device)["cusparselt_fp8"].wrong


@pytest.mark.parametrize("what", ["forward", "both"])
def test_a_wrong_product_is_never_taken(what, monkeypatch):
    right = cusparselt.multiply
    only = torch.float8_e4m3fn if what == "forward" else torch.bfloat16
    monkeypatch.setattr(
        cusparselt,
        "multiply",
        lambda packed, x, **options: (
            right(packed, x, **options) * (1 + (packed.dtype == only) / 20)
        ),
    )
    shape = probe.SemiStructuredShape(32, 64, 16, torch.bfloat16, both=what == "both", fp8=True)
    assert probe.measure(shape, torch.device("cpu"))["cusparselt_fp8"].wrong == "WRONG results"


def test_the_verdict():
    assert semi_structured.verdict(semi_structured.CUSPARSELT_FP8, "cpu") == "right"
    # which rounds nothing
    plain = semi_structured.Path(
        semi_structured.MASKED.pack, semi_structured.MASKED.multiply, fp8=True
    )
    assert semi_structured.verdict(plain, "cpu").startswith("WRONG results")


def trained(
    mode: str, compiled: bool = False, **options: Any
) -> tuple[list[float], nn.Module, list[str | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)
    )
    optimizer, forward = nmrun.optim.AdamW(model.parameters(), lr=1e-2), model
    handle = nmrun.sparsify(
        model, optimizer, pattern="2:4", total_steps=8, fp8=True, **{"exclude": None, **options}
    )

    def loss(seed: int) -> Tensor:
        x = normal(16, 32, seed=seed, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(forward(x), x.abs().argmax(1) % 10)

    choices = accelerate(handle, lambda: loss(0), mode)
    if compiled:
        torch._dynamo.reset()
        forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = []
    for step in range(8):
        losses.append(value := loss(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.finalize()
    return [value.item() for value in losses], model, [choice.path for choice in choices]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("sr_ste", {}), ("t_sr_ste", {}), ("s_ste", {"input_gradient": "double_prune"})],
)
def test_training_is_that_of_the_simulation(recipe, options):
    products, simulated = (
        trained("auto", recipe=recipe, **options),
        trained("off", recipe=recipe, **options),
    )
    assert products[2] == ["cusparselt_fp8", "cusparselt_fp8", None]  # 16 outputs are too few
    assert products[0] == pytest.approx(simulated[0], rel=2e-2)
    assert products[0] != trained("off", recipe="ste")[0]


@pytest.mark.parametrize("recipe", ["ste", pytest.param("t_sr_ste", marks=pytest.mark.slow)])
def test_compiled_as_one_graph(recipe):
    compiled, eager = (trained("auto", compiled, recipe=recipe) for compiled in (True, False))
    assert compiled[2][0] == "cusparselt_fp8"
    assert compiled[0] == pytest.approx(eager[0], rel=2e-2)


def test_operators_by_torchs_own_check():
    weight, x = (
        both_ways(32, 64).bfloat16().requires_grad_(),
        normal(16, 64, dtype=torch.float32).bfloat16().requires_grad_(),
    )
    for both in (True, False):
        packed = SemiStructuredProducts("cusparselt_fp8", weight, None, torch.bfloat16, both)
        parts, (forward, backward) = list(packed.buffers()), packed.counts
        arguments = (
            x,
            weight,
            None,
            parts[:forward],
            parts[forward : forward + backward],
            parts[forward + backward :],
        )
        # the others compute with the operands, which FP8 does not allow
        known = ("test_autograd_registration", "test_faketensor")
        torch.library.opcheck(
            linear.linear24, (*arguments, "cusparselt_fp8", None, None, None), test_utils=known
        )
        if both:
            dz = normal(16, 32, dtype=torch.float32).bfloat16()
            torch.library.opcheck(linear.multiply24, (dz, parts[forward:], 64, "cusparselt_fp8"))


def test_a_compiler_that_has_no_numbers_of_a_gpu_follows_the_rounding(monkeypatch):
    """torch.compile traces the backward pass of an operator with such tensors, outside of what it
    calls compiling; the kernel asks where the numbers lie.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr(simulation, "agrees", lambda *about: True)
    with FakeTensorMode():
        gradient = torch.empty(16, 32, dtype=torch.bfloat16, device="cuda:7")
        product = simulation.backward_product(gradient.t(), gradient, fp8=True)
    assert (product.shape, product.dtype) == ((32, 32), torch.bfloat16)


def test_estimates_stay_dense():
    losses, _, paths = trained("auto", recipe="ste", mvue="2:4")
    assert paths[0] == "cusparselt_fp8"
    assert all(loss < 10 for loss in losses)


def test_what_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_is_small_on_cpu", lambda *_: False)  # as on a GPU
    network = (
        "model=mlp",
        "model.hidden=[32,64,32]",
        "trainer.precision=bf16",
        "recipe=ste",
        "trainer.fp8=true",
    )
    settings = config(tmp_path, *network)
    lines = measurement.lines(build.build(settings).accelerated)
    assert "N:M products in 2 of 2 sparse layers" in lines
    assert any("FP8 simulated 6.000 ms, cusparselt_fp8 4.000 ms (1.50x)" in line for line in lines)
    by_name = build.build(config(tmp_path, *network, "trainer.acceleration=cusparselt_fp8"))
    assert [choice.path for choice in by_name.accelerated] == ["cusparselt_fp8"] * 2
    narrow = build.build(config(tmp_path, *network, "model.hidden=[48,48]"))
    assert narrow.accelerated[0].reason == "48 inputs and 48 outputs are not multiples of 32"
    with pytest.raises(
        ConfigError, match=r"cusparselt: 2:4 products by it go with trainer\.fp8=false"
    ):
        config(tmp_path, *network, "trainer.acceleration=cusparselt")
    with pytest.raises(
        ConfigError, match=r"cusparselt_fp8: 2:4 products by it go with trainer\.fp8=true"
    ):
        config(tmp_path, *network[:-1], "trainer.acceleration=cusparselt_fp8")
