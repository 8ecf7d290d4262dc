"""``nmrun bench``: how much longer a training step takes under each recipe than dense training, on this machine's CPU.

A step is forward, backward and optimizer step. All arms live in one process, start from the same weights and see the same
batch; a round runs every arm once in a shuffled order, and a ratio is an arm's time over the dense time of the same
round, so that a machine that grows slower or faster meanwhile does not favour anyone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nmrun import optim
from nmrun.handle import sparsify
from nmrun.models import small_conv, torchvision_models
from nmrun.patterns import Pattern
from nmrun.sparsity.select import select

SHORTEST = 0.05  # seconds a measurement takes at least: several steps of a small model, one of a large one
WARM_UP = 3  # rounds that are not counted: caches, oneDNN's first calls, the switch of STEP and ASP


@dataclass(frozen=True)
class Workload:
    """A model, its input shape (batch first) and the layers that stay dense in every arm."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    exclude: tuple[str, ...] = ()


def transformer() -> nn.Module:
    """Six Transformer encoder layers of width 512, feed-forward width 2048, 8 heads."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def tiny() -> nn.Module:
    """A perceptron to try the benchmark itself with."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


WORKLOADS = {
    "small_conv": Workload(lambda: small_conv.build((1, 8, 8), 10), (64, 1, 8, 8), ("stem", "head")),
    "resnet18": Workload(lambda: torchvision_models.build("resnet18", (3, 32, 32), 10), (32, 3, 32, 32), ("conv1", "fc")),
    "transformer": Workload(transformer, (8, 128, 512)),
    "tiny": Workload(tiny, (8, 32)),
}


class ArgsortSRSTE(torch.autograd.Function):
    """SR-STE as its official code has it: the mask by argsort in every forward pass, the decay in the backward pass.

    After ``Sparse_NHWC`` of github.com/aojunzz/NM-sparsity at a557d6b, for linear layers and convolutions.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, n: int, m: int, decay: float) -> Tensor:
        inputs_last = weight.detach().abs().movedim(1, -1)
        groups = inputs_last.reshape(-1, m)
        pruned = torch.argsort(groups, dim=1)[:, : m - n]
        mask = torch.ones_like(groups).scatter_(1, pruned, 0).reshape(inputs_last.shape).movedim(-1, 1)
        ctx.save_for_backward(weight)
        ctx.mask, ctx.decay = mask, decay
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] + ctx.decay * (1 - ctx.mask) * weight, None, None, None


class ArgsortInForward(nn.Module):
    """The parametrization that puts :class:`ArgsortSRSTE` in front of a weight."""

    def __init__(self, pattern: Pattern, decay: float = 2e-4) -> None:
        super().__init__()
        self.pattern, self.decay = pattern, decay

    def forward(self, weight: Tensor) -> Tensor:
        return ArgsortSRSTE.apply(weight, self.pattern.n, self.pattern.m, self.decay)


Attach = Callable[[nn.Module, torch.optim.Optimizer, Pattern, Sequence[str]], Any]


def _recipe(name: str, **arguments: Any) -> Attach:
    return lambda model, optimizer, pattern, exclude: sparsify(model, optimizer, name, pattern, exclude=exclude, **arguments)


def _argsort(model: nn.Module, optimizer: torch.optim.Optimizer, pattern: Pattern, exclude: Sequence[str]) -> None:
    for chosen in select(model, pattern, exclude=exclude)[0]:
        parametrize.register_parametrization(chosen.module, chosen.attribute, ArgsortInForward(pattern))


# what is done to a model after it was built; all arms have the same optimizer
ARMS: dict[str, Attach] = {
    "dense_again": lambda *_: None,  # nothing: shows how far the ratio of two equal arms strays from one
    "asp": _recipe("asp", prune_at=0.0),
    "ste": _recipe("ste"),
    "sr_ste": _recipe("sr_ste"),
    "step_phase_one": _recipe("step", total_steps=10**9, t_max=1.0),  # samples the variance change, never switches
    "step_phase_two": _recipe("step", total_steps=2, switch=0.5),  # switches after the first step
    "s_ste": _recipe("s_ste"),
    "mdgf_linear": _recipe("mdgf_linear", total_steps=10**9, dense=0.0),  # the middle phase
    "mdgf_exponential": _recipe("mdgf_exponential", total_steps=10**9, dense=0.0),
    "sdgf_stepwise": _recipe("sdgf_stepwise", total_steps=10**9, dense=0.0),
    "sdgf_geometric": _recipe("sdgf_geometric", total_steps=10**9, dense=0.0, frames=2),
    "decay_mask": _recipe("decay_mask", total_steps=10**9, dense=0.0),
    "t_sr_ste": _recipe("t_sr_ste", interval=10**9),  # between two searches for masks
    "t_sr_ste_search": _recipe("t_sr_ste", interval=1),  # with a search in every step; by default it is one of 40
    "bi_mask": _recipe("bi_mask", interval=10**9),  # likewise, one of 100
    "bi_mask_search": _recipe("bi_mask", interval=1),
    "lbc": _recipe("lbc", total_steps=10**9),  # while candidates are left
    "maskllm": _recipe("maskllm", total_steps=10**9, dense=0.0),  # while masks are learned
    "sr_ste_argsort": _argsort,
}


class Arm:
    """One copy of the model with its optimizer, and the training step that is timed."""

    def __init__(self, model: nn.Module, attach: Attach, pattern: Pattern, exclude: Sequence[str]) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
        self.handle = attach(self.model, self.optimizer, pattern, exclude)

    def seconds(self, batch: Tensor, steps: int) -> float:
        """Seconds a step, over ``steps`` steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / steps


@dataclass(frozen=True)
class Row:
    """One arm's time over dense: quartiles of ``n`` per-round ratios, and the median milliseconds of its step."""

    model: str
    pattern: str
    recipe: str
    ratio: float
    q1: float
    q3: float
    n: int
    ms: float
    dense_ms: float


def measure(name: str, pattern: Pattern, recipes: Sequence[str], rounds: int) -> list[Row]:
    """Time ``recipes`` (keys of ``ARMS``) against dense training of the workload ``name``, in one process."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model, batch = workload.build().train(), torch.randn(workload.shape)
    arms = {"dense": Arm(model, ARMS["dense_again"], pattern, ())}
    arms |= {recipe: Arm(model, ARMS[recipe], pattern, workload.exclude) for recipe in recipes}
    for _ in range(WARM_UP):
        once = [arm.seconds(batch, 1) for arm in arms.values()]
    steps = math.ceil(SHORTEST / min(once))
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for arm in shuffled.sample(list(arms), len(arms)):
                times[arm].append(arms[arm].seconds(batch, steps))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    dense = times["dense"]
    rows = []
    for recipe in recipes:
        ratios = [t / d for t, d in zip(times[recipe], dense, strict=True)]
        q1, middle, q3 = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        ms, dense_ms = 1e3 * statistics.median(times[recipe]), 1e3 * statistics.median(dense)
        rows.append(Row(name, str(pattern), recipe, middle, q1, q3, rounds, ms, dense_ms))
    return rows


def hardware() -> dict[str, Any]:
    """Where the numbers come from."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """The ratios as a table, recipes down and model with pattern across."""
    columns = list(dict.fromkeys((row.model, row.pattern) for row in rows))
    cells = {(row.recipe, row.model, row.pattern): row for row in rows}
    lines = [
        "Time of a training step over the dense step: median [quartiles] of per-round ratios.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"n = {rows[0].n} rounds, float32, AdamW.",
        "",
        "| recipe | " + " | ".join(f"{model} {pattern}" for model, pattern in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    dense = {(row.model, row.pattern): row.dense_ms for row in rows}
    lines.append("| dense | " + " | ".join(f"{dense[column]:.3g} ms" for column in columns) + " |")
    for recipe in dict.fromkeys(row.recipe for row in rows):
        ratios = [cells[recipe, *column] for column in columns]
        lines.append(f"| {recipe} | " + " | ".join(f"{r.ratio:.3f} [{r.q1:.3f}, {r.q3:.3f}]" for r in ratios) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """``nmrun bench``: measure, print the table, and with ``--out`` write it as Markdown and JSON."""
    parser = argparse.ArgumentParser(prog="nmrun bench", description=(__doc__ or "").split("\n\n")[0].replace("``", ""))
    names = [name for name in WORKLOADS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=names, help=f"default: {' '.join(names)}")
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:16"], metavar="N:M", help="default: 2:4 1:16")
    parser.add_argument("--recipes", nargs="+", choices=ARMS, default=list(ARMS), help="default: all of them")
    parser.add_argument("--rounds", type=int, default=20, help="ratios a recipe (default: 20)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write recipe_overhead.md and recipe_overhead.json there")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    try:
        patterns = [Pattern.parse(text) for text in options.patterns]
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows: list[Row] = []
    for name in options.models:
        for pattern in patterns:
            print(f"measuring {name} {pattern} ...", file=sys.stderr, flush=True)
            try:
                rows += measure(name, pattern, options.recipes, options.rounds)
            except ValueError as error:
                parser.error(str(error))
            gc.collect()
    machine = hardware()
    table = markdown(rows, machine)
    print(table)
    if options.out:
        (options.out / "recipe_overhead.md").write_text(table + "\n")
        record = {"hardware": machine, "rows": [asdict(row) for row in rows]}
        (options.out / "recipe_overhead.json").write_text(json.dumps(record, indent=2) + "\n")
    return 0
