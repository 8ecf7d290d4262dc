"""``nmrun bench infer``: forward passes of networks, dense by torch, ``torch.compile`` and OpenVINO,
and with N:M weights by ``nmrun.deploy``, in the precisions that this machine multiplies.

Weights are random. A ``packed`` arm has them pruned by magnitude; ``packed_compiled`` is compiled as
well. OpenVINO is not needed (nmrun's extra ``bench``)."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, extra, first_line
from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.onednn import OneDNNCopy
from nmrun.fast.deploy import deploy
from nmrun.fast.gpu.probe import obstacle
from nmrun.fast.sites import sites
from nmrun.kernels.compiler import processor_flags
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row, quartiles, ratios
from nmrun.lab.bench.options import ENCODERS, IMAGE_SIDES, PRECISIONS
from nmrun.lab.output import silent
from nmrun.patterns import Pattern
from nmrun.products.attention import slow_path
from nmrun.registry import version_of
from nmrun.sparsity.masks import nm_mask

Arm = tuple[str, str, str]  # precision, kind, pattern
FLOAT32, BF16, INT8 = PRECISIONS
# the largest error of an arm's outputs, as a share of their norm
TOLERANCES = {FLOAT32: 1e-3, BF16: 0.05, INT8: 0.2}

# --- the networks ---------------------------------------------------------------------------------


def network(name: str, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """A network of ``options`` with random weights, and an input: sequences of so many tokens, or as
    many images as these have in all."""
    if name in ENCODERS:
        layers, width, heads = ENCODERS[name]
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return encoder.eval(), torch.randn(*size, width)
    side = IMAGE_SIDES[name]
    if name == "vit_large":
        from torchvision import models

        model = models.vit_l_16(num_classes=1000)
        nn.init.normal_(model.heads.head.weight)  # 0 in the beginning
    else:
        from nmrun.lab.models import images

        model = images.of_torchvision(name, (3, side, side), 10, "auto")
    model.to(memory_format=torch.channels_last)  # torch's faster layout
    return model.eval(), torch.randn(size[0] * size[1], 3, side, side)


@torch.no_grad()
def prune(model: nn.Module, pattern: Pattern) -> nn.Module:
    """A copy of a model with every weight that a packed layer could hold, and the pattern fits, pruned
    by magnitude."""
    pruned = copy.deepcopy(model)
    for module_sites in sites(pruned)[0].values():
        for site in module_sites:
            if len(site.weight) % pattern.v:
                continue
            site.weight.mul_(nm_mask(site.weight.contiguous(), pattern, 1, pad=True))
    return pruned


def model_bytes(model: nn.Module) -> int:
    """What a model's weights and buffers take, with oneDNN's copies."""
    sources = [m.source() for m in model.modules() if isinstance(m, OneDNNCopy)]
    held = [*model.parameters(), *model.buffers(), *(t for t in sources if t is not None)]
    return sum(t.nbytes for t in held)


# --- the arms -------------------------------------------------------------------------------------


def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16, AMX, or Arm's)."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & processor_flags())


def chosen(
    kinds: Sequence[str], patterns: Sequence[Pattern], precisions: Sequence[str] | None,
    device: torch.device,
) -> list[Arm]:  # fmt: skip
    """The arms of some kinds, by default in the precisions that this device multiplies."""
    on_gpu = device.type == "cuda"
    if precisions is None:
        low = {BF16: has_bf16(), INT8: not int8.KERNELS.obstacle()}
        precisions = [BF16] if on_gpu else [FLOAT32, *(name for name in low if low[name])]
    arms: list[Arm] = []
    for kind in kinds:
        for precision in precisions:
            if kind.startswith("packed"):
                arms += [(precision, kind, str(pattern)) for pattern in patterns]
            elif not on_gpu if kind == "openvino" else precision != INT8:
                arms.append((precision, kind, ""))
    return arms


@torch.no_grad()
def made(model: nn.Module, x: Tensor, arm: Arm, row: Row) -> Call:
    """A forward pass of the float32 model by an arm. Into its row goes how far off the outputs are; of
    a packed one also which layers are packed, and its size."""
    precision, kind, pattern = arm
    row |= {"precision": precision, "arm": kind, "pattern": pattern}
    is_low = precision == BF16
    given = x.bfloat16() if is_low and x.is_floating_point() else x
    call: Call
    if kind == "openvino":
        call = partial(openvino(model, x, precision), x)
    elif pattern:
        model, is_compiled = prune(model, Pattern.parse(pattern)), kind == "packed_compiled"
        own = copy.deepcopy(model)
        own = own.bfloat16() if is_low else own
        choices = deploy(own, given, "int8" if precision == INT8 else None, compile=is_compiled)
        weights = [choice for choice in choices if not choice.always_dense]
        row["layers"] = f"{sum(c.is_sparse for c in weights)} of {len(weights)}"
        row["bytes"] = model_bytes(own) / model_bytes(model)
        call = partial(by_layers, own, given) if is_compiled else partial(own, given)
    else:
        dense = copy.deepcopy(model).bfloat16() if is_low else model
        call = partial(compiled(dense, x) if kind == "compiled" else dense, given)
    result: Any = call()
    expected = model(x)
    row["off"] = float((result.float() - expected).norm() / expected.norm())
    return torch.no_grad()(call)


def by_layers(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A forward pass in which torch's encoders call their layers."""
    with slow_path():
        return model(x)


def compiled(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """``torch.compile``: on a GPU into CUDA graphs, on a CPU with the weights as constants, which lets
    oneDNN lay them out."""
    how: dict[str, Any] = {"options": {"freezing": True}}
    if x.is_cuda:
        how = {"mode": "reduce-overhead"}
    return partial(by_layers, torch.compile(model, **how))


def openvino(model: nn.Module, x: Tensor, precision: str) -> Callable[[Tensor], Tensor]:
    """OpenVINO: float32, bfloat16, and int8 by NNCF's static quantisation, calibrated with ``x``.

    Raises ConfigError where it is not installed, and RuntimeError for a network that it cannot take.
    """
    try:
        with silent(), torch.no_grad(), slow_path():
            network = _openvino(model, x, precision)
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {extra('bench')}") from None
    except Exception as error:  # converters have many kinds, each with pages of text
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RuntimeError(f"it cannot take this network: {why}") from None
    return lambda x: torch.from_numpy(network(x.numpy())[0])


def _openvino(model: nn.Module, x: Tensor, precision: str) -> Any:
    runtime = importlib.import_module("openvino")
    graph = runtime.convert_model(model, example_input=x)
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    if precision == INT8:
        nncf = importlib.import_module("nncf")
        nncf.set_log_level(logging.ERROR)
        samples, kind = nncf.Dataset([x.numpy()]), nncf.ModelType.TRANSFORMER
        graph = nncf.quantize(graph, samples, model_type=kind, subset_size=1)
    if precision == BF16 or (precision == INT8 and has_bf16()):  # of int8 what is left
        config["INFERENCE_PRECISION_HINT"] = "bf16"
    return runtime.Core().compile_model(graph, "CPU", config)


# --- the comparison -------------------------------------------------------------------------------


def case(
    name: str, size: tuple[int, int], model: nn.Module, x: Tensor, arms: Sequence[Arm]
) -> Case:
    """The comparison of some arms of a network, torch's own first: in float32, on a GPU in bf16."""
    about = {"model": name, "sequences": size[0], "tokens": size[1]}
    every = (BF16 if x.is_cuda else FLOAT32, "torch", ""), *arms
    return Case(about, {" ".join(arm).strip(): partial(made, model, x, arm) for arm in every})


def compared(rows: list[Row]) -> None:
    """Add how many times as fast each arm is as the fastest right dense arm of each precision."""
    timed = [row for row in rows if "times" in row]
    fastest: dict[str, Row] = {}
    for row in timed:
        row |= {"n": len(row["times"]), **quartiles("ms", row["times"])}
        if not row["off"] <= TOLERANCES[row["precision"]]:
            row["wrong"] = "WRONG results"
        elif not row["pattern"]:
            other = fastest.setdefault(row["precision"], row)
            fastest[row["precision"]] = min(other, row, key=lambda each: float(each["ms"]))
    for row in timed:
        for precision, dense in fastest.items():
            row |= quartiles(f"over_{precision}", ratios(dense["times"], row["times"]))
            row[f"over_{precision}_by"] = dense["arm"]


def device_of(name: str) -> torch.device:
    """The device of an option; ``auto`` is a GPU that has 2:4 products."""
    gpu = torch.device("cuda")
    why = obstacle(gpu) if torch.cuda.is_available() else "torch sees no CUDA device here"
    if why and name == "cuda":
        raise ConfigError(f"--device cuda: {why}")
    return torch.device("cpu") if why or name == "cpu" else gpu


def benchmark(
    models: Sequence[str], sparsity: Sequence[Pattern], tokens: Sequence[tuple[int, int]],
    precisions: Sequence[str] | None, arms: Sequence[str], device: str, threads: int | None, rounds: int,
) -> Benchmark:  # fmt: skip
    torch.set_num_threads(threads or torch.get_num_threads())
    place = device_of(device)
    every = chosen(arms, sparsity, precisions, place)

    def cases() -> Iterator[Case]:
        for name in models:
            for size in tokens:
                torch.manual_seed(0)
                model, x = network(name, size)
                yield case(name, size, model.to(place), x.to(place), every)

    clock = harness.Clock(place)
    return Benchmark(cases(), partial(page, clock=clock), clock, rounds, compared)


def page(rows: list[Row], clock: harness.Clock) -> str:
    """What is printed: times by precision, and how many times as fast packed is."""
    lines, over = list[Row](), list[Row]()
    for row in rows:
        if row["model"] in IMAGE_SIDES:
            size = f"{row['sequences'] * row['tokens']} images"
        else:
            size = f"{row['sequences']} x {row['tokens']} tokens"
        arm = f"{row['arm'].replace('_', ', ')} {row['pattern']}".strip()
        line = f"{row['model']}, {size}: {arm}"
        lines.append({**row, "network": line})
        for base in PRECISIONS:
            if row["pattern"] and f"over_{base}" in row and "wrong" not in row:
                text = f"{harness.spread(row, f'over_{base}')} {row[f'over_{base}_by']}"
                where = f"{line} in {row['precision']}"
                over.append({"network": where, "over": f"best {base}", "text": text})
    parts = [
        f"Forward passes: milliseconds, median of paired rounds, n = {harness.samples(rows)}; {clock.name}. "
        "Packed: layers that are, bytes of the model over dense float32, and how far off the outputs are.",
        harness.grid(lines, "network", "precision", _cell),
    ]
    if over:
        parts += [
            "How many times as fast packed is as the fastest dense arm of each precision, median [quartiles] of pairs:",
            harness.grid(over, "network", "over", lambda row: row["text"]),
        ]
    versions = {name: version_of(name) for name in ("openvino", "nncf")}
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    return "\n\n".join(parts)


def _cell(row: Row) -> str:
    if not row["pattern"]:
        return f"{row['ms']:.4g}"
    return f"{row['ms']:.4g} ({row['layers']}; {row['bytes']:.0%}; {row['off']:.1g} off)"
