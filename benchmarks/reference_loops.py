"""Dense training by nmrun's loop against plain loops as people write them: same model, same data, same optimizer, one process, paired.

    python benchmarks/reference_loops.py [--rounds 10] [--out benchmarks/results/reference_loops.md]

Each round times a stretch of steps of both loops, in turn; the ratio is nmrun's time over the plain loop's. Fetching batches, the
learning rate, checks for non-finite losses and counting are all part of nmrun's time, logging, evaluation and saving of neither.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from torch import nn
from torch.nn import functional

from nmrun import bench, config_source, models, schema
from nmrun.build import build
from nmrun.console import Console
from nmrun.loop import Loop

SHORTEST = 2.0  # seconds of a stretch
COMMON = ("recipe=dense", "track=local", "optimizer=adamw", "trainer.device=cpu", "trainer.epochs=1000")


def images() -> tuple[tuple[str, ...], Callable[[Loop], Iterator[None]]]:
    """ResNet-18 on CIFAR-10 (in NMRUN_DATA), as in a torchvision training script: a DataLoader over tensors, crop and flip left out in both."""

    def plain(loop: Loop) -> Iterator[None]:
        task = loop.task
        model = models.build({"name": "resnet18", "form": "cifar", "include": None, "exclude": []}, task.inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = torch.utils.data.TensorDataset(task.images, task.labels)
        while True:
            for pixels, labels in torch.utils.data.DataLoader(data, 32, shuffle=True, drop_last=True):
                loss = functional.cross_entropy(model(task.normalise(pixels)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
                yield

    return (
        "dataset=cifar10",
        "dataset.train_size=2000",
        "dataset.crop_padding=0",
        "dataset.flip=false",
        "model=resnet18",
        "trainer.batch_size=32",
    ), plain


def language() -> tuple[tuple[str, ...], Callable[[Loop], Iterator[None]]]:
    """A GPT of 4 layers of width 256, as in nanoGPT's loop: random windows of one long tensor, clipping, AdamW."""

    def plain(loop: Loop) -> Iterator[None]:
        options = {"name": "gpt_tiny", "layers": 4, "heads": 4, "width": 256, "dropout": 0.0}
        model = models.build({**options, "include": None, "exclude": []}, loop.task.inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        text, context = torch.as_tensor(loop.task.micro_batches(0, 0, 1)[0][0]).flatten(), loop.task.inputs["context"]
        text = text.repeat(8)
        while True:
            starts = torch.randint(len(text) - context - 1, (16,)).tolist()
            tokens = torch.stack([text[start : start + context] for start in starts])
            targets = torch.stack([text[start + 1 : start + context + 1] for start in starts])
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            yield

    model = ("model=gpt_tiny", "model.layers=4", "model.width=256")
    return ("dataset=stdlib_text", "dataset.context=256", "trainer.batch_size=16", "trainer.clip=1", *model), plain


def ours(loop: Loop) -> Iterator[None]:
    """nmrun's training steps."""
    loop.model.train()
    while True:
        epoch, index = divmod(loop.step, loop.task.batches_per_epoch)
        loop._train_step(epoch, index, measure_flips=False)
        loop.losses, loop.logged_step = loop.losses[-10:], loop.step - min(10, len(loop.losses))  # as if a row was logged
        yield


def measure(case: Callable[[], tuple[tuple[str, ...], Callable[[Loop], Iterator[None]]]], rounds: int) -> tuple[float, ...]:
    """Median ratio with quartiles, and the seconds of a step of the plain loop."""
    overrides, plain = case()
    config_source.register()
    with tempfile.TemporaryDirectory() as folder, initialize_config_module("nmrun.conf", version_base="1.3"):
        config = schema.check(compose("nmrun", [*COMMON, *overrides, f"output_dir={folder}"]))
        loop = Loop(config, build(config), Console(None))
    pair = [ours(loop), plain(loop)]
    for steps in pair:
        next(steps), next(steps)
    began = time.perf_counter()
    next(pair[1])
    count = math.ceil(SHORTEST / (time.perf_counter() - began))
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            for _ in range(count):
                next(pair[which])
            times[which].append((time.perf_counter() - began) / count)
    ratios = [one / other for one, other in zip(*times, strict=True)]
    q1, middle, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, q1, q3, statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = bench.hardware()
    lines = [
        "Time of a dense training step in nmrun's loop over that in a plain loop: median [quartiles] of paired stretches.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, n = {options.rounds}, float32.",
        "",
        "| | ratio | a step of the plain loop |",
        "|---|---|---|",
    ]
    for name, case in (
        ("ResNet-18, CIFAR-10, batches of 32", images),
        ("GPT, 4 layers of width 256, 16 windows of 256", language),
    ):
        with contextlib.suppress(KeyboardInterrupt):
            middle, q1, q3, seconds = measure(case, options.rounds)
            lines.append(f"| {name} | {middle:.3f} [{q1:.3f}, {q3:.3f}] | {1e3 * seconds:.0f} ms |")
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
