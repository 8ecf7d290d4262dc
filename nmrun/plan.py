"""What a run is going to do, in lines for the reader."""

from __future__ import annotations

from nmrun import flops
from nmrun.build import Parts
from nmrun.schema import Config


def title(config: Config) -> str:
    """One line: recipe, ratio, data set, model, optimizer, seed."""
    what = "dense" if config.is_dense else f"{config.recipe['name']} {config.pattern}"
    return f"{what} on {config.dataset['name']} with {config.model['name']}, {config.optimizer['name']}, seed {config.seed}"


def lines(config: Config, parts: Parts) -> list[str]:
    """How long and on what, which weights are sparse, which are left dense and why, density and FLOPs of the whole."""
    trainer, handle = config.trainer, parts.handle
    said = [
        f"  {trainer['epochs']} epochs of {parts.task.batches_per_epoch} batches of {trainer['batch_size']}, "
        f"{parts.total_steps} steps, {parts.device.type} {parts.precision}"
    ]
    rows = [("sparse", weight.name, tuple(weight.shape), str(weight.pattern)) for weight in handle.sparse]
    if not config.is_dense:
        rows += [("dense", left.name, left.shape, left.reason) for left in handle.left_dense]
    shapes = ["x".join(map(str, shape)) for _, _, shape, _ in rows]
    widths = [max(map(len, column), default=0) for column in ([name for _, name, _, _ in rows], shapes)]
    for (kind, name, _, note), shape in zip(rows, shapes, strict=True):
        said.append(f"  {kind:<6}  {name:<{widths[0]}}  {shape:<{widths[1]}}  {note}")

    total = sum(parameter.numel() for parameter in parts.model.parameters())
    kept = total - sum(weight.dense.numel() * (1 - weight.pattern.density) for weight in handle.sparse)
    cost = flops.count(parts.model, parts.task)
    step, sparse_step = cost.forward + cost.backward, cost.forward_sparse + cost.backward
    if handle.sparse:
        said.append(f"  density {kept / total:.1%} of {total:,} parameters")
        said.append(
            f"  FLOPs an item: inference {_short(cost.forward)} dense, {_short(cost.forward_sparse)} sparse; "
            f"training {_short(step)} dense, {_short(sparse_step)} with sparse weights in the forward pass"
        )
    else:
        said.append(f"  {total:,} parameters; FLOPs an item: inference {_short(cost.forward)}, training {_short(step)}")
    return said


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
