"""What a run is going to do, in lines for the reader."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from nmrun.fast import acceleration
from nmrun.lab.keys.config import Config
from nmrun.lab.train.build import Parts
from nmrun.sparsity.weight import SparseWeight


def lines(config: Config, parts: Parts) -> list[str]:
    """Say how long and on what a run trains, and which weights are sparse.

    Then follow the weights that are left dense and why, and density and FLOPs of the whole.
    """
    trainer, handle = config.trainer, parts.handle
    epochs = parts.total_steps / parts.task.batches_per_epoch
    many = "1 epoch" if epochs == 1 else f"{epochs:.4g} epochs"
    budget = "" if trainer.budget is None else f" (trainer.budget={trainer.budget})"
    said = [
        f"  {many} of {parts.task.batches_per_epoch} batches of {parts.task.batches_of or trainer.batch_size}, "
        f"{parts.total_steps} steps{budget}, {parts.device.type} {parts.precision}"
    ]
    if (trainer.threads or 0) > (cores := os.cpu_count() or 1):
        said.append(
            f"  trainer.threads={trainer.threads} on {cores} cores: more threads are slower"
        )
    if parts.task.about:
        said.append(f"  {parts.task.about}")
    if trainer.distill is not None:
        said.append(
            f"  taught by {trainer.distill}: {trainer.distill_weight:g} of the loss, "
            f"temperature {trainer.distill_temperature:g}"
        )
    rows = [
        ("sparse", weight.name, tuple(weight.shape), _pattern_text(weight))
        for weight in handle.sparse
    ]
    if not config.is_dense:
        rows += [("dense", left.name, left.shape, left.reason) for left in handle.left_dense]
    said += [f"  {line}" for line in layers(rows)]

    if (activations := parts.activations).pattern is not None:
        steps_of = activations.sparse_steps
        steps_of = range(parts.total_steps) if steps_of is None else steps_of
        said.append(
            f"  activations {activations.pattern} of {len(activations.modules)} squared ReLUs, "
            f"steps {steps_of.start + 1} to {steps_of.stop}"
        )
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    kept = total - sum(
        weight.dense.numel() * (1 - weight.pattern.density) for weight in handle.sparse
    )
    cost = parts.cost
    if handle.sparse or activations.pattern is not None:
        said.append(f"  density {kept / total:.1%} of {total:,} parameters")
        of_item = (cost.forward, cost.forward_sparse, cost.forward_hardware)
        for what, flops in (("an inference", of_item), ("the training", training(parts))):
            dense, arithmetic, hardware = map(_short, flops)
            said.append(
                f"  FLOPs of {what}: {dense} dense, {arithmetic} sparse, {hardware} on 2:4 tensor cores"
            )
    else:
        said.append(f"  {total:,} parameters")
        inference, whole = _short(cost.forward), _short(training(parts)[0])
        said.append(f"  FLOPs of an inference: {inference}; of the training: {whole}")
    return said + [f"  {line}" for line in acceleration.lines(parts.accelerated)]


def training(parts: Parts) -> tuple[float, float, float]:
    """Count the FLOPs of a whole training as planned: of a dense one, without the zeros, and on 2:4
    tensor cores."""
    cost, recipe, steps = parts.cost, parts.handle.recipe, parts.total_steps
    items = steps * sum(parts.task.sizes(0, 0, 1))
    without, hardware = (items * cost.planned(recipe, steps, on) for on in (False, True))
    return items * cost.dense, without, hardware


def row(config: Config, parts: Parts) -> dict[str, str]:
    """Say in a few words what a run is going to do, by the names of columns: for a list of runs."""
    dense, without, _ = training(parts)
    return {
        "recipe": config.recipe.name,
        "ratio": "" if config.pattern is None else str(config.pattern),
        "steps": str(parts.total_steps),
        "FLOPs dense": _short(dense),
        "without the zeros": _short(without) if parts.handle.sparse else "",
    }


Row = tuple[str, str, tuple[int, ...], str]  # sparse or dense, name, shape, pattern or reason


def layers(rows: Sequence[Row]) -> list[str]:
    """Write the weights, those that differ in a number of their names alone in one line:
    ``sparse  6 x blocks.*.attn.qkv.weight  1536x512  2:4``.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind, name, shape, note in rows:
        size = "x".join(map(str, shape))
        alike.setdefault((kind, re.sub(r"\d+", "*", name), size, note), []).append(name)
    lines = [
        (kind, f"{len(names)} x {_joined(names)}" if len(names) > 1 else names[0], size, note)
        for (kind, _, size, note), names in alike.items()
    ]
    widths = [max(map(len, column), default=0) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _joined(names: Sequence[str]) -> str:
    """One name for several: a star where their numbers differ."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _pattern_text(weight: SparseWeight) -> str:
    pattern, rest = weight.pattern, weight.shape[weight.dim] % weight.pattern.m
    said = str(pattern)
    if pattern.v > 1:
        said += f": {pattern.n}:{pattern.m}, the columns shared by {pattern.v} rows"
    if pattern.n == pattern.m:
        said += ", which prunes nothing"
    return said + (f", the last group of {rest}" if rest else "")


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
