"""What only a GPU can show: 2:4 products on sparse tensor cores, training through them, CUDA
graphs, kernels against the CPU's reference.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import operands
import pytest
import torch
from runs import config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import nmrun
from nmrun.fast.acceleration import accelerate, obstacle
from nmrun.fast.gpu import probe, semi_structured
from nmrun.fast.gpu.kernels import cusparselt
from nmrun.fast.gpu.linear import SemiStructuredProducts
from nmrun.kernels import projection
from nmrun.lab import bench
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.patterns import Pattern
from nmrun.sparsity import hard_threshold, soft_threshold, transposable_mask

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.fixture(scope="module")
def measurements() -> dict[str, probe.Times]:
    if why := obstacle(DEVICE):
        pytest.skip(why)
    shape = probe.SemiStructuredShape(512, 256, 1024, torch.bfloat16, both=True)
    with torch.no_grad():
        return probe.measure(shape, DEVICE)


@pytest.fixture
def right(measurements: dict[str, probe.Times]) -> list[str]:
    """The paths that compute the right thing here; without any the test is skipped, and says why."""
    wrong = {name: times.wrong for name, times in measurements.items() if name != "dense"}
    if all(wrong.values()):
        pytest.skip("; ".join(f"{name}: {why}" for name, why in wrong.items()))
    return [name for name, why in wrong.items() if not why]


@pytest.mark.parametrize("shape", [(128, 128), (96, 160), (272, 336), (768, 3072)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compressed_weights_are_the_librarys(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of weights with two non-zeros in every group; of others the library chooses which zeros."""
    if not cusparselt.works(DEVICE, dtype):
        pytest.skip("the library has another layout here: see the log")
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    places = torch.rand(rows, columns // 4, 4, generator=generator).argsort(2)
    values = torch.randint(1, 8, places.shape, generator=generator)
    weight = torch.where(places < 2, values, 0).view(shape).to(DEVICE, dtype)
    expected = torch._cslt_compress(weight)
    result = cusparselt.compressed(weight, dtype)
    turned = cusparselt.compressed(weight.t().contiguous().t(), dtype)
    assert result.shape == turned.shape == expected.shape
    size = rows * columns
    # of the last tiles only what is there is compared, by the product below
    whole = size + rows // 64 * columns // 32 * 256 if columns % 32 == 0 else size
    for blob in (result, turned):
        assert torch.equal(
            blob.view(-1).view(torch.int8)[:whole], expected.view(-1).view(torch.int8)[:whole]
        )
    x = torch.randint(-3, 4, (64, columns), generator=generator).to(DEVICE, dtype)
    exact = x.double() @ weight.double().t()
    for blob in (result, turned):
        z = cusparselt.multiply(blob, x)
        torch.testing.assert_close(z.double(), exact, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("sparser", ["1:4", "zeros", "-0.0", "float32"])
def test_any_weight_that_fits_into_2_4_is_compressed_whole(right: list[str], sparser: str) -> None:
    dense = normal(272, 336)
    weight = hard_threshold(dense, Pattern.parse("1:4" if sparser == "1:4" else "2:4"))
    if sparser == "zeros":
        weight[:, 32:128], weight[7] = 0.0, 0.0
    if sparser == "-0.0":
        weight = torch.where(weight == 0, -0.0, weight)
    low, x = weight.bfloat16(), normal(64, 336, seed=1).bfloat16()
    blob = cusparselt.compressed(weight if sparser == "float32" else low, torch.bfloat16)
    exact = x.double() @ low.double().t()
    torch.testing.assert_close(
        cusparselt.multiply(blob, x).double(), exact, rtol=2**-8, atol=1e-4 * float(exact.std())
    )


def test_the_library_is_asked_by_any_thread_with_any_bias(right: list[str]) -> None:
    """Layers of one size share a plan, which remembers the bias that it was given last."""
    weight = hard_threshold(normal(64, 128), Pattern(2, 4)).bfloat16()
    x, biases = normal(32, 128, seed=1).bfloat16(), normal(3, 64, seed=2).bfloat16()
    blob = cusparselt.compressed(weight, torch.bfloat16)
    plain = x.double() @ weight.double().t()

    def asked() -> bool:
        close = []
        for bias in (biases[0], None, biases[1], biases[0], biases[2], None):
            z = cusparselt.multiply(blob, x, bias)
            by_columns = cusparselt.multiply(blob, x.t().contiguous().t(), bias)
            expected = plain if bias is None else plain + bias.double()
            for result in (z, by_columns):
                close.append(torch.allclose(result.double(), expected, rtol=2**-7, atol=0.1))
        return all(close)

    assert asked()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(asked).result()
    with pytest.raises(RuntimeError, match="cuSPARSELt's "):
        cusparselt.multiply(blob, x, algorithm=10**6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return operands.normal(*shape, seed=seed).to(DEVICE)


def transposable(rows: int, columns: int) -> Tensor:
    dense = normal(rows, columns)
    return (dense * transposable_mask(dense, "2:4")).bfloat16().requires_grad_()


def test_each_path_is_right_or_says_why_not(measurements: dict[str, probe.Times]) -> None:
    assert set(measurements) == {"dense", *semi_structured.PATHS}
    for name, times in measurements.items():
        if not times.wrong:
            assert times.forward > 0, name
            assert times.input_gradient > 0, name
    print({name: times.wrong or f"{times.forward:.4f} ms" for name, times in measurements.items()})


@pytest.mark.parametrize("both", [True, False])
def test_forward_and_backward_compile(right: list[str], both: bool) -> None:
    """The compiler traces the backward pass with tensors of this device that have no memory."""
    weight = transposable(256, 512)
    x = normal(384, 512, seed=1).bfloat16().requires_grad_()
    dz = normal(384, 256, seed=2).bfloat16()
    packed = SemiStructuredProducts(right[0], weight, None, torch.bfloat16, both)
    results = []
    for run in (packed, torch.compile(packed, fullgraph=True)):
        z = run(x, weight, None)
        results.append((z, *torch.autograd.grad(z, (x, weight), dz)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(
            compiled, eager, rtol=2**-6, atol=2**-6 * float(eager.detach().float().std())
        )


@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(256, 512, 384), (1024, 256, 1000), (768, 3072, 2048)]
)
def test_products_are_those_of_the_masked_layer_and_the_same_bits_every_time(
    right: list[str], rows: int, columns: int, tokens: int
) -> None:
    weight, bias = transposable(rows, columns), normal(rows).bfloat16()
    x = normal(tokens, columns, seed=1).bfloat16().requires_grad_()
    dz = normal(tokens, rows, seed=2).bfloat16()
    expected = functional.linear(x.double(), weight.double(), bias.double())
    gradients = dz.double() @ weight.double(), dz.double().t() @ x.double()
    for path in right:
        packed = SemiStructuredProducts(path, weight, None, torch.bfloat16, both=True)
        z = packed(x, weight, bias)
        result = torch.autograd.grad(z, (x, weight), dz)
        truths = {"z": expected, "dx": gradients[0], "dw": gradients[1]}
        for (name, truth), value in zip(truths.items(), (z, *result), strict=True):
            error, bound = (value.double() - truth).abs(), 2**-7 * (truth.abs() + truth.std())
            assert bool((error <= bound).all()), (path, name, float(error.max()))
        for _ in range(100):
            again = packed(x, weight, bias)
            assert torch.equal(again, z), path
            assert torch.equal(torch.autograd.grad(again, x, dz)[0], result[0]), path


GPT = (
    *("dataset=stdlib_text", "dataset.context=128", "model=gpt_tiny", "model.width=256"),
    *("optimizer=adamw", "trainer.batch_size=16", "trainer.epochs=100"),
    *("trainer.precision=bf16", f"trainer.device={DEVICE.type}"),
)


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [("sr_ste", False), ("t_sr_ste", False), ("step", False), ("sr_ste", True)],
)
def test_a_gpt_trains_by_2_4_products_as_it_does_with_masks_alone(
    right: list[str], tmp_path: Path, recipe: str, compiled: bool
) -> None:
    losses: dict[str, Tensor] = {}
    for mode in ("off", "force"):
        words = (f"recipe={recipe}", f"trainer.acceleration={mode}", f"trainer.compile={compiled}")
        extra = ("recipe.switch=0.02",) if recipe == "step" else ()  # of 300 steps: sparse after 6
        settings = config(tmp_path, *GPT, *words, *extra)
        loop = Loop(settings, parts := build(settings), Console(None), "0123456789")
        loop.model.train()
        for _ in range(30):
            loop.steps.train_step(
                *divmod(loop.steps.step, loop.task.batches_per_epoch), measure_flips=False
            )
        losses[mode] = torch.stack(loop.steps.losses).float().cpu()
        packed = [
            weight.layer is not None and weight.layer.packed is not None
            for weight in loop.handle.sparse
        ]
        assert all(packed) if mode == "force" else not any(packed), [
            choice.reason for choice in parts.accelerated
        ]
    off, force = losses["off"], losses["force"]
    assert off[-1] < off[0] - 0.5  # it learns
    assert float((off - force).abs().max()) < 0.1
    assert float((off - force).abs().mean()) < 0.03
    # the products are rounded in another order: it was not the same code
    assert not torch.equal(off, force)


def losses_of(graphs: bool) -> Tensor:
    """20 steps of a small accelerated network, eagerly or by CUDA graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(DEVICE)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-2)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", total_steps=40, exclude=None)
    x, y, values = normal(512, 256), normal(512, 256, seed=1), []

    def loss(call: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return functional.mse_loss(call(x), y)

    accelerate(handle, lambda: loss(model), "force")
    assert all(
        weight.layer is not None and weight.layer.packed is not None for weight in handle.sparse
    )
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if graphs else model
    for _ in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        step = loss(forward)
        step.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(step.item())
    return torch.tensor(values)


def test_cuda_graphs_see_the_weights_of_every_step(right: list[str]) -> None:
    with recorded():
        graphs = losses_of(True)
    eager = losses_of(False)
    assert eager[-1] < 0.8 * eager[0]  # stale weights would not learn
    torch.testing.assert_close(graphs, eager, rtol=2e-2, atol=2e-2)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """What is compiled in here becomes CUDA graphs, none of which the compiler leaves out."""
    counters.clear()
    yield
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
    assert not counters["inductor"]["cudagraph_skips"]


@torch.no_grad()
def test_a_deployed_model_computes_the_same_as_cuda_graphs(right: list[str]) -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    model = model.to(DEVICE, torch.bfloat16)
    for layer in (model[0], model[2]):
        layer.weight.copy_(hard_threshold(layer.weight, Pattern(2, 4)))
    inputs = [normal(2048, 1024, seed=seed).bfloat16() for seed in range(3)]
    expected = [model(x) for x in inputs]
    choices = nmrun.deploy(model, inputs[0], compile=True)
    print(*choices, sep="\n")
    # else no algorithm was captured
    assert "cusparselt" not in right or all("cusparselt " in c.reason for c in choices)
    with recorded():
        for x, truth in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), truth, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ratio", "shape", "dim"), [
    ("2:4", (1031, 4096), 1), ("1:4", (7, 36), 1), ("2:8", (512, 768), 0), ("1:16", (300, 1024), 1), ("8:32", (96, 2048), 1),
    ("2:4", (64, 32, 3, 3), 1), ("3:7", (129, 21), 1),
])  # fmt: skip
def test_the_compiled_projection_has_the_bits_of_the_cpus_reference(
    ratio: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    pattern = Pattern.parse(ratio)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = weight.view(-1)
    flat[::3] = flat[::3].mul(2).round() / 2  # ties
    flat[1::7], flat[2::11], flat[5::101] = 0.0, -0.0, torch.nan
    weight = weight.to(dtype)
    for soft, reference in ((False, hard_threshold), (True, soft_threshold)):
        out = torch.full_like(weight, 7.0, device=DEVICE)
        if not projection.project(weight.to(DEVICE), out, pattern, dim, soft=soft):
            pytest.skip("Triton's kernels do not work here: see the log")
        expected = reference(weight, pattern, dim)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        result = out.cpu()
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(0.5).view(bits), expected.nan_to_num(0.5).view(bits))


@pytest.mark.parametrize(
    ("what", "words"),
    [("train", "--arms sr_ste masked_loop --steps 1"), ("infer", "--models tiny --tokens 2x64")],
)
def test_benchmarks_run(
    measurements: dict[str, probe.Times], what: str, words: str, tmp_path: Path
) -> None:
    assert bench.main([what, *words.split(), "--rounds", "2", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / f"{what}_gpu.json").read_text())
    assert record["hardware"]["gpu"] == torch.cuda.get_device_name()
    assert any("ms" in row for row in record["rows"])


def test_after_a_broken_capture_graphs_are_captured() -> None:
    """An algorithm that cannot be captured costs no more than itself. The last test: if it fails, so
    would others after it.
    """
    x = normal(64, 64)
    z, expected = torch.zeros_like(x), x @ x
    with pytest.raises(RuntimeError):
        semi_structured.captured(lambda: (x @ x).sum().item())
    torch.cuda.empty_cache()
    semi_structured.captured(lambda: torch.mm(x, x, out=z))()
    torch.testing.assert_close(z, expected)
