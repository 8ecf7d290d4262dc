"""A config's optimizer, its groups of parameters, and its learning rate by step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nmrun import optim
from nmrun.errors import ConfigError
from nmrun.lab.keys.groups import Optimizer

Named = tuple[str, nn.Parameter]


def optimizer_of(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters. ConfigError for ``head_lr`` without a layer named
    head."""
    arguments = {k: v for k, v in options.values().items() if k not in ("head_lr", "decay")}
    groups: Any = [
        {"params": [parameter for _, parameter in named], **rate, **decay}
        for parameters, rate in _by_rate(options, model)
        for named, decay in _by_decay(options, parameters)
        if named
    ]
    if options.name == "sgd":
        return optim.SGD(groups, **arguments)
    arguments["betas"] = tuple(arguments["betas"])
    return {"adam": optim.Adam, "adamw": optim.AdamW}[options.name](groups, **arguments)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays under ``optimizer.decay=matrices``.

    It does if it is a layer's weight of two dimensions or more. Biases and norms have one
    dimension. Class tokens, position tables and scales of vision transformers are parameters of the
    model itself. GPT's and BERT's position tables are layers (``nn.Embedding``), and decay as in
    nanoGPT and BERT's code. Swin V2's tables come from a network, ``cpb_mlp``, which its authors'
    code and timm spare as well.
    """
    return parameter.dim() > 1 and "weight" in name.rpartition(".")[2] and "cpb_mlp" not in name


def _by_rate(
    options: Optimizer, model: nn.Module
) -> Iterator[tuple[list[Named], dict[str, float]]]:
    every = list(model.named_parameters())
    if options.head_lr is None:
        yield every, {}
        return
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"optimizer.head_lr={options.head_lr}: this model has no layer named head"
        )
    head_ids = {id(parameter) for parameter in head.parameters()}
    yield [(name, p) for name, p in every if id(p) not in head_ids], {}
    yield [(name, p) for name, p in every if id(p) in head_ids], {"lr": options.head_lr}


def _by_decay(
    options: Optimizer, named: list[Named]
) -> Iterator[tuple[list[Named], dict[str, float]]]:
    if options.decay == "all":
        yield named, {}
        return
    yield [(name, p) for name, p in named if is_matrix(name, p)], {}
    yield [(name, p) for name, p in named if not is_matrix(name, p)], {"weight_decay": 0.0}


def schedule_factor(
    name: str, warmup_steps: int, total_steps: int, final: float = 0.0
) -> Callable[[int], float]:
    """The fraction of the base learning rate by step, from 0, with linear warm-up, whose first step
    has ``1 / warmup_steps``.

    ``name``: the shape after the warm-up, ``constant`` at 1, or ``linear`` or ``cosine`` from 1
    down to ``final`` at step ``total_steps``.
    """
    if name not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule {name!r}: allowed are constant, linear, cosine")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if name == "constant":
            return 1.0
        shape = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return final + (1.0 - final) * shape

    return factor


def inverse_sqrt_factor(warmup_steps: int, start: float = 0.0) -> Callable[[int], float]:
    """The schedule of the Transformer (Vaswani et al. 2017, equation 3) as fairseq has it,
    likewise.

    It rises linearly from ``start`` to 1 at step ``warmup_steps``, then it is ``sqrt(warmup_steps /
    step)``.
    """
    return lambda step: (
        start + (1.0 - start) * step / warmup_steps
        if step < warmup_steps
        else math.sqrt(warmup_steps / step)
    )


def scheduled(options: dict[str, Any], lr: float, total_steps: int) -> Callable[[int], float]:
    """The schedule of a config, likewise. With ``cycles`` above 1 it is repeated, each time over an
    equal share of the steps."""
    if options["name"] == "inverse_sqrt":
        return inverse_sqrt_factor(options["warmup_steps"], options["init_lr"] / lr)
    cycles = min(options["cycles"], max(1, total_steps))  # a cycle has at least one step
    begins = [round(cycle * total_steps / cycles) for cycle in range(cycles + 1)]

    def cycle_factor(steps: int) -> Callable[[int], float]:
        warmup_steps = round(options["warmup"] * steps)
        return schedule_factor(options["name"], warmup_steps, steps, options["final"])

    factors = [cycle_factor(end - begin) for begin, end in pairwise(begins)]

    def factor(step: int) -> float:
        cycle = min(bisect_right(begins, step), cycles) - 1
        return factors[cycle](step - begins[cycle])

    return factor
