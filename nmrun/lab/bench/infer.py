"""``nmrun bench infer``: forward passes of networks, dense by torch, ``torch.compile`` and OpenVINO,
and with N:M weights by ``nmrun.deploy``, in the precisions that this machine multiplies.

Weights are random. A ``packed`` arm has them pruned by magnitude; ``packed_compiled`` is compiled as
well."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.onednn import OneDNNCopy
from nmrun.fast.deploy import deploy
from nmrun.fast.gpu.probe import obstacle
from nmrun.fast.sites import sites
from nmrun.lab.bench import harness, peers
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row, quartiles, ratios
from nmrun.lab.bench.networks import ENCODERS, IMAGE_SIDES
from nmrun.lab.bench.options import PRECISIONS
from nmrun.lab.bench.peers import BF16, FLOAT32, INT8
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import nm_mask

Arm = tuple[str, str, str]  # precision, kind, pattern
CPU_RATIOS = "2:4", "1:8"
# the largest error of an arm's outputs, as a share of their norm
TOLERANCES = {FLOAT32: 1e-3, BF16: 0.05, INT8: 0.2}


def network(name: str, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """A network of ``networks.INFERRED`` with random weights, and an input: sequences of so many
    tokens, or as many images as these have in all."""
    if name == "vit_large":
        from torchvision import models

        model = models.vit_l_16(num_classes=1000)
        nn.init.normal_(model.heads.head.weight)  # 0 in the beginning
    elif name in IMAGE_SIDES:
        from nmrun.lab.models import images

        model = images.of_torchvision(name, (3, IMAGE_SIDES[name], IMAGE_SIDES[name]), 10, "auto")
    else:
        layers, width, heads = ENCODERS[name]
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return model.eval(), torch.randn(*size, width)
    model.to(memory_format=torch.channels_last)  # torch's faster layout
    return model.eval(), torch.randn(size[0] * size[1], 3, IMAGE_SIDES[name], IMAGE_SIDES[name])


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


class Arms:
    """The arms of one network: what each computes, how far off it is, and how large.

    Args:
        model: in float32 and evaluation.
        x: an input of the size that is measured.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.off: dict[Arm, float] = {}
        self.about: dict[Arm, Row] = {}

    @torch.no_grad()
    def make(self, arm: Arm) -> Call:
        precision, kind, pattern = arm
        x, model = peers.cast(self.x, precision), self.model
        call: Call
        if kind == "openvino":
            call = partial(peers.openvino(model, self.x, precision), self.x)
        elif kind == "compiled":
            call = partial(peers.compiled(model, self.x, precision), self.x)
        elif kind == "torch":
            call = partial(peers.in_precision(model, precision), x)
        else:
            model = prune(model, Pattern.parse(pattern))
            call = self._packed(arm, model, x)
        result: Any = call()
        expected = model(self.x)
        self.off[arm] = float((result.float() - expected).norm() / expected.norm())
        return torch.no_grad()(call)

    def _packed(self, arm: Arm, pruned: nn.Module, x: Tensor) -> Call:
        precision, kind, _ = arm
        own = copy.deepcopy(peers.in_precision(pruned, precision))
        compiled = kind == "packed_compiled"
        choices = deploy(own, x, "int8" if precision == INT8 else None, compile=compiled)
        weights = [choice for choice in choices if not choice.always_dense]
        self.about[arm] = {
            "layers": f"{sum(c.is_sparse for c in weights)} of {len(weights)}",
            "bytes": model_bytes(own) / model_bytes(self.model),
        }
        return partial(peers.by_layers, own, x) if compiled else partial(own, x)

    def rows(
        self, about: Row, times: Mapping[Arm, list[float]], wrong: Mapping[Arm, str]
    ) -> list[Row]:
        """A row for each arm: its times, and how many times as fast as the fastest right dense arm of
        each precision."""
        dense = [arm for arm in times if not arm[2] and self.off[arm] <= TOLERANCES[arm[0]]]
        over: dict[str, Arm] = {}
        for precision in PRECISIONS:
            if own := [arm for arm in dense if arm[0] == precision]:
                over[precision] = min(own, key=lambda arm: statistics.median(times[arm]))
        rows = []
        for arm, samples in times.items():
            row: Row = {**about, **names(arm), "n": len(samples), **quartiles("ms", samples)}
            row |= {"off": self.off[arm], **self.about.get(arm, {})}
            if not self.off[arm] <= TOLERANCES[arm[0]]:
                row["wrong"] = "WRONG results"
            for base, other in over.items():
                row |= quartiles(f"over_{base}", ratios(times[other], samples))
                row[f"over_{base}_by"] = other[1]
            rows.append(row)
        return rows + [{**about, **names(arm), "wrong": why} for arm, why in wrong.items()]


def names(arm: Arm) -> Row:
    return dict(zip(("precision", "arm", "pattern"), arm, strict=True))


def case(
    name: str, size: tuple[int, int], model: nn.Module, x: Tensor, arms: Sequence[Arm]
) -> Case:
    """The comparison of some arms of a network, torch's own first: in float32, on a GPU in bf16."""
    own, base = Arms(model, x), (BF16 if x.is_cuda else FLOAT32, "torch", "")
    about = {"model": name, "sequences": size[0], "tokens": size[1]}
    made = {arm: partial(own.make, arm) for arm in dict.fromkeys((base, *arms))}
    return Case(f"{name}, {size[0]} x {size[1]}", made, partial(own.rows, about))


def model_bytes(model: nn.Module) -> int:
    """What a model's weights and buffers take, with oneDNN's copies."""
    sources = [m.source() for m in model.modules() if isinstance(m, OneDNNCopy)]
    held = [*model.parameters(), *model.buffers(), *(t for t in sources if t is not None)]
    return sum(t.nbytes for t in held)


def chosen(
    kinds: Sequence[str], patterns: Sequence[Pattern], precisions: Sequence[str] | None,
    device: torch.device,
) -> list[Arm]:  # fmt: skip
    """The arms that this device supports. ConfigError for an unsupported precision, and where no
    arm is left."""
    on_gpu = device.type == "cuda"
    supported = {
        FLOAT32: not on_gpu,
        BF16: on_gpu or peers.has_bf16(),
        INT8: not on_gpu and not int8.KERNELS.obstacle(),
    }
    for precision in precisions or ():
        if not supported[precision]:
            gpu, cpu = "2:4 products on a GPU are bf16", "this processor has no instructions for it"
            raise ConfigError(f"--precisions {precision}: {gpu if on_gpu else cpu}")
    arms: list[Arm] = []
    for kind in kinds:
        for precision in precisions or [p for p in PRECISIONS if supported[p]]:
            if kind.startswith("packed"):
                arms += [(precision, kind, str(pattern)) for pattern in patterns]
            elif not on_gpu if kind == "openvino" else precision != INT8:
                arms.append((precision, kind, ""))
    if not arms:
        raise ConfigError(f"--arms {' '.join(kinds)}: none of them is for these --precisions")
    return arms


def benchmark(
    models: Sequence[str], sparsity: Sequence[Pattern] | None, tokens: Sequence[tuple[int, int]],
    precisions: Sequence[str] | None, arms: Sequence[str], threads: int | None, rounds: int, device: str,
) -> Benchmark:  # fmt: skip
    if threads is not None:
        torch.set_num_threads(threads)
    place = device_of(device)
    ratios = [*map(Pattern.parse, ("2:4",) if place.type == "cuda" else CPU_RATIOS)]
    asked = chosen(arms, sparsity or ratios, precisions, place)

    def cases() -> Iterator[Case]:
        for name in models:
            for size in tokens:
                torch.manual_seed(0)
                model, x = network(name, size)
                yield case(name, size, model.to(place), x.to(place), asked)

    return Benchmark(cases(), partial(page, device=place), place, harness.Clock(place), rounds)


def device_of(name: str) -> torch.device:
    """The device of an option; ``auto`` is a GPU that has 2:4 products."""
    gpu = torch.device("cuda")
    why = obstacle(gpu) if torch.cuda.is_available() else "torch sees no CUDA device here"
    if why and name == "cuda":
        raise ConfigError(f"--device cuda: {why}")
    return torch.device("cpu") if why or name == "cpu" else gpu


# --- the page -------------------------------------------------------------------------------------


def page(rows: list[Row], device: torch.device) -> str:
    """What is printed: times by precision, and how many times as fast packed is."""
    lines, over = list[Row](), list[Row]()
    for row in rows:
        network = f"{row['model']}, {size_text(row)}"
        arm = f"{row['arm'].replace('_', ', ')} {row['pattern']}".strip()
        lines.append({**row, "network": f"{network}: {arm}"})
        if row["pattern"]:
            line = f"{lines[-1]['network']} in {row['precision']}"
            over += [
                {**row, "network": line, "over": f"best {base}", "base": f"over_{base}"}
                for base in PRECISIONS
                if f"over_{base}" in row
            ]
    parts = [
        f"Forward passes: milliseconds, median of paired rounds, n = {harness.samples(rows)}; {harness.clock_name(device)}. "
        "Packed: layers that are, bytes of the model over dense float32, and how far off the outputs are.",
        harness.grid(lines, "network", "precision", _cell),
    ]
    if over:
        parts += [
            "How many times as fast packed is as the fastest dense arm of each precision, median [quartiles] of pairs:",
            harness.grid(
                over,
                "network",
                "over",
                lambda row: f"{harness.spread(row, row['base'])} {row[row['base'] + '_by']}",
            ),
        ]
    if versions := peers.versions():
        parts.append(", ".join(f"{name} {number}" for name, number in versions.items()))
    return "\n\n".join(parts)


def size_text(row: Row) -> str:
    """``8 x 128 tokens``, ``64 images``."""
    if row["model"] in IMAGE_SIDES:
        return f"{row['sequences'] * row['tokens']} images"
    many = f"{row['sequences']} x " if row["sequences"] > 1 else ""
    return f"{many}{row['tokens']} tokens"


def _cell(row: Row) -> str:
    if not row["pattern"]:
        return f"{row['ms']:.4g}"
    return f"{row['ms']:.4g} ({row['layers']}; {row['bytes']:.0%}; {row['off']:.1g} off)"
