"""``nmrun bench infer`` on a CPU: forward passes of networks with N:M weights, dense by torch, dense
by oneDNN, and packed, by tokens or images.

Weights are random, float32 and pruned by magnitude in all arms: ``torch`` multiplies their zeros as
the network does by itself, ``onednn`` by torch's oneDNN products and convolutions of reordered
weights, convolutions between channels last, ``packed`` is what ``nmrun.deploy`` makes of it. Times
are those of the wall, with one thread its CPU time.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.fast.deploy import deploy
from nmrun.fast.sites import ConvolutionSite, install, sites, watch
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Row, rounds, speedup
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import nm_mask

PAST = 128  # tokens that a decoder has in its cache
# layers, width, heads
ENCODERS = {"transformer": (6, 512, 8), "bert_base": (12, 768, 12), "tiny": (1, 64, 2)}
IMAGES = ("resnet18",)
GPT2 = ("gpt2", "gpt2_prompt")


class OneDNN(nn.Module):
    """A dense linear layer by oneDNN.

    Args:
        weight: (outputs, inputs), float32.
        bias: (outputs,), or None.
        tokens: the number of rows that the weight is reordered for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: int) -> None:
        super().__init__()
        self.bias, self.rows = bias, len(weight)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.weight = reorder(weight.contiguous(), tokens)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return made


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
        made: Tensor = convolve(x, self.weight, self.bias, *self.moves, 1, "none", [], "")
        return made


class Decoder(nn.Module):
    """GPT-2 (124M), random weights.

    Args:
        past: how many tokens it has in its cache; None for a prompt, without a cache, of which the
            last token alone goes through the head.
        sizes: others than GPT-2's, by the names of transformers' ``GPT2Config``.
    """

    def __init__(self, past: int | None, **sizes: Any) -> None:
        super().__init__()
        self.past = past
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError:
            raise ConfigError(
                "gpt2 needs transformers: pip install 'nmrun[transformers]'"
            ) from None
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        if self.past is None:
            last: Tensor = self.gpt(x, use_cache=False, logits_to_keep=1).logits
            return last
        from transformers import DynamicCache

        cache, config = DynamicCache(), self.gpt.config
        shape = (len(x), config.n_head, self.past, config.n_embd // config.n_head)
        for layer in range(config.n_layer):
            cache.update(torch.zeros(shape), torch.zeros(shape), layer)
        made: Tensor = self.gpt(x, past_key_values=cache).logits
        return made


def network(name: str) -> nn.Module:
    """A network of ``options.CPU_NETWORKS``, random weights."""
    if name in GPT2:
        return Decoder(PAST if name == "gpt2" else None).eval()
    if name in IMAGES:
        from nmrun.lab.models import torchvision_models

        return torchvision_models.build(name, (3, 32, 32), 10).eval()
    layers, width, heads = ENCODERS[name]
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def example(name: str, tokens: int) -> Tensor:
    """One sequence for an encoder and for a prompt, one token each of so many sequences for a
    decoder, so many images of 32x32."""
    if name in GPT2:
        return torch.randint(50257, (tokens, 1) if name == "gpt2" else (1, tokens))
    if name in IMAGES:
        return torch.randn(tokens, 3, 32, 32)
    return torch.randn(1, tokens, ENCODERS[name][1])


@torch.no_grad()
def prune(model: nn.Module, pattern: Pattern) -> None:
    """Every weight that a packed layer could hold, by magnitude."""
    for held in sites(model)[0].values():
        for site in held:
            site.weight.mul_(nm_mask(site.weight.contiguous(), pattern, 1, pad=True))


@torch.no_grad()
def by_onednn(model: nn.Module, x: Tensor) -> nn.Module:
    """Let the linear layers and convolutions of a copy of a model go by oneDNN.

    Args:
        model: the model.
        x: an input of the size that is measured.
    """
    twin = copy.deepcopy(model)
    found, _ = sites(twin)
    watch(twin, found, x)
    for module, held in found.items():
        for site in held:
            if isinstance(site, ConvolutionSite):
                site.layer = OneDNNConvolution(site)
            else:
                (tokens, _), *_ = site.shapes
                site.layer = OneDNN(site.weight, site.bias, tokens)
        install(twin, module, held)
    return twin


@torch.no_grad()
def measure(name: str, pattern: Pattern, tokens: int, count: int) -> list[Row]:
    """Measure one network at one size.

    Args:
        name: of the network, of ``options.CPU_NETWORKS``.
        pattern: of all linear layers.
        tokens: of a sequence; for a decoder sequences of one new token each.
        count: rounds.

    Returns:
        A row for each arm.
    """
    torch.manual_seed(0)
    model, x = network(name), example(name, tokens)
    prune(model, pattern)
    packed = copy.deepcopy(model)
    choices = deploy(packed, x)
    arms = {"torch": model, "onednn": by_onednn(model, x), "packed": packed}
    about = {"model": name, "pattern": str(pattern), "tokens": tokens}
    expected, wrong = model(x), dict[str, str]()
    for arm, made in arms.items():
        if not torch.allclose(made(x), expected, rtol=1e-3, atol=1e-3):
            wrong[arm] = "WRONG results"
    calls: dict[str, Callable[[], object]] = {arm: partial(net, x) for arm, net in arms.items()}
    times = rounds(calls, count, harness.cpu_clock())
    best = min(("torch", "onednn"), key=lambda arm: sum(times[arm]))
    rows = []
    for arm, taken in times.items():
        row: Row = {**about, "arm": arm, **speedup(taken, times["torch"])}
        if arm in wrong:
            row["wrong"] = wrong[arm]
        over = speedup(taken, times[best])
        row |= {k.replace("up", "up_over_best"): v for k, v in over.items() if "speedup" in k}
        row["best"] = best
        row["bytes"] = held_bytes(arms[arm]) if arm != "onednn" else None
        rows.append(row)
    rows[-1]["layers"] = f"{sum(c.is_sparse for c in choices)} of {len(choices)}"
    return rows


def _unit(name: str) -> str:
    return "images" if name in IMAGES else "tokens"


def held_bytes(model: nn.Module) -> int:
    """What a model's weights and buffers take."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def main(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run ``nmrun bench infer`` on a CPU."""
    device = harness.device_of(options)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    threads = torch.get_num_threads()

    def cases() -> Iterator[list[Row]]:
        for name in options.models:
            for pattern in options.patterns:
                for tokens in options.tokens:
                    harness.note(f"{name}, {pattern}, {tokens} {_unit(name)}")
                    yield measure(name, pattern, tokens, options.rounds)

    def page(rows: list[Row]) -> str:
        title = (
            "Forward passes, float32, N:M in all layers: milliseconds, and how many times as fast as dense, median [quartiles] of paired"
            f" rounds, n = {options.rounds}; {harness.cpu_clock_name()}, {threads} threads. Packed: over torch; over the better dense;"
            " bytes of the model over dense."
        )
        shown = [
            {**r, "network": f"{r['model']} {r['pattern']}, {r['tokens']} {_unit(r['model'])}"}
            for r in rows
        ]
        size = {row["network"]: row["bytes"] for row in shown if row["arm"] == "torch"}

        def cell(row: Row) -> str:
            if row["arm"] != "packed":
                return f"{row['ms']:.4g} ms"
            over = (harness.spread(row, key) for key in ("speedup", "speedup_over_best"))
            return (
                f"{row['ms']:.4g} ms; {'; '.join(over)}; {row['bytes'] / size[row['network']]:.0%}"
            )

        return f"{title}\n\n{harness.grid(shown, 'network', 'arm', cell)}"

    try:
        harness.run("infer", cases(), page, options, argv, device, f"_{threads}_threads")
    finally:
        torch.set_num_threads(before)
    return 0
