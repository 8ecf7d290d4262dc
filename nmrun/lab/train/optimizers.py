"""A config's optimizer, its groups of parameters, and its learning rate by step."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from nmrun import optim
from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.groups import CustomOptimizer, Optimizer
from nmrun.registry import find


def optimizer_of(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters. ConfigError for ``head_lr`` without a layer named
    head."""
    not_arguments = ("head_lr", "decay", "target", "options")
    arguments = {k: v for k, v in options.values().items() if k not in not_arguments}
    groups = _groups(options, model)
    if isinstance(options, CustomOptimizer):
        return _of_class(options, groups, arguments)
    if options.name == "sgd":
        return optim.SGD(groups, **arguments)
    arguments["betas"] = tuple(arguments["betas"])
    return {"adam": optim.Adam, "adamw": optim.AdamW}[options.name](groups, **arguments)


def _groups(options: Optimizer, model: nn.Module) -> Any:
    """Parameters by their learning rate and weight decay: the head's come last, and of each those
    that do not decay."""
    head = nn.Module() if options.head_lr is None else getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"optimizer.head_lr={options.head_lr}: this model has no layer named head"
        )
    in_head = {id(parameter) for parameter in head.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [], **rate, **decay}
        for rate in ({}, {"lr": options.head_lr})
        for decay in ({}, {"weight_decay": 0.0})
    ]
    for name, parameter in model.named_parameters():
        spared = options.decay != "all" and not is_matrix(name, parameter)
        groups[2 * (id(parameter) in in_head) + spared]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _found(key: str, path: str, base: type) -> tuple[str, Any]:
    """A class that a key names by its dotted path, and the key with it. ConfigError unless it is a
    kind of ``base``."""
    kind = find(key, path, {})
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{key}={path} is no {base.__name__} of torch's")
    return f"{key}={path}", kind


def _of_class(options: CustomOptimizer, groups: Any, common: dict[str, Any]) -> Any:
    """An optimizer by its dotted path. ConfigError for what is none, and for its own refusals."""
    said, kind = _found("optimizer.target", options.target, torch.optim.Optimizer)
    if "weight_decay" not in inspect.signature(kind).parameters and not options.weight_decay:
        del common["weight_decay"]
    with refused(f"{said}: ", TypeError, ValueError, RuntimeError):
        return kind(groups, **common, **(options.options or {}))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays under ``optimizer.decay=matrices``.

    It does if it is a layer's weight of two dimensions or more. Biases and norms have one
    dimension. Class tokens, position tables and scales of vision transformers are parameters of the
    model itself. GPT's and BERT's position tables are layers (``nn.Embedding``), and decay as in
    nanoGPT and BERT's code. Swin V2's tables come from a network, ``cpb_mlp``, which its authors'
    code and timm spare as well.
    """
    return parameter.dim() > 1 and "weight" in name.rpartition(".")[2] and "cpb_mlp" not in name


def schedule_factor(
    name: str, warmup_steps: int, total_steps: int, final: float = 0.0
) -> Callable[[int], float]:
    """The fraction of the base learning rate by step, from 0, with linear warm-up, whose first step
    has ``1 / warmup_steps``.

    ``name``: the shape after the warm-up, ``constant`` at 1, or ``linear`` or ``cosine`` from 1
    down to ``final`` at step ``total_steps``.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if name == "constant":
            return 1.0
        shape = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return final + (1.0 - final) * shape

    return factor


def custom_factor(
    target: str, arguments: Mapping[str, Any], lr: float, length: int, every: int = 1
) -> Callable[[int], float]:
    """A schedule of ``torch.optim.lr_scheduler`` by its dotted path: that of a lone parameter with
    the learning rate ``lr``, which is asked step by step. So it is a function of the step.

    ``length``: how often it steps in the run, once in ``every`` optimizer steps. ConfigError for
    what is no such schedule, and for its own refusals.
    """
    said, kind = _found("schedule.target", target, LRScheduler)
    parameters = inspect.signature(kind).parameters
    own = {key: length for key in ("total_steps", "T_max") if key in parameters}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr)
    with refused(f"{said}: ", TypeError, ValueError, AttributeError):
        schedule = kind(optimizer, **{**own, **arguments})
    rates = [optimizer.param_groups[0]["lr"]]

    def factor(step: int) -> float:
        while len(rates) <= step // every:
            optimizer.step()
            with refused(f"{said}: ", TypeError, ValueError, ArithmeticError):
                schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return float(rates[step // every]) / lr

    if length > 1:  # some look at their arguments when they step, which may be an epoch later
        factor(every)
    return factor


def scheduled(
    options: dict[str, Any], lr: float, total_steps: int, batches: int = 1
) -> Callable[[int], float]:
    """The schedule of a config, likewise; an epoch has ``batches`` steps. With ``cycles`` above 1 it
    is repeated, each time over an equal share of the steps.

    ``inverse_sqrt`` is that of the Transformer (Vaswani et al. 2017, equation 3) as fairseq has it:
    it rises linearly to 1 at step ``warmup_steps``, then it is ``sqrt(warmup_steps / step)``. After
    ``multistep``'s warm-up it is ``gamma`` to the number of milestones so far.
    """
    if options["name"] == "custom":
        every = batches if options["interval"] == "epoch" else 1
        length = -(-total_steps // every)
        return custom_factor(options["target"], options["options"] or {}, lr, length, every)
    if options["name"] == "multistep":
        warmup, gamma = round(options["warmup"] * total_steps), options["gamma"]
        milestones = [round(at * total_steps) for at in options["milestones"]]
        return lambda step: (
            (step + 1) / warmup if step < warmup else gamma ** bisect_right(milestones, step)
        )
    if options["name"] == "inverse_sqrt":
        warmup, start = options["warmup_steps"], options["init_lr"] / lr
        return lambda step: (
            start + (1.0 - start) * step / warmup if step < warmup else math.sqrt(warmup / step)
        )
    cycles = min(options["cycles"], max(1, total_steps))  # a cycle has at least one step
    begins = [round(cycle * total_steps / cycles) for cycle in range(cycles + 1)]
    lengths = [end - begin for begin, end in pairwise(begins)]
    factors = [
        schedule_factor(options["name"], round(options["warmup"] * each), each, options["final"])
        for each in lengths
    ]

    def factor(step: int) -> float:
        cycle = min(bisect_right(begins, step), cycles) - 1
        return factors[cycle](step - begins[cycle])

    return factor
