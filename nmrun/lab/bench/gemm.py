"""``nmrun bench gemm``: products with a sparse weight against dense ones, by shape and tokens: 2:4
on a GPU, N:M on a CPU.

On a GPU: ``x W^T`` with W (outputs, inputs) and x (tokens, inputs) in bfloat16, each shape both
ways, as in a feed-forward block. With ``--fp8`` both are rounded to e4m3fn with one scale, x in
every call. Numbers are drawn from N(0, 1): they decide on a GPU's power and so on its clock. Paths
are tested first, each with the fastest right algorithm of its library; a wrong one is not timed.

On a CPU, in float32: the forward product; the three products of a training step with the packing of
the weight; the same with the weight gradient at the kept entries alone. Dense is what torch calls
(MKL), or oneDNN, whichever is faster in the median; so is the dense weight gradient of a packed
step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.fast import acceleration, measurement
from nmrun.fast.cpu import linear
from nmrun.fast.cpu.weight import PRODUCTS
from nmrun.fast.gpu import semi_structured
from nmrun.fast.measurement import ONEDNN
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, ratios, rounds, speedup
from nmrun.lab.bench.options import CPU_RATIOS, GEMM_SHAPES, GEMM_TOKENS, shape
from nmrun.patterns import Pattern
from nmrun.products import simulation
from nmrun.sparsity.masks import hard_threshold

DTYPE = torch.bfloat16


def dense_fp8(weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """``x W^T`` of operands (tokens, inputs) and (outputs, inputs) rounded to FP8, the weight
    beforehand."""
    values, scale = simulation.quantize(weight, simulation.FORWARD_FP8)

    def call() -> Tensor:
        values_x, scale_x = simulation.quantize(x, simulation.FORWARD_FP8)
        scales = scale_x.reciprocal(), scale.reciprocal()
        # the sparse products sum so, too
        return torch._scaled_mm(
            values_x, values.t(), *scales, out_dtype=x.dtype, use_fast_accum=True
        )

    return call


def measure(
    inputs: int,
    outputs: int,
    tokens: int,
    count: int,
    clock: Clock,
    device: torch.device,
    fp8: bool = False,
) -> list[Row]:
    """The dense product and every path that is for it, at one size."""
    paths = semi_structured.candidates(fp8)
    about = {
        "shape": f"{inputs} to {outputs}",
        "inputs": inputs,
        "outputs": outputs,
        "tokens": tokens,
    }
    try:
        x, weight = (
            torch.randn(tokens, inputs, device=device).to(DTYPE),
            semi_structured.transposable(outputs, inputs, device),
        )
        dense = torch.randn(outputs, inputs, device=device).to(DTYPE)
        calls: dict[str, Callable[[], Tensor]] = {
            "dense": dense_fp8(dense, x) if fp8 else partial(functional.linear, x, dense)
        }
        wrong, algorithms = dict[str, str](), dict[str, str]()
        expected = simulation.linear(x.float(), weight.float(), fp8=fp8)
        for name, path in paths.items():
            with harness.spared(wrong, name, *measurement.ERRORS):
                parts, _ = path.pack(weight, None)
                algorithms[name], _ = semi_structured.fastest(name, x, parts, None, expected)
                multiply = semi_structured.named(algorithms[name]).multiply
                calls[name] = partial(multiply, x, parts, None)
        del expected
        times = rounds(calls, count, clock)
    except torch.OutOfMemoryError:
        return [{**about, "path": name, "wrong": NO_MEMORY} for name in ("dense", *paths)]
    flops = 2 * tokens * inputs * outputs
    rows: list[Row] = [{**about, "path": name, "wrong": why} for name, why in wrong.items()]
    for name, samples in times.items():
        figures = speedup(samples, times["dense"])
        rate = {"tflops": flops / figures["ms"] / 1e9}
        algorithm = {"algorithm": algorithms[name]} if name in algorithms else {}
        rows.append({**about, "path": name, **figures, **rate, **algorithm})
    order = ["dense", *paths]
    return sorted(rows, key=lambda row: order.index(row["path"]))


def page(rows: list[Row], fp8: bool) -> str:
    kind = "bfloat16 rounded to FP8" if fp8 else "bfloat16"
    parts = [
        f"Products with a 2:4 weight, {kind}: times as fast as the dense product. "
        f"Median [quartiles] of paired rounds, n = {harness.samples(rows)}. TFLOP/s of the dense one."
    ]

    def cell(row: Row) -> str:
        if row["path"] == "dense":
            return f"{row['ms']:.3g} ms, {row['tflops']:.3g} TFLOP/s"
        return harness.spread(row, "speedup")

    for name in ("dense", *semi_structured.candidates(fp8)):
        if path_rows := [row for row in rows if row["path"] == name]:
            wrong = {row.get("wrong") for row in path_rows}
            text = harness.grid(path_rows, "shape", "tokens", cell)
            if len(wrong) == 1 and wrong != {None}:
                text = f"{wrong.pop()}, at all sizes"
            parts.append(f"{name}:\n\n{text}")
    return "\n\n".join(parts)


# --- on a CPU --------------------------------------------------------------------------------------

WHAT = {
    "forward": "The forward product",
    "step": "Forward and backward, with packing the weight",
    "masked": "Forward and backward, the weight gradient at the kept entries alone",
}
LIBRARIES = ("torch", "oneDNN")


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def measure_on_cpu(
    inputs: int, outputs: int, tokens: int, patterns: Sequence[str], count: int, clock: Clock
) -> list[Row]:
    """All products of one layer: a row for each of :data:`WHAT`, ratio and arm."""
    x, dz = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    full = torch.randn(outputs, inputs)
    reordered = torch.ops.mkldnn._reorder_linear_weight(full, tokens)
    dense: dict[str, dict[str, Callable[[], Any]]] = {
        "torch": {
            "forward": lambda: functional.linear(x, full),
            "step": lambda: (functional.linear(x, full), dz @ full, dz.t() @ x),
        },
        "oneDNN": {
            "forward": lambda: onednn(x, reordered),
            "step": lambda: (onednn(x, full), onednn(dz, full.t()), onednn(dz.t(), x.t())),
        },
    }
    arms: dict[str, Callable[[], Any]] = {
        f"{library} {what}": call
        for library, calls in dense.items()
        for what, call in calls.items()
    }
    wrong: dict[str, str] = {}
    gradient = _gradient(x, dz, count, clock)
    for ratio in patterns:
        weight = hard_threshold(full, Pattern.parse(ratio), 1).contiguous()
        packed = linear.LinearProducts((outputs, inputs), torch.float32, Pattern.parse(ratio))
        packed.write(weight, None)
        forward, backward = map(packed.parts, PRODUCTS)

        def z(weight: Tensor = weight, f: Any = forward, b: Any = backward) -> Tensor:
            return linear.linear(x, weight, None, f, b, "dense")

        def step(
            how: str, packed: Any = packed, weight: Tensor = weight, z: Any = z, f: Any = forward,
            b: Any = backward,
        ) -> None:  # fmt: skip
            packed.write(weight, None)
            z()
            linear.multiply(dz, b, inputs)
            linear.weight_gradient(dz, x, f, how)

        arms[f"{ratio} forward"] = z
        arms[f"{ratio} step"] = partial(step, gradient)
        arms[f"{ratio} masked"] = partial(step, "sampled")
        if fault := measurement.fault(z, functional.linear(x, weight)):
            wrong[ratio] = fault
    with torch.no_grad():
        times = rounds(arms, count, clock)
    rows = []
    about = {"shape": f"{inputs} to {outputs}", "tokens": tokens}
    for what in WHAT:
        bases = {name: times[f"{name} {'forward' if what == 'forward' else 'step'}"]
                 for name in LIBRARIES}  # fmt: skip
        better = min(bases, key=lambda name: statistics.median(bases[name]))
        for name, samples in bases.items():
            rows.append({**about, "what": what, "arm": name, **speedup(samples, bases[better])})
        for ratio in patterns:
            samples, arm = times[f"{ratio} {what}"], {"arm": ratio, "dense": better}
            over = {f"over_{name}": statistics.median(ratios(bases[name], samples))
                    for name in LIBRARIES}  # fmt: skip
            figures = {"wrong": wrong[ratio]} if ratio in wrong else speedup(samples, bases[better])
            rows.append({**about, "what": what, **arm, **over, **figures})
    return rows


def _gradient(x: Tensor, dz: Tensor, count: int, clock: Clock) -> str:
    """The faster way to a dense weight gradient: torch's or oneDNN's."""
    ways = ("dense", ONEDNN)
    arms = {how: partial(linear.weight_gradient, dz, x, [], how) for how in ways}
    with torch.no_grad():
        times = rounds(arms, count, clock)
    return min(ways, key=lambda how: statistics.median(times[how]))


def page_of_cpu(rows: Sequence[Row]) -> str:
    parts = [
        "A linear layer's products with an N:M weight on the CPU, float32: times as fast as the better "
        "dense product. Median [quartiles] of paired rounds, "
        f"n = {harness.samples(rows)}, {harness.cpu_clock_name()}. "
        "Dense columns: milliseconds of torch and of oneDNN."
    ]

    def cell(row: Row) -> str:
        return harness.speed(row, row["arm"] if row["arm"] in LIBRARIES else "")

    for what, title in WHAT.items():
        product_rows = [
            {**row, "size": f"{row['tokens']}, {row['shape']}"}
            for row in rows
            if row["what"] == what
        ]
        text = harness.grid(product_rows, "size", "arm", cell)
        parts.append(f"{title} (tokens, inputs to outputs):\n\n{text}")
    return "\n\n".join(parts)


# --- the command -----------------------------------------------------------------------------------


def benchmark(
    shapes: Sequence[tuple[int, int]] | None, tokens: Sequence[int] | None, fp8: bool,
    sparsity: Sequence[Pattern] | None, rounds: int, device: str,
) -> Benchmark:  # fmt: skip
    place = harness.device_of(device)
    harness.needs_products(place)
    on_cpu = not acceleration.is_24(place)
    if fp8 and on_cpu:
        raise ConfigError("--fp8: there are no products of FP8 numbers on a CPU")
    if fp8 and place.type == "cuda" and torch.cuda.get_device_capability(place) < (8, 9):
        raise ConfigError("--fp8: this GPU has no products of FP8 numbers")
    where = "cpu" if on_cpu else "cuda"
    patterns = (sparsity or [*map(Pattern.parse, CPU_RATIOS)]) if on_cpu else [Pattern(2, 4)]
    omissions: list[str] = []
    clock = harness.cpu_clock() if on_cpu else Clock(place)

    def cases() -> Iterator[list[Row]]:
        for narrow, wide in shapes or map(shape, GEMM_SHAPES[where]):
            for inputs, outputs in dict.fromkeys(((narrow, wide), (wide, narrow))):
                ratios = [str(p) for p in patterns if inputs % p.m == 0]
                omissions.extend(
                    f"{inputs} to {outputs} without {p}: {p.m} does not divide {inputs}"
                    for p in patterns
                    if inputs % p.m
                )
                for token_count in (tokens or GEMM_TOKENS[where]) if ratios else ():
                    harness.note(f"{inputs} to {outputs}, {token_count} tokens")
                    if on_cpu:
                        yield measure_on_cpu(inputs, outputs, token_count, ratios, rounds, clock)
                    else:
                        yield measure(inputs, outputs, token_count, rounds, clock, place, fp8)

    report = page_of_cpu if on_cpu else partial(page, fp8=fp8)
    return Benchmark(cases(), report, place, "_fp8" if fp8 else "", omissions)
