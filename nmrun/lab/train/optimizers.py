"""A config's optimizer, its groups of parameters, and its learning rate by step."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from nmrun import optim
from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.groups import CustomOptimizer, Optimizer
from nmrun.registry import find

Named = tuple[str, nn.Parameter]


def optimizer_of(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters. ConfigError for ``head_lr`` without a layer named
    head."""
    not_arguments = ("head_lr", "decay", "target", "options")
    arguments = {k: v for k, v in options.values().items() if k not in not_arguments}
    groups: Any = [
        {"params": [parameter for _, parameter in named], **rate, **decay}
        for parameters, rate in _by_rate(options, model)
        for named, decay in _by_decay(options, parameters)
        if named
    ]
    if isinstance(options, CustomOptimizer):
        return _of_class(options, groups, arguments)
    if options.name == "sgd":
        return optim.SGD(groups, **arguments)
    arguments["betas"] = tuple(arguments["betas"])
    return {"adam": optim.Adam, "adamw": optim.AdamW}[options.name](groups, **arguments)


def _of_class(options: CustomOptimizer, groups: Any, common: dict[str, Any]) -> Any:
    """An optimizer by its dotted path. ConfigError for what is none, and for its own refusals."""
    said = f"optimizer.target={options.target}"
    kind = find("optimizer.target", options.target, {})
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"{said} is no torch.optim.Optimizer")
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


def multistep_factor(
    warmup_steps: int, milestones: Sequence[int], gamma: float
) -> Callable[[int], float]:
    """Likewise: after the warm-up ``gamma`` to the number of milestones, which are steps, so far."""
    return lambda step: (
        (step + 1) / warmup_steps
        if step < warmup_steps
        else gamma ** bisect_right(milestones, step)
    )


def custom_factor(
    target: str, arguments: Mapping[str, Any], lr: float, length: int, every: int = 1
) -> Callable[[int], float]:
    """A schedule of ``torch.optim.lr_scheduler`` by its dotted path: that of a lone parameter with
    the learning rate ``lr``, which is asked step by step. So it is a function of the step.

    ``length``: how often it steps in the run, once in ``every`` optimizer steps. ConfigError for
    what is no such schedule, and for its own refusals.
    """
    said = f"schedule.target={target}"
    kind = find("schedule.target", target, {})
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        raise ConfigError(f"{said} is no torch.optim.lr_scheduler.LRScheduler")
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
    is repeated, each time over an equal share of the steps."""
    if options["name"] == "custom":
        every = batches if options["interval"] == "epoch" else 1
        length = -(-total_steps // every)
        return custom_factor(options["target"], options["options"] or {}, lr, length, every)
    if options["name"] == "multistep":
        milestones = [round(at * total_steps) for at in options["milestones"]]
        warmup = round(options["warmup"] * total_steps)
        return multistep_factor(warmup, milestones, options["gamma"])
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
