"""What a run is going to do, in words: which layers are sparse and which are not, density, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nmrun.handle import Handle
from nmrun.loop import Loop
from nmrun.schema import Config


def lines(config: Config, loop: Loop, parameters: int) -> Sequence[str]:
    """The plan as lines of text. FLOPs count a multiplication and an addition as two, for one input, forward only."""
    handle, trainer = loop.handle, config.trainer
    pattern = "dense" if config.pattern is None else str(config.pattern)
    hyper = " ".join(f"{k}={v}" for k, v in config.recipe.items() if k != "name")
    text = [
        f"{config.recipe['name']} {pattern}  {config.model['name']} on {config.dataset['name']}  {config.optimizer['name']} "
        f"lr {config.optimizer['lr']:g}  {trainer['epochs']} epochs = {loop.total_steps} steps of {trainer['batch_size']}  "
        f"seed {config.seed}  {loop.device.type} {str(loop.dtype).removeprefix('torch.')}",
        *([f"  {config.recipe['name']}: {hyper}"] if hyper else []),
    ]
    width = max((len(w.name) for w in [*handle.sparse, *handle.left_dense]), default=0)
    for weight in handle.sparse:
        text.append(f"  sparse {weight.name:<{width}} {_shape(weight.shape)}  {weight.pattern}")
    for left in handle.left_dense:
        text.append(f"  dense  {left.name:<{width}} {_shape(left.shape)}  {left.reason}")
    zeros = sum(w.dense.numel() * (1 - w.pattern.density) for w in handle.sparse)
    dense, sparse = flops(loop.model, handle, loop.task.example())
    text.append(
        f"  {parameters:,} parameters, {(parameters - zeros) / parameters:.1%} kept  "
        f"{dense / 1e6:.3g} MFLOPs an input, {sparse / 1e6:.3g} without the zeros ({sparse / dense:.1%})  "
        f"about {3 * dense * loop.total_steps * trainer['batch_size'] / 1e12:.3g} TFLOPs to train"
    )
    return text


@torch.no_grad()
def flops(model: nn.Module, handle: Handle, example: Any) -> tuple[int, float]:
    """Forward FLOPs of one input: dense, and with the pruned weights of linear and convolution layers left out."""
    training = model.training
    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(example)
    model.train(training)
    total = counter.get_total_flops()
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    saved = 0.0
    for weight in handle.sparse:
        if not isinstance(weight.module, nn.MultiheadAttention):
            own = next((n for name, n in counts.items() if name.partition(".")[2] == weight.module_name), 0)
            saved += own * (1 - weight.pattern.density)
    return total, total - saved


def _shape(shape: Sequence[int]) -> str:
    return f"{'x'.join(map(str, shape)):<14}"
