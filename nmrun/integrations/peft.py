"""Adapters of peft on a sparse model: a merge that leaves its zeros where they are."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.sparsity.reference import grouped, holds
from nmrun.sparsity.select import candidates


@torch.no_grad()
def merge(model: PeftModel, pattern: str | Pattern = "2:4", **options: Any) -> nn.Module:
    """Merge adapters into their N:M model, which stays N:M: ``w + m * delta`` for a weight w whose
    mask m is where it is not 0 (arXiv 2410.03750, section 3.2). ::

        model = nmrun.integrations.peft.merge(trained, "2:4")

    LoRA was trained with the whole of delta, so the merged model computes something else: evaluate
    it. ``recipe=sqft`` trains with the mask, and leaves nothing to merge.

    Args:
        model: with adapters that are not merged yet.
        options: arguments of peft's ``merge_and_unload``.

    Returns:
        The model without adapters, as ``merge_and_unload`` gives it. Weights of layers that are
        not N:M along their inputs are merged as peft does it.

    Raises:
        ConfigError: where no layer with an adapter is N:M. Nothing is changed then.
    """
    pattern = Pattern.parse(pattern)
    pruned: dict[nn.Parameter, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if layer.merged:
            raise ConfigError(
                f"{name} has its adapter merged already: call unmerge_adapter() first"
            )
        for each in candidates(layer.get_base_layer()):
            weight = each.parameter
            if holds(*grouped(weight, pattern, each.dim, pad=True)):
                pruned[weight] = weight == 0
    if not pruned:
        raise ConfigError(
            f"no layer with an adapter is {pattern}: adapt a pruned model, or merge by "
            "merge_and_unload()"
        )
    merged: nn.Module = model.merge_and_unload(**options)
    for weight, zeros in pruned.items():
        weight.masked_fill_(zeros, 0.0)
    return merged
