"""What a run is going to do, in lines for the reader."""

from __future__ import annotations

from nmrun.products import acceleration
from nmrun.settings.config import Config
from nmrun.sparsity.weight import SparseWeight
from nmrun.train.build import Parts


def title(config: Config) -> str:
    """One line: recipe, ratio, data set, model, optimizer, seed."""
    what = "dense" if config.is_dense else f"{config.recipe.name} {config.pattern}"
    return f"{what} on {config.dataset.name} with {config.model.name}, {config.optimizer.name}, seed {config.seed}"


def lines(config: Config, parts: Parts) -> list[str]:
    """Say how long and on what a run trains, and which weights are sparse.

    Then follow the weights that are left dense and why, and density and FLOPs of the whole.

    Args:
        config: the run's config.
        parts: what was built of it.
    """
    trainer, handle = config.trainer, parts.handle
    epochs = parts.total_steps / parts.task.batches_per_epoch
    budget = "" if trainer.budget is None else f" (trainer.budget={trainer.budget})"
    said = [
        f"  {epochs:.4g} epochs of {parts.task.batches_per_epoch} batches of {parts.task.batches_of or trainer.batch_size}, "
        f"{parts.total_steps} steps{budget}, {parts.device.type} {parts.precision}"
    ]
    if parts.task.about:
        said.append(f"  {parts.task.about}")
    rows = [("sparse", weight.name, tuple(weight.shape), _held(weight)) for weight in handle.sparse]
    if not config.is_dense:
        rows += [("dense", left.name, left.shape, left.reason) for left in handle.left_dense]
    shapes = ["x".join(map(str, shape)) for _, _, shape, _ in rows]
    widths = [
        max(map(len, column), default=0) for column in ([name for _, name, _, _ in rows], shapes)
    ]
    for (kind, name, _, note), shape in zip(rows, shapes, strict=True):
        said.append(f"  {kind:<6}  {name:<{widths[0]}}  {shape:<{widths[1]}}  {note}")

    total = sum(parameter.numel() for parameter in parts.model.parameters())
    kept = total - sum(
        weight.dense.numel() * (1 - weight.pattern.density) for weight in handle.sparse
    )
    cost, steps = parts.cost, parts.total_steps
    items = steps * sum(parts.task.sizes(0, 0, 1))
    if handle.sparse:
        said.append(f"  density {kept / total:.1%} of {total:,} parameters")
        said.append(
            f"  FLOPs an item: inference {_short(cost.forward)} dense, {_short(cost.forward_sparse)} without the zeros, "
            f"{_short(cost.forward_hardware)} on 2:4 tensor cores"
        )
        arithmetic, hardware = (
            items * cost.planned(handle.recipe, steps, on_hardware) for on_hardware in (False, True)
        )
        said.append(
            f"  FLOPs of the training as planned: {_short(items * cost.dense)} dense, {_short(arithmetic)} without the zeros, "
            f"{_short(hardware)} on 2:4 tensor cores"
        )
        said += [f"  {line}" for line in acceleration.lines(parts.accelerated)]
    else:
        said.append(
            f"  {total:,} parameters; FLOPs an item: inference {_short(cost.forward)}, training {_short(cost.dense)}"
        )
        said.append(f"  FLOPs of the training: {_short(items * cost.dense)}")
    return said


def _held(weight: SparseWeight) -> str:
    rest = weight.shape[weight.dim] % weight.pattern.m
    return f"{weight.pattern}" + (f", the last group of {rest}" if rest else "")


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
