"""The reordering of a network's channels, so that N:M masks keep more magnitude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nmrun.permutation.channels import ChannelDim, Channels, input_channels
from nmrun.permutation.order import best_order, kept_magnitude
from nmrun.sparsity.weight import SparseWeight

MOST_SENTENCES = 8


def find_channels(model: nn.Module) -> tuple[dict[str, Channels], str]:
    """The channels by module name, as of :func:`input_channels`. None of a model that cannot be
    traced, and why."""
    try:
        return input_channels(model), ""
    except ValueError as error:
        return {}, str(error)


@torch.no_grad()
def permute_inputs(
    weights: Sequence[SparseWeight],
    by_module: Mapping[str, Channels],
    optimizer: torch.optim.Optimizer,
    reordered: list[tuple[str, int, Tensor]],
) -> list[str]:
    """Reorder input channels of sparse weights, so that magnitude masks keep more; returns
    sentences for a log. All tensors with these channels are reordered in place: parameters,
    gradients, buffers and the optimizer's state. The network computes the same function, up to
    rounding, and its next update is the same one, reordered. ``by_module``:
    of :func:`find_channels`. ``reordered`` gets (name, dim, index) for every tensor that became
    ``tensor.index_select(dim, index)``."""
    moved: list[str] = []
    by_reason: dict[str, list[str]] = {}  # names by reason
    total = before = after = 0.0
    for channels, readers in _by_channels(weights, by_module) if by_module else ():
        names = [weight.name for weight in readers]
        if reason := channels.fixed or _obstacle(channels, readers, optimizer):
            by_reason.setdefault(reason, []).extend(names)
            continue
        layers = [
            (w.dense.movedim(1, -1).flatten(0, -2), w.pattern)
            for w in readers
            if w.shape[1] == channels.size
        ]
        if not layers:  # groups lie within one channel: its place does not matter
            continue
        order = best_order(layers)
        total += sum(float(matrix.abs().sum(dtype=torch.float64)) for matrix, _ in layers)
        before, after = before + kept_magnitude(layers), after + kept_magnitude(layers, order)
        if not torch.equal(order, torch.arange(channels.size)):
            moved += names
            reordered += [reorder(site, order, optimizer) for site in channels.sites]
    sentences = []
    if total:
        effect = (
            f"{after / total:.2%} of their magnitude is kept, {before / total:.2%} without"
            if moved
            else "no order keeps more"
        )
        sentences.append(f"input channels permuted of {', '.join(moved) or 'no layer'}: {effect}")
    sentences += [
        f"input channels not permuted of {_listed(names)}: {reason}"
        for reason, names in by_reason.items()
    ]
    if len(sentences) > MOST_SENTENCES:  # a network may have a reason for each layer
        rest = len(sentences) - MOST_SENTENCES
        sentences[MOST_SENTENCES:] = [f"and {rest} more sentences like these"]
    return sentences


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names[:8])
    return f"{text} and {len(names) - 8} more" if len(names) > 8 else text


def _by_channels(
    weights: Sequence[SparseWeight], by_module: Mapping[str, Channels]
) -> list[tuple[Channels, list[SparseWeight]]]:
    unknown = Channels(0, "it is not known where they come from")
    readers: dict[int, tuple[Channels, list[SparseWeight]]] = {}
    for weight in weights:
        channels = (
            by_module.get(weight.module_name, unknown) if weight.attribute == "weight" else unknown
        )
        readers.setdefault(id(channels), (channels, []))[1].append(weight)
    return list(readers.values())


def _obstacle(
    channels: Channels, readers: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
) -> str:
    """Why channels cannot be reordered now, as a clause, or nothing."""
    blocks = {site.module_name: site.block for site in channels.sites if site.dim == 1}
    for weight in readers:
        if blocks[weight.module_name] > 1 and blocks[weight.module_name] % weight.pattern.m:
            return f"groups of {weight.name} hold positions of several channels"
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for site in channels.sites:
        tensor = site.tensor
        if isinstance(tensor, nn.Parameter):
            if not tensor.requires_grad or id(tensor) not in owned:
                return f"they are in {site.name}, which is {'not in the optimizer' if tensor.requires_grad else 'frozen'}"
            for key, value in optimizer.state.get(tensor, {}).items():
                number = isinstance(value, int | float | None) or (
                    isinstance(value, Tensor) and value.numel() == 1
                )
                if not number and getattr(value, "shape", None) != tensor.shape:
                    return (
                        f"they are in {site.name}, and the optimizer's {key} of it has another form"
                    )
        if tensor.shape[site.dim] != channels.size * site.block:
            return f"they are in {site.name}, whose shape is another now"
    return ""


def reorder(
    site: ChannelDim, order: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> tuple[str, int, Tensor]:
    """Reorder channels in one of the tensors that have them, in place, with its gradient and
    optimizer state in a training. Returns name, dimension and index: the tensor is
    ``tensor.index_select(dim, index)`` now."""
    index = (order.unsqueeze(1) * site.block + torch.arange(site.block)).flatten()
    index = index.to(site.tensor.device)
    _reorder(site.tensor, site.dim, index, optimizer)
    return site.name, site.dim, index


@torch.no_grad()
def put_back(
    model: nn.Module,
    reordered: Sequence[tuple[str, int, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Undo what :func:`permute_inputs` has noted in ``reordered``."""
    for name, dim, index in reversed(reordered):
        module, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(module), attribute)
        _reorder(tensor, dim, index.argsort(), optimizer)


def _reorder(
    tensor: Tensor, dim: int, index: Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    state = {} if optimizer is None else optimizer.state.get(tensor, {})
    for each in (tensor.detach(), tensor.grad, *state.values()):
        if isinstance(each, Tensor) and each.shape == tensor.shape:
            each.copy_(each.index_select(dim, index.to(each.device)))
