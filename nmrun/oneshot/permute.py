"""Channel permutation for one-shot methods: input channels ordered so that the masks keep more of
the scores, as RIA does it (Zhang et al. 2024, arXiv 2402.12419, section 3.3).

The order is found as in the paper (``nmrun.permutation.order``). The outputs of the layers
before follow, so the network computes the same function. Hidden channels of a Transformer's
feed-forward layers can be reordered; what the residual stream carries cannot, as other blocks read
it.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor, nn

from nmrun.oneshot.inputs import LayerMatrix
from nmrun.oneshot.method import Scored
from nmrun.permutation.channels import Channels, input_channels
from nmrun.permutation.order import assigned_order
from nmrun.permutation.permute import reorder


def free_channels(part: nn.Module, model: nn.Module) -> list[Channels]:
    """Channels that can be reordered inside a part of a model; where it cannot be traced, inside
    its children. Those in a tensor that the model has twice are left out."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            holders[id(tensor)] = holders.get(id(tensor), 0) + 1

    def inside(module: nn.Module) -> list[Channels]:
        try:
            found = {id(each): each for each in input_channels(module).values()}
        except ValueError:
            return [each for child in module.children() for each in inside(child)]
        return [
            each
            for each in found.values()
            if not each.fixed and all(holders[id(site.tensor)] == 1 for site in each.sites)
        ]

    return inside(part)


def permute(
    stage: Sequence[LayerMatrix],
    grams: MutableMapping[str, Tensor],
    method: Scored,
    channels: Sequence[Channels],
) -> None:
    """Reorder, in place, channels that are read by layers of this stage alone, and ``X^T X`` of
    each with its inputs."""
    by_module = {id(layer.module): layer for layer in stage if layer.name in grams}
    for free in channels:
        readers = [site for site in free.sites if site.dim == 1]
        layers = [by_module[id(site.module)] for site in readers if id(site.module) in by_module]
        if len(layers) < len(readers) or any(site.block != 1 for site in readers):
            continue
        problem = []
        for layer in layers:
            norms = grams[layer.name].diagonal().sqrt()
            scores = method.scores(layer.matrix(), norms.to(layer.matrix().dtype))
            problem.append((scores.unflatten(1, (-1, free.size)).flatten(0, 1), layer.pattern))
        order = assigned_order(problem)
        for site in free.sites:
            reorder(site, order)
        for layer in layers:
            gram = grams[layer.name]
            runs = torch.arange(len(gram)).view(-1, free.size)  # a convolution's kernel positions
            index = runs[:, order].flatten().to(gram.device)
            grams[layer.name] = gram[index][:, index]
