"""``nmrun bench infer``: forward passes of networks, dense by whatever is installed and with N:M weights
by ``nmrun.deploy``, in the precisions that this machine multiplies.

Weights are random. Dense arms are torch as it is, torch compiled (on a GPU into CUDA graphs), and on a
CPU ``onednn`` (torch's oneDNN products and convolutions of reordered weights, convolutions between
channels last; in int8 its dynamically quantised linear layers), ONNX Runtime and OpenVINO
(:mod:`~nmrun.lab.bench.peers`). A ``packed`` arm has the weights pruned by magnitude;
``packed_compiled`` is compiled as well.

All arms of a network and size take turns in one process. Times on a GPU are between two events and
have in them what the host takes to launch; on a CPU they are those of the wall, with one
thread the CPU time of the process, threads of runtimes among it.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nmrun.errors import ConfigError, extra
from nmrun.fast import acceleration
from nmrun.fast.cpu.dense_int8 import DenseInt8Linear
from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.onednn_copy import OneDNNCopy
from nmrun.fast.deploy import deploy
from nmrun.fast.sites import ConvolutionSite, install, sites, watch
from nmrun.lab.bench import harness, peers
from nmrun.lab.bench.harness import Benchmark, Row, quartiles, ratios, rounds
from nmrun.lab.bench.options import (
    INFERRED,
    INFERRED_RATIOS,
    INFERRED_TOKENS,
    INFERRING,
    INFERRING_ON_GPU,
    PRECISIONS,
    sequences,
)
from nmrun.lab.verbs import quantity
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import nm_mask

PAST = 128  # tokens that a decoder has in its cache
PROMPT = "_prompt"  # behind a decoder's name: no cache, a whole prompt
ATTENTION = "nmrun_causal"  # of a name that transformers makes no masks for
# layers, width, heads
ENCODERS = {
    "transformer": (6, 512, 8),
    "bert_base": (12, 768, 12),
    "bert_large": (24, 1024, 16),
    "tiny": (1, 64, 2),
}
GPT2 = {
    "gpt2": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
}
LLAMA = {"llama_7b_block": (2, 4096, 32)}  # two of the 32 blocks, with the embeddings
IMAGES = {"resnet18": 32, "vit_large": 224}  # pixels of a side


class OneDNN(nn.Module):
    """A dense linear layer by oneDNN.

    Args:
        weight: (outputs, inputs), float32 or bfloat16.
        bias: (outputs,), or None.
        tokens: the number of rows that the weight is reordered for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: int) -> None:
        super().__init__()
        self.bias, self.rows = bias, len(weight)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.weight = reorder(weight.contiguous(), tokens)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return output


class OneDNNConvolution(nn.Module):
    """A dense convolution by oneDNN, its weight reordered for inputs of one shape."""

    def __init__(self, site: ConvolutionSite) -> None:
        super().__init__()
        (shape, *_), w = site.shapes, site.window
        self.bias, self.moves = site.bias, [list(p) for p in (w.padding, w.stride, w.dilation)]
        reorder = torch.ops.mkldnn._reorder_convolution_weight
        self.weight = reorder(site.weight, *self.moves, 1, list(shape))

    def forward(self, x: Tensor) -> Tensor:
        convolve = torch.ops.mkldnn._convolution_pointwise
        x = x.contiguous(memory_format=torch.channels_last)
        output: Tensor = convolve(x, self.weight, self.bias, *self.moves, 1, "none", [], "")
        return output


class Past(nn.Module):
    """The keys and values of tokens that a decoder has seen, all zero."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)


class Decoder(nn.Module):
    """A language model of transformers, random weights.

    Args:
        name: of ``GPT2`` or ``LLAMA``.
        sequences: how many it has in its cache, each of PAST tokens; None for a prompt, without a
            cache, of which the last token alone goes through the head.
    """

    def __init__(self, name: str, sequences: int | None) -> None:
        super().__init__()
        try:
            from transformers import (
                AttentionInterface,
                AutoModelForCausalLM,
                DynamicCache,
                GPT2Config,
                LlamaConfig,
            )
            from transformers.cache_utils import DynamicLayer
            from transformers.integrations.sdpa_attention import sdpa_attention_forward
        except ImportError:
            raise ConfigError(f"{name} needs transformers: {extra('transformers')}") from None
        layers, width, heads = (GPT2 | LLAMA)[name]
        config: Any
        if name in LLAMA:
            config = LlamaConfig(
                num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads
            )
        else:
            config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
        # transformers makes a mask for attention of its own names when it is compiled, and with a
        # mask there is no flash attention
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        self.cache, self.cache_layer = DynamicCache, DynamicLayer  # no import in a compiled pass
        self.past: Past | None = None
        if sequences is not None:
            self.past = Past((layers, sequences, heads, PAST, width // heads))

    def forward(self, x: Tensor) -> Tensor:
        if self.past is None:
            last: Tensor = self.model(x, use_cache=False, logits_to_keep=1).logits
            return last
        cache: Any = self.cache()
        for keys, values in zip(self.past.keys, self.past.values, strict=True):
            layer: Any = self.cache_layer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        output: Tensor = self.model(x, past_key_values=cache).logits
        return output


def network(name: str, size: tuple[int, int]) -> nn.Module:
    """A network of ``options.INFERRED_NETWORKS`` for inputs of a size, random weights."""
    if (decoder := name.removesuffix(PROMPT)) in GPT2 | LLAMA:
        return Decoder(decoder, None if name.endswith(PROMPT) else size[0] * size[1]).eval()
    if name == "vit_large":
        from torchvision import models

        model = models.vit_l_16(num_classes=1000)
        nn.init.normal_(model.heads.head.weight)  # 0 in the beginning
        return model.eval()
    if name in IMAGES:
        from nmrun.lab.models import images

        return images.of_torchvision(name, (3, IMAGES[name], IMAGES[name]), 10, "auto").eval()
    layers, width, heads = ENCODERS[name]
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def example(name: str, size: tuple[int, int]) -> Tensor:
    """Sequences of so many tokens; for a decoder with a cache of one new token each, as many as
    tokens and sequences, and as many images."""
    sequences, tokens = size
    if (decoder := name.removesuffix(PROMPT)) in GPT2 | LLAMA:
        shape = size if name.endswith(PROMPT) else (sequences * tokens, 1)
        return torch.randint(50257 if decoder in GPT2 else 32000, shape)
    if name in IMAGES:
        return torch.randn(sequences * tokens, 3, IMAGES[name], IMAGES[name])
    return torch.randn(*size, ENCODERS[name][1])


@torch.no_grad()
def prune(model: nn.Module, pattern: Pattern) -> None:
    """Every weight that a packed layer could hold, by magnitude."""
    for module_sites in sites(model)[0].values():
        for site in module_sites:
            site.weight.mul_(nm_mask(site.weight.contiguous(), pattern, 1, pad=True))


@torch.no_grad()
def by_onednn(model: nn.Module, x: Tensor, precision: str) -> nn.Module:
    """Let the linear layers and convolutions of a copy of a model go by oneDNN.

    Args:
        model: the model.
        x: an input of the size that is measured.
        precision: the model's, or int8 for the linear layers, quantised in the call.
    """
    twin = copy.deepcopy(model)
    by_module, _ = sites(twin)
    watch(twin, by_module, x)
    for module, module_sites in by_module.items():
        for site in module_sites:
            if isinstance(site, ConvolutionSite):
                site.layer = OneDNNConvolution(site)
            elif precision == peers.INT8:
                site.layer = DenseInt8Linear.of(site.weight, site.bias)
            else:
                (tokens, _), *_ = site.shapes
                site.layer = OneDNN(site.weight, site.bias, tokens)
        install(twin, module, module_sites)
    return twin


@torch.no_grad()
def measure(
    name: str,
    patterns: Sequence[Pattern],
    size: tuple[int, int],
    precisions: Sequence[str],
    names: Sequence[str],
    count: int,
    device: torch.device,
) -> list[Row]:
    """Measure one network at one size.

    Args:
        name: of the network, of ``options.INFERRED_NETWORKS``.
        patterns: of all linear layers and convolutions, each packed by itself.
        size: of the input, see :func:`example`.
        precisions: of ``options.PRECISIONS``.
        names: of arms, of ``options.INFERRING``.
        count: rounds.

    Returns:
        A row for each arm, precision and pattern, and one for each runtime that is missing.
    """
    torch.manual_seed(0)
    counters.clear()
    with device:
        model, x = network(name, size), example(name, size)
    low = copy.deepcopy(model).bfloat16() if peers.BF16 in precisions else model
    runtime_calls, missing = peers.arms(
        [n for n in names if n in peers.RUNTIMES], model, x, precisions
    )
    calls: dict[Arm, Callable[[], Tensor]] = {
        (precision, arm, ""): partial(call, x) for (precision, arm), call in runtime_calls.items()
    }
    if "torch" in names:
        if peers.FLOAT32 in precisions or device.type == "cpu":
            calls[peers.FLOAT32, "torch", ""] = partial(model, x)
        if peers.BF16 in precisions:
            calls[peers.BF16, "torch", ""] = partial(low, peers.cast(x, peers.BF16))
    for precision in precisions if "onednn" in names and device.type == "cpu" else ():
        own = low if precision == peers.BF16 else model
        inputs = peers.cast(x, precision)
        calls[precision, "onednn", ""] = partial(by_onednn(own, inputs, precision), inputs)
    expected = {"": model(x)}
    about: dict[Arm, Row] = {}
    packed = [name for name in names if name.startswith("packed")]
    for pattern in patterns if packed else ():
        pruned = copy.deepcopy(model)
        prune(pruned, pattern)
        expected[str(pattern)] = pruned(x)
        for precision in precisions:
            inputs = peers.cast(x, precision)
            for kind in packed:
                own = copy.deepcopy(pruned)
                own = own.bfloat16() if precision == peers.BF16 else own
                arm = precision, kind, str(pattern)
                compiled = kind == "packed_compiled"
                with harness.spared(missing, " ".join(arm), RuntimeError):  # a graph may raise it
                    choices = deploy(
                        *(own, inputs, "int8" if precision == peers.INT8 else None),
                        compile=compiled,
                    )
                    weights = [choice for choice in choices if not choice.always_dense]
                    calls[arm] = (
                        partial(peers.by_layers, own, inputs) if compiled else partial(own, inputs)
                    )
                    about[arm] = {
                        "layers": f"{sum(c.is_sparse for c in weights)} of {len(weights)}",
                        "bytes": model_bytes(own) / model_bytes(model),
                    }
    told = {word for name in missing for word in name.split()}
    for kind in names:
        if kind not in told | {arm for _, arm, _ in calls}:
            missing[kind] = f"it has no products of {' or '.join(precisions)}"
    errors: dict[Arm, float] = {}
    for arm in sorted(calls, key=_order):
        # the compiler may raise it, or a graph
        with harness.spared(missing, " ".join(filter(None, arm)), RuntimeError):
            off = _relative_error(calls[arm](), expected[arm[2]])
            calls[arm]()  # the first pass compiles, the second captures a graph
            errors[arm] = off
    times = rounds({arm: calls[arm] for arm in errors}, count, _clock(device), warm_up=1)
    if device.type == "cuda":
        skipped, breaks = counters["inductor"]["cudagraph_skips"], len(counters["graph_break"])
        if skipped or breaks:
            why = f"{skipped} graphs not captured, {breaks} kinds of breaks: they wait for the host"
            missing["compiled passes"] = why
    right = [arm for arm in times if not arm[2] and errors[arm] <= TOLERANCES[arm[0]]]
    best = {
        precision: min(dense, key=lambda arm: statistics.median(times[arm]))
        for precision in precisions
        if (dense := [arm for arm in right if arm[0] == precision])
    }
    rows = []
    (sequences, tokens), numbers = size, peers.versions()
    shared = {"model": name, "sequences": sequences, "tokens": tokens}
    for arm, samples in times.items():
        precision, kind, ratio = arm
        row: Row = {**shared, "precision": precision, "arm": kind, "pattern": ratio}
        row |= {
            "n": len(samples),
            **quartiles("ms", samples),
            "off": errors[arm],
            **about.get(arm, {}),
        }
        row |= {"version": numbers[kind]} if kind in numbers else {}
        if not errors[arm] <= TOLERANCES[precision]:
            row["wrong"] = "WRONG results"
        over = {"torch": (peers.FLOAT32, "torch", "")} | best
        for base, other in over.items():
            if other in times:
                row |= quartiles(f"over_{base}", ratios(times[other], samples))
                row[f"over_{base}_by"] = other[1]
        rows.append(row)
    return rows + [{**shared, "arm": runtime, "missing": why} for runtime, why in missing.items()]


Arm = tuple[str, str, str]  # precision, kind, pattern
# how far off the outputs of an arm may be, as a share of their norm
TOLERANCES = {peers.FLOAT32: 1e-3, peers.BF16: 0.05, peers.INT8: 0.2}


def _order(arm: Arm) -> tuple[int, int]:
    return INFERRING.index(arm[1]), PRECISIONS.index(arm[0])


def _relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output.float() - expected).norm() / expected.norm())


def _clock(device: torch.device) -> harness.Clock:
    """On a CPU with one thread it counts whatever thread of the process computes."""
    if device.type == "cuda":
        return harness.Clock(device, flush=False)
    clock = harness.cpu_clock()
    if torch.get_num_threads() == 1:
        clock.now = time.process_time
    return clock


def size_text(row: Row) -> str:
    """``8 x 128 tokens``, ``64 images``."""
    if row["model"] in IMAGES:
        return f"{row['sequences'] * row['tokens']} images"
    return (
        f"{row['sequences']} x {row['tokens']} tokens"
        if row["sequences"] > 1
        else f"{row['tokens']} tokens"
    )


def model_bytes(model: nn.Module) -> int:
    """What a model's weights and buffers take, with oneDNN's copies, without what a decoder has seen."""
    seen = [b for module in model.modules() if isinstance(module, Past) for b in module.buffers()]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    sources = [m.source() for m in model.modules() if isinstance(m, OneDNNCopy)]
    held += sum(t.nbytes for t in sources if t is not None)
    return held - sum(t.nbytes for t in seen)


def benchmark(
    models: Sequence[str] | None, sparsity: Sequence[Pattern] | None, tokens: Sequence[tuple[int, int]] | None,
    precisions: Sequence[str] | None, arms: Sequence[str] | None, threads: int | None, rounds: int, device: str,
) -> Benchmark:  # fmt: skip
    if threads is not None:
        torch.set_num_threads(threads)
    place = harness.device_of(device)
    if device == "auto" and acceleration.obstacle(place):
        place = torch.device("cpu")
    if on_gpu := place.type == "cuda":
        harness.needs_products(place)
    possible = INFERRING_ON_GPU if on_gpu else INFERRING
    if impossible := [arm for arm in arms or () if arm not in possible]:
        raise ConfigError(f"--arms {impossible[0]}: on a GPU there are {', '.join(possible)}")
    supported = dict.fromkeys(PRECISIONS, not on_gpu)
    supported[peers.BF16] = on_gpu or peers.has_bf16()
    supported[peers.INT8] &= not int8.KERNELS.obstacle()
    if unsupported := [p for p in precisions or () if not supported[p]]:
        why = (
            "2:4 products on a GPU are bf16"
            if on_gpu
            else "this processor has no instructions for it"
        )
        raise ConfigError(f"--precisions {unsupported[0]}: {why}")
    precisions = precisions or [p for p in PRECISIONS if supported[p]]
    arms = arms or [arm for arm in possible if on_gpu or arm != "packed_compiled"]
    patterns = sparsity or [*map(Pattern.parse, INFERRED_RATIOS[place.type])]
    tokens = tokens or [*map(sequences, INFERRED_TOKENS[place.type])]
    omissions: list[str] = []

    def cases() -> Iterator[list[Row]]:
        for name in models or INFERRED[place.type]:
            for size in tokens:
                harness.note(f"{name}, {size[0]} x {size[1]}")
                try:
                    rows = measure(name, patterns, size, precisions, arms, rounds, place)
                    if any("ms" in row for row in rows):
                        yield rows
                    else:
                        omissions.extend(f"{name}, {row['arm']}: {row['missing']}" for row in rows)
                except torch.OutOfMemoryError:
                    yield [{"arm": f"{name}, {size[0]} x {size[1]}", "missing": harness.NO_MEMORY}]
                torch.compiler.reset()  # the compiler keeps what it compiled
                gc.collect()
                torch.cuda.empty_cache()

    variant = "" if on_gpu else f"_{torch.get_num_threads()}_threads"
    return Benchmark(cases(), partial(page, device=place), place, variant, omissions)


def page(rows: list[Row], device: torch.device) -> str:
    """What is printed: times by precision, and how many times as fast packed is."""
    measured = [row for row in rows if "missing" not in row]
    lines, over = list[Row](), list[Row]()
    for row in measured:
        network = f"{row['model']}, {size_text(row)}"
        arm = f"{row['arm'].replace('_', ', ')} {row['pattern']}".strip()
        lines.append({**row, "network": f"{network}: {arm}"})
        if row["pattern"]:
            line = f"{network}: {row['pattern']} in {row['precision']}"
            line += ", compiled" if row["arm"] == "packed_compiled" else ""
            over += [
                {**row, "network": line, "over": _title(base), "base": f"over_{base}"}
                for base in ("torch", *PRECISIONS)
                if f"over_{base}" in row
            ]
    threads = torch.get_num_threads()
    clock = f"{harness.cpu_clock_name()}, {quantity(threads, 'thread')}"
    if device.type == "cuda":
        clock = "between two events of the GPU"
    parts = [
        f"Forward passes: milliseconds, median of paired rounds, n = {harness.samples(rows)}; {clock}. "
        "Packed: layers that are, bytes of the model over dense float32, and how far off the outputs are.",
        harness.grid(lines, "network", "precision", _cell),
    ]
    if over:
        parts += [
            "How many times as fast packed is as torch's own float32 and as the fastest dense arm of each precision, median [quartiles] of pairs:",
            harness.grid(
                over,
                "network",
                "over",
                lambda row: f"{harness.spread(row, row['base'])} {row[row['base'] + '_by']}",
            ),
        ]
    missing = dict.fromkeys(f"{r['arm']}: {r['missing']}" for r in rows if "missing" in r)
    versions = ", ".join(f"{name} {number}" for name, number in peers.versions().items())
    return "\n\n".join([*parts, *missing, *([versions] if versions else [])])


def _title(base: str) -> str:
    return "torch float32" if base == "torch" else f"best {base}"


def _cell(row: Row) -> str:
    if not row["pattern"]:
        return f"{row['ms']:.4g}"
    return f"{row['ms']:.4g} ({row['layers']}; {row['bytes']:.0%}; {row['off']:.1g} off)"
