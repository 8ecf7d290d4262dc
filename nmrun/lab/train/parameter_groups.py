"""A config's optimizer, and which of a model's parameters it treats alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nmrun import optim
from nmrun.errors import ConfigError
from nmrun.lab.keys.groups import Optimizer

Named = tuple[str, nn.Parameter]


def optimizer(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters.

    Args:
        options: the config's group ``optimizer``.
        model: whose parameters it is to step.

    Raises:
        ConfigError: for ``head_lr`` with a model that has no layer named head.
    """
    arguments = {k: v for k, v in options.values().items() if k not in ("head_lr", "decay")}
    groups: Any = [
        {"params": [parameter for _, parameter in named], **rate, **decay}
        for of_rate, rate in _by_rate(options, model)
        for named, decay in _by_decay(options, of_rate)
        if named
    ]
    if options.name == "sgd":
        return optim.SGD(groups, **arguments)
    arguments["betas"] = tuple(arguments["betas"])
    return {"adam": optim.Adam, "adamw": optim.AdamW}[options.name](groups, **arguments)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays under ``optimizer.decay=matrices``.

    It does if it is a layer's weight of two dimensions or more. Biases and norms have one dimension;
    class tokens, position tables and scales of vision transformers are parameters of the model
    itself, while GPT's and BERT's position tables are layers (``nn.Embedding``), which decay in
    nanoGPT and in BERT's code too. Swin V2's tables come from a network, ``cpb_mlp``, which its
    authors' code and timm spare as well.
    """
    return parameter.dim() > 1 and "weight" in name.rpartition(".")[2] and "cpb_mlp" not in name


def _by_rate(
    options: Optimizer, model: nn.Module
) -> Iterator[tuple[list[Named], dict[str, float]]]:
    """The parameters by learning rate, with what their group has of its own."""
    every = list(model.named_parameters())
    if options.head_lr is None:
        yield every, {}
        return
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"optimizer.head_lr={options.head_lr}: this model has no layer named head"
        )
    own = {id(parameter) for parameter in head.parameters()}
    yield [(name, p) for name, p in every if id(p) not in own], {}
    yield [(name, p) for name, p in every if id(p) in own], {"lr": options.head_lr}


def _by_decay(
    options: Optimizer, named: list[Named]
) -> Iterator[tuple[list[Named], dict[str, float]]]:
    """These parameters by weight decay, with what their group has of its own."""
    if options.decay == "all":
        yield named, {}
        return
    yield [(name, p) for name, p in named if is_matrix(name, p)], {}
    yield [(name, p) for name, p in named if not is_matrix(name, p)], {"weight_decay": 0.0}
