"""``nmrun bench train``: whole training steps by nmrun's own loop, dense, masked and accelerated,
and by a bare loop.

Arms of a network share one process and take turns, one stretch of steps each a round: ``dense``, on
a CPU by oneDNN where that is faster, and ``torch``, by torch's default products; the recipe with
``trainer.acceleration=off`` and ``=auto``; ``bare``, the same dense network, compiled alike, with
torch's fused AdamW on one batch that stays where it is: what a loop of one's own could reach at
best. On a GPU a last stretch of each arm is profiled: where a step goes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nmrun.lab.bench import harness, kernel_times
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, rounds, speedup
from nmrun.lab.bench.networks import composed, each, random_text
from nmrun.lab.bench.options import TRAINED, TRAINING_ARMS
from nmrun.lab.keys.config import Config
from nmrun.lab.show.formats import aligned
from nmrun.lab.train.build import autocast, build
from nmrun.lab.train.flops import peak_flops
from nmrun.lab.train.steps import TrainingSteps

OFF = "trainer.acceleration=off"
Prepared = tuple[Callable[[], None], Row]


def ours(config: Config, steps: int) -> Prepared:
    """A stretch of nmrun's training, and what there is to say of it."""
    loop = TrainingSteps(config, parts := build(config))
    loop.model.train()
    items = sum(loop.task.sizes(0, 0, 1))

    def stretch() -> None:
        for _ in range(steps):
            loop.train_step(*divmod(loop.step, loop.task.batches_per_epoch), measure_flips=False)
            # as if a row was logged
            loop.losses, loop.logged_step = loop.losses[-1:], loop.step - 1

    by_products = sum(choice.is_sparse for choice in parts.accelerated)
    about = {
        "items": items,
        "flops": loop.cost.dense,
        "peak": peak_flops(loop.device, loop.precision),
    }
    return stretch, about | (
        {"layers": f"{by_products} of {len(loop.handle.sparse)}"} if loop.handle.sparse else {}
    )


def bare(config: Config, steps: int) -> Prepared:
    """A stretch of a loop of a few lines, and what there is to say of it."""
    parts = build(config)
    model, task, accumulate = parts.model.train(), parts.task, config.trainer.accumulate
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

    return stretch, {}


def measure(
    words: Sequence[str],
    recipe: str,
    ratio: str,
    arms: Sequence[str],
    steps: int,
    count: int,
    device: torch.device,
) -> list[Row]:
    dense, sparse = ("recipe=dense",), (f"recipe={recipe}", f"sparsity='{ratio}'")
    prepared, wrong = dict[str, Prepared](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        random_text(Path(name))
        make = {
            "dense": lambda: ours(composed(Path(name), [*words, *dense]), steps),
            "torch": lambda: ours(composed(Path(name), [*words, *dense, OFF]), steps),
            "masked": lambda: ours(composed(Path(name), [*words, *sparse, OFF]), steps),
            "accelerated": lambda: ours(composed(Path(name), [*words, *sparse]), steps),
            "bare": lambda: bare(composed(Path(name), [*words, *dense]), steps),
        }
        try:
            for arm in dict.fromkeys(("dense", *arms)):
                call, about = make[arm]()
                # the compiler may raise it
                with harness.spared(wrong, arm, RuntimeError, base=arm == "dense"):
                    call()  # of the warm-up; here it is compiled
                    prepared[arm] = call, about
            times = rounds(
                {arm: call for arm, (call, _) in prepared.items()},
                count,
                Clock(device, flush=False) if device.type == "cuda" else harness.cpu_clock(),
                warm_up=1,
            )
            kernels = dict[str, dict[str, float]]()
            for arm, (call, _) in prepared.items() if device.type == "cuda" else ():
                with harness.reported_first():
                    kernels[arm] = {} if harness.cut_off() else kernel_times.kernels_of(call, steps)
        except torch.OutOfMemoryError:
            return [{"arm": arm, "wrong": NO_MEMORY} for arm in dict.fromkeys(("dense", *arms))]
    facts = prepared["dense"][1]
    rows: list[Row] = [{"arm": arm, "sparsity": ratio, "wrong": why} for arm, why in wrong.items()]
    for arm, samples in times.items():
        figures = speedup([ms / steps for ms in samples], [ms / steps for ms in times["dense"]])
        rate = facts["items"] / figures["ms"] * 1e3
        mfu = {"mfu": rate * facts["flops"] / facts["peak"]} if facts["peak"] else {}
        layers = {"layers": prepared[arm][1]["layers"]} if "layers" in prepared[arm][1] else {}
        where = (
            {"kinds": kernel_times.by_kind(kernels[arm], figures["ms"])} if kernels.get(arm) else {}
        )
        row = {"arm": arm, "sparsity": ratio, **figures, "items_per_second": rate}
        rows.append({**row, **mfu, **layers, **where})
    return rows


HEAD = (
    "model",
    "N:M",
    "arm",
    "ms a step",
    "times as fast",
    "items/s",
    "MFU",
    "layers by N:M products",
)


def line(row: Row) -> list[str]:
    if "wrong" in row:
        return [row["model"], row.get("sparsity", ""), row["arm"], row["wrong"], "", "", "", ""]
    return [
        *(row["model"], row["sparsity"], row["arm"]),
        *(f"{row['ms']:.4g}", harness.spread(row, "speedup"), f"{row['items_per_second']:,.0f}"),
        *(f"{row['mfu']:.1%}" if "mfu" in row else "", row.get("layers", "")),
    ]


def profiled(rows: Sequence[Row]) -> str:
    """Where the steps go, a line an arm; nothing where nothing was profiled."""
    found = [row for row in rows if "kinds" in row]
    if not found:
        return ""
    kinds = [kind for kind in found[0]["kinds"] if any(row["kinds"][kind] for row in found)]
    lines = [
        [
            row["model"],
            row["sparsity"],
            row["arm"],
            *(f"{row['kinds'][kind]:.3g}" for kind in kinds),
        ]
        for row in found
    ]
    title = "Where a step goes, in ms of the GPU by kinds of kernels, one profiled stretch:"
    return f"\n\n{title}\n\n{aligned([*HEAD[:3], *kinds], lines)}"


def benchmark(
    models: Sequence[str] | None, recipe: str, sparsity: Sequence[str], arms: Sequence[str] | None, steps: int,
    compile: bool | None, overrides: Sequence[str], rounds: int, device: str,
) -> Benchmark:  # fmt: skip
    place = harness.device_of(device)
    compiled = place.type == "cuda" if compile is None else compile
    arms = arms or [arm for arm in TRAINING_ARMS if arm != "torch" or place.type == "cpu"]
    settings = [f"trainer.compile={compiled}", f"trainer.device={place.type}", *overrides]

    def measure_network(words: Sequence[str]) -> list[Row]:
        how = (steps, rounds, place)
        return [
            row
            for ratio in sparsity
            for row in measure([*words, *settings], recipe, ratio, arms, *how)
        ]

    def page(rows: list[Row]) -> str:
        clock = "" if place.type == "cuda" else f" of {harness.cpu_clock_name()}"
        title = (
            f"Training steps, {recipe}: milliseconds{clock}, and times as fast as dense. "
            f"Median [quartiles] of paired stretches of {steps} steps, n = {harness.samples(rows)}. "
            f"Items are tokens or images. Compiled: {'yes' if compiled else 'no'}."
        )
        return f"{title}\n\n{aligned(HEAD, [line(row) for row in rows])}{profiled(rows)}"

    return Benchmark(each(models or TRAINED[place.type], measure_network), page, place)
