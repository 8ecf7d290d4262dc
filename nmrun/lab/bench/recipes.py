"""``nmrun bench recipes``: how much longer a training step takes under each recipe than dense
training, on this machine's CPU.

A step is forward, backward and optimizer step, with the memory layout and the kernel for the update
that runs have. All arms live in one process, start from the same weights and see the same batch. A
ratio is an arm's time over the dense time of the same round.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nmrun import optim
from nmrun.errors import ConfigError
from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import Benchmark, Clock, Row
from nmrun.lab.models import images
from nmrun.lab.train.build import fuse, lay_out
from nmrun.patterns import Pattern
from nmrun.sparsity.select import select
from nmrun.step.sparsify import sparsify

DEVICE = torch.device("cpu")
# milliseconds that a measurement takes at least: several steps of a small model, one of a large one
SHORTEST = 50
WARM_UP = 3  # steps that are not counted: caches, oneDNN's first calls, the switch of STEP and ASP
DECAY = 2e-4  # of SR-STE, as its paper has it


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
    "small_conv": Workload(
        lambda: images.small_conv((1, 8, 8), 10, (32, 64, 64)), (64, 1, 8, 8), ("stem", "head")
    ),
    "resnet18": Workload(
        lambda: images.of_torchvision("resnet18", (3, 32, 32), 10, "auto"),
        (32, 3, 32, 32),
        ("conv1", "fc"),
    ),
    "transformer": Workload(transformer, (8, 128, 512)),
    "tiny": Workload(tiny, (8, 32)),
}


def argsort_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """1 for kept and 0 for pruned along dimension 1, by sorting each group, as the official code of
    SR-STE and STEP does."""
    inputs_last = weight.detach().abs().movedim(1, -1)
    groups = inputs_last.reshape(-1, m)
    pruned = torch.argsort(groups, dim=1)[:, : m - n]
    return torch.ones_like(groups).scatter_(1, pruned, 0).reshape(inputs_last.shape).movedim(-1, 1)


class ArgsortSRSTE(torch.autograd.Function):
    """SR-STE as its official code has it: the mask by argsort in every forward pass, the decay in
    the backward pass.

    After ``Sparse_NHWC`` of github.com/aojunzz/NM-sparsity at a557d6b.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, n: int, m: int, decay: float) -> Tensor:
        mask = argsort_mask(weight, n, m)
        ctx.save_for_backward(weight)
        ctx.mask, ctx.decay = mask, decay
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] + ctx.decay * (1 - ctx.mask) * weight, None, None, None


class ArgsortInForward(nn.Module):
    """The parametrization that puts :class:`ArgsortSRSTE` in front of a weight."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, weight: Tensor) -> Tensor:
        return ArgsortSRSTE.apply(weight, self.pattern.n, self.pattern.m, DECAY)


Attach = Callable[[nn.Module, torch.optim.Optimizer, Pattern, Sequence[str]], Any]


def _recipe(name: str, **arguments: Any) -> Attach:
    return lambda model, optimizer, pattern, exclude: sparsify(
        model, optimizer, name, pattern, exclude=exclude, **arguments
    )


def _argsort(
    model: nn.Module, optimizer: torch.optim.Optimizer, pattern: Pattern, exclude: Sequence[str]
) -> None:
    candidates, _ = select(model, pattern, exclude=exclude)
    if not candidates:
        raise ConfigError(f"no weight of this model can be {pattern} sparse")
    for candidate in candidates:
        parametrize.register_parametrization(
            candidate.module, candidate.attribute, ArgsortInForward(pattern)
        )


# what is done to a model after it was built; all arms have the same optimizer
ARMS: dict[str, Attach] = {
    "dense_again": lambda *_: (
        None
    ),  # nothing: shows how far the ratio of two equal arms strays from one
    "asp": _recipe("asp", prune_at=0.0),
    "ste": _recipe("ste"),
    "sr_ste": _recipe("sr_ste"),
    "step_phase_one": _recipe(
        "step", total_steps=10**9, t_max=1.0
    ),  # samples the variance change, never switches
    "step_phase_two": _recipe(
        "step", total_steps=10**9, switch=1e-9
    ),  # switches after the first step
    "s_ste": _recipe("s_ste"),
    "mdgf_linear": _recipe("mdgf_linear", total_steps=10**9, dense=0.0),  # the middle phase
    "mdgf_exponential": _recipe("mdgf_exponential", total_steps=10**9, dense=0.0),
    "sdgf_stepwise": _recipe("sdgf_stepwise", total_steps=10**9, dense=0.0),
    "sdgf_geometric": _recipe("sdgf_geometric", total_steps=10**9, dense=0.0, frames=2),
    "t_sr_ste": _recipe("t_sr_ste", interval=10**9),  # between two searches for masks
    "t_sr_ste_search": _recipe(
        "t_sr_ste", interval=1
    ),  # with a search in every step; by default it is one of 40
    "bi_mask": _recipe("bi_mask", interval=10**9),  # likewise, one of 100
    "bi_mask_search": _recipe("bi_mask", interval=1),
    "lbc": _recipe("lbc", total_steps=10**9),  # while candidates are left
    "maskllm": _recipe("maskllm", total_steps=10**9, dense=0.0),  # while masks are learned
    "slope": _recipe("slope"),
    "ast": _recipe("ast", total_steps=10**9),  # with a search for masks in one of ten steps
    "cast": _recipe("cast", total_steps=10**9),  # likewise
    "proxsparse": _recipe("proxsparse", total_steps=10**9, dense=0.0),  # while masks are learned
    "sqft": _recipe("sqft"),
    "sr_ste_argsort": _argsort,
}


class RecipeArm:
    """A copy of the model with its optimizer, made sparse by ``attach``. Calling it trains it by
    some steps."""

    def __init__(
        self, model: nn.Module, attach: Attach, pattern: Pattern, exclude: Sequence[str]
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
        self.handle = attach(self.model, self.optimizer, pattern, exclude)
        fuse(self.optimizer, DEVICE)

    def __call__(self, batch: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def measure(
    name: str, pattern: Pattern, recipes: Sequence[str], count: int, omissions: list[str]
) -> list[Row]:
    """A row for each recipe against dense training, in one process; ``omissions`` gets the reasons
    why recipes cannot train this model at this pattern."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model, batch = workload.build().train(), torch.randn(workload.shape)
    lay_out(model, DEVICE, "fp32")
    arms = {"dense": RecipeArm(model, ARMS["dense_again"], pattern, ())}
    cannot: dict[str, list[str]] = {}
    for recipe in recipes:
        try:
            arms[recipe] = RecipeArm(model, ARMS[recipe], pattern, workload.exclude)
        except ValueError as error:
            cannot.setdefault(str(error), []).append(recipe)
    omissions += [
        f"{name} {pattern} without {', '.join(names)}: {why}" for why, names in cannot.items()
    ]
    recipes = [recipe for recipe in recipes if recipe in arms]
    if cannot and set(recipes) <= {"dense_again"}:
        return []
    clock = Clock(DEVICE)
    for _ in range(WARM_UP):
        once = [clock(partial(arm, batch, 1)) for arm in arms.values()]
    steps = math.ceil(SHORTEST / min(once))
    several = {recipe: partial(arm, batch, steps) for recipe, arm in arms.items()}
    times = harness.rounds(several, count, clock, warm_up=0)
    times = {recipe: [ms / steps for ms in samples] for recipe, samples in times.items()}
    dense, about = times["dense"], {"model": name, "pattern": str(pattern)}
    return [
        {
            **about, "recipe": recipe, "n": len(dense), **harness.quartiles("ms", times[recipe]), **harness.quartiles("dense_ms", dense),
            **harness.quartiles("ratio", harness.ratios(times[recipe], dense)),
        }
        for recipe in recipes
    ]  # fmt: skip


def benchmark(
    models: Sequence[str], sparsity: Sequence[Pattern], recipes: Sequence[str], rounds: int
) -> Benchmark:
    omissions: list[str] = []

    def cases() -> Iterator[list[Row]]:
        for name in models:
            for pattern in sparsity:
                harness.note(f"{name} {pattern}")
                yield measure(name, pattern, recipes, rounds, omissions)

    def page(rows: list[Row]) -> str:
        title = (
            "Time of a training step over the dense step, float32, AdamW: median [quartiles] of paired"
            f" rounds, n = {harness.samples(rows)}."
        )
        cells = [{**row, "step of": f"{row['model']} {row['pattern']}"} for row in rows]
        dense = {row["step of"]: row for row in cells}.values()
        lines = [{**row, "recipe": "dense"} for row in dense] + cells
        text = harness.grid(
            lines,
            "recipe",
            "step of",
            lambda row: (
                f"{row['dense_ms']:.3g} ms"
                if row["recipe"] == "dense"
                else harness.spread(row, "ratio")
            ),
        )
        return f"{title}\n\n{text}"

    return Benchmark(cases(), page, DEVICE, omissions=omissions)
