"""``nmrun bench train``: a training step of each recipe beside the dense step, by nmrun's own loop, and
by loops of a few lines.

``plain_loop`` trains the dense network, compiled alike, with torch's fused AdamW on one batch that
stays where it is: what a loop of one's own could reach at best. ``masked_loop`` is the same with
masks as most people write them, found by topk in each forward pass. A run is as long as its
measurement, so each recipe goes through its phases by its defaults.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nmrun.lab.bench import harness
from nmrun.lab.bench.harness import WARM_UP, Benchmark, Call, Case, Row
from nmrun.lab.bench.networks import NETWORKS, composed, random_text
from nmrun.lab.bench.options import PLAIN_LOOPS
from nmrun.lab.keys.config import Config
from nmrun.lab.render.formats import aligned
from nmrun.lab.train.build import autocast, build, prepare
from nmrun.lab.train.steps import TrainingSteps
from nmrun.patterns import COLUMNS, Pattern
from nmrun.sparsity.select import select


def nmruns_loop(config: Config, steps: int, facts: Row) -> Call:
    """Steps of nmrun's training as a function; its figures are put into ``facts``."""
    loop = TrainingSteps(config, parts := build(config))
    parts.model.train()
    facts["items"] = sum(parts.task.sizes(0, 0, 1))
    if parts.handle.sparse:
        by_products = sum(choice.is_sparse for choice in parts.accelerated)
        facts["layers"] = f"{by_products} of {len(parts.handle.sparse)}"

    def stretch() -> None:
        for _ in range(steps):
            loop.train_step(*divmod(loop.step, parts.task.batches_per_epoch), measure_flips=False)
            loop.losses = loop.losses[-1:]  # as if a row was logged

    return stretch


def plain_loop(config: Config, steps: int, pattern: Pattern | None = None) -> Call:
    """Steps of a loop of a few lines as a function, with the masks of a pattern or dense."""
    parts = build(config)
    model, task, accumulate = parts.model.train(), parts.task, config.trainer.accumulate
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


def case(
    name: str,
    ratio: str,
    loops: Mapping[str, Callable[[Row], Call]],
    steps: int,
) -> Case:
    """The comparison of some loops, dense first, of which a call makes ``steps`` steps; each is
    given a row for its figures."""
    facts: dict[str, Row] = {arm: {} for arm in loops}

    def rows(times: dict[str, list[float]], wrong: dict[str, str]) -> list[Row]:
        each = {arm: [ms / steps for ms in stretches] for arm, stretches in times.items()}
        rows = harness.beside_first({"model": name, "sparsity": ratio}, each, wrong)
        for row in rows:
            row |= facts[row["arm"]]
            if "ms" in row:
                row["items_per_second"] = facts["dense"]["items"] / row["ms"] * 1e3
        return rows

    arms = {arm: partial(make, facts[arm]) for arm, make in loops.items()}
    return Case(f"{name} {ratio}", arms, rows)


def loops(
    folder: Path, words: Sequence[str], ratio: str, arms: Sequence[str], steps: int
) -> dict[str, Callable[[Row], Call]]:
    """The loops of some arms, recipes and the plain ones, dense first."""

    def config(recipe: str) -> Config:
        return composed(folder, [*words, f"recipe={recipe}", f"sparsity='{ratio}'"])

    def loop(arm: str, facts: Row) -> Call:
        if arm not in PLAIN_LOOPS:
            return nmruns_loop(config(arm), steps, facts)
        pattern = Pattern.parse(ratio) if arm == "masked_loop" else None
        return plain_loop(config("dense"), steps, pattern)

    return {arm: partial(loop, arm) for arm in dict.fromkeys(("dense", *arms))}


HEAD = "model", "N:M", "arm", "ms a step", "times as fast", "items/s", "layers by N:M products"


def line(row: Row) -> list[str]:
    return [
        *(row["model"], row["sparsity"], row["arm"], f"{row['ms']:.4g}"),
        *(harness.spread(row, "speedup"), f"{row['items_per_second']:,.0f}", row.get("layers", "")),
    ]


def page(rows: list[Row], steps: int, device: torch.device) -> str:
    title = (
        f"Training steps: milliseconds {harness.clock_name(device)}, and times as fast as dense. Median [quartiles] of paired "
        f"stretches of {steps} steps, n = {harness.samples(rows)}. Items are tokens or images."
    )
    table = aligned(HEAD, [line(row) for row in rows if "ms" in row])
    missing = [
        f"{row['model']} {row['sparsity']} without {row['arm']}: {row['wrong']}"
        for row in rows
        if "wrong" in row
    ]
    return "\n\n".join([title, table, *missing])


def benchmark(
    models: Sequence[str], sparsity: Sequence[str], arms: Sequence[str], steps: int,
    overrides: Sequence[str], rounds: int,
) -> Benchmark:  # fmt: skip
    length = f"trainer.steps={(WARM_UP + 1 + rounds) * steps}"

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory() as folder:
            random_text(Path(folder))
            for name in models:
                words = [*NETWORKS[name], length, *overrides]
                for ratio in sparsity:
                    made = loops(Path(folder), words, ratio, arms, steps)
                    yield case(name, ratio, made, steps)

    with tempfile.TemporaryDirectory() as folder:
        device = prepare(composed(Path(folder), [*NETWORKS[models[0]], *overrides]))
    about = partial(page, steps=steps, device=device)
    return Benchmark(cases(), about, device, harness.Clock(device), rounds)
