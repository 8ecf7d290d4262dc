"""``nmrun bench train``: a training step of each recipe beside the dense step, by nmrun's own loop, and
by loops of a few lines.

``plain_loop`` trains the dense network, compiled alike, with torch's fused AdamW on one batch that
stays where it is: what a loop of one's own could reach at best. ``masked_loop`` is the same with
masks as most people write them, found by topk in each forward pass. A run is as long as its
measurement, so each recipe goes through its phases by its defaults.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import WARM_UP, Benchmark, Call, Case, Row
from nmrun.lab.bench.options import NETWORKS, PLAIN_LOOPS, composed, random_text
from nmrun.lab.keys.config import Config
from nmrun.lab.render.formats import aligned
from nmrun.lab.train.build import autocast, build, prepare
from nmrun.lab.train.steps import TrainingSteps
from nmrun.patterns import COLUMNS, Pattern
from nmrun.sparsity.select import select


def nmruns_loop(config: Config, steps: int, row: Row) -> Call:
    """Steps of nmrun's training as a function; its figures are put into ``row``."""
    loop = TrainingSteps(config, parts := build(config))
    parts.model.train()
    row["items"] = sum(parts.task.sizes(0, 0, 1))
    if parts.handle.sparse:
        by_products = sum(choice.is_sparse for choice in parts.accelerated)
        row["layers"] = f"{by_products} of {len(parts.handle.sparse)}"

    def stretch() -> None:
        for _ in range(steps):
            loop.train_step(*divmod(loop.step, parts.task.batches_per_epoch), measure_flips=False)
            loop.losses = loop.losses[-1:]  # as if a row was logged

    return stretch


def plain_loop(config: Config, steps: int, row: Row, pattern: Pattern | None = None) -> Call:
    """Steps of a loop of a few lines as a function, with the masks of a pattern or dense."""
    parts = build(config)
    model, task, accumulate = parts.model.train(), parts.task, config.trainer.accumulate
    row["items"] = sum(task.sizes(0, 0, 1))
    if pattern:
        mask(model, pattern, config)
    forward = torch.compile(model, fullgraph=True) if config.trainer.compile else model
    batches = task.micro_batches(0, 0, accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def stretch() -> None:
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")  # which nmrun's loop does not use
        for _ in range(steps):
            for batch in batches:
                with autocast(parts.device, parts.precision):
                    loss = task.loss(forward, batch) / len(batches)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.set_deterministic_debug_mode(mode)

    return stretch


class TopK(nn.Module):
    """The parametrization w -> m * w, whose gradient goes straight through: m keeps the N largest
    magnitudes of every M along a dimension, of V:N:M in the columns that V outputs share."""

    def __init__(self, pattern: Pattern, dim: int) -> None:
        super().__init__()
        self.pattern, self.dim = pattern, dim

    def forward(self, weight: Tensor) -> Tensor:
        v, n, m = self.pattern.v, self.pattern.n, self.pattern.m
        sizes = weight.detach().abs().movedim(self.dim, -1).unflatten(-1, (-1, m))
        if v > 1:
            blocks = sizes.unflatten(0, (-1, v)).sum(1)
            sizes = sizes * largest(blocks, COLUMNS).repeat_interleave(v, 0)
        pruned = weight * largest(sizes, n).flatten(-2).movedim(-1, self.dim)
        return weight + (pruned - weight).detach()


def largest(sizes: Tensor, count: int) -> Tensor:
    """1 for the ``count`` largest of the last dimension, 0 for the others."""
    return torch.zeros_like(sizes).scatter_(-1, sizes.topk(count).indices, 1.0)


def mask(model: nn.Module, pattern: Pattern, config: Config) -> None:
    """Mask the weights that nmrun would make sparse, without nmrun."""
    options = config.model.include, config.model.exclude or ()
    sparse, _ = select(model, pattern, *options, overrides=config.sparsity.overrides)
    for entry in sparse:
        assert entry.pattern
        parametrization = TopK(entry.pattern, entry.dim)
        parametrize.register_parametrization(entry.module, entry.attribute, parametrization)


def loops(
    folder: Path, words: Sequence[str], ratio: Pattern, arms: Sequence[str], steps: int
) -> dict[str, Callable[[Row], Call]]:
    """The loops of some arms, recipes and the plain ones, dense first."""

    def loop(arm: str, row: Row) -> Call:
        recipe = "dense" if arm in PLAIN_LOOPS else arm
        config = composed(folder, [*words, f"recipe={recipe}", f"sparsity='{ratio}'"])
        if arm == "masked_loop":
            return plain_loop(config, steps, row, ratio)
        return (plain_loop if arm in PLAIN_LOOPS else nmruns_loop)(config, steps, row)

    return {arm: partial(loop, arm) for arm in dict.fromkeys(("dense", *arms))}


HEAD = "model", "N:M", "arm", "ms a step", "times as fast", "items/s", "layers by N:M products"


def page(rows: list[Row], clock: harness.Clock) -> str:
    title = (
        f"Training steps: milliseconds {clock.name}, and times as fast as dense. Median [quartiles] of paired "
        f"stretches of {clock.steps} steps, n = {harness.samples(rows)}. Items are tokens or images."
    )
    lines, missing = [], []
    for row in rows:
        name = row["model"], row["sparsity"], row["arm"]
        if "wrong" in row:
            missing.append(f"{name[0]} {name[1]} without {name[2]}: {row['wrong']}")
            continue
        speed = (
            f"{row['ms']:.4g}",
            harness.spread(row, "speedup"),
            f"{row['items_per_second']:,.0f}",
        )
        lines.append([*name, *speed, row.get("layers", "")])
    return "\n\n".join([title, aligned(HEAD, lines), *missing])


def compared(rows: list[Row]) -> None:
    harness.beside_first(rows)
    for row in rows:
        if "ms" in row:
            row["items_per_second"] = row["items"] / row["ms"] * 1e3


def benchmark(
    models: Sequence[str], sparsity: Sequence[Pattern], arms: Sequence[str], steps: int, rounds: int,
    overrides: Sequence[str],
) -> Benchmark:  # fmt: skip
    length = f"trainer.steps={(WARM_UP + 1 + rounds) * steps}"

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            random_text(folder)
            for model in models:
                words = [*NETWORKS[model], length, *overrides]
                for ratio in sparsity:
                    about = {"model": model, "sparsity": str(ratio)}
                    yield Case(about, loops(folder, words, ratio, arms, steps))

    device = prepare(composed(Path(), [*NETWORKS[models[0]], *overrides]))
    clock = harness.Clock(device, steps)
    return Benchmark(cases(), partial(page, clock=clock), clock, rounds, compared)
