"""The order of input channels with which N:M masks keep the most magnitude, and the network in it.

After Pool & Yu, "Channel permutations for N:M sparsity" (NeurIPS 2021): pairs of channels are
swapped as long as a swap gains. To leave a local optimum, a limited number of swaps may lose. Here
the pattern is any N:M, and several layers may read the same channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.permutation.channels import ChannelDim, Channels
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import SparseWeight


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
    of :func:`input_channels`. ``reordered`` gets (name, dim, index) for every tensor that became
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
        if not torch.equal(order, torch.arange(channels.size, device="cpu")):
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
    index = (order.unsqueeze(1) * site.block + torch.arange(site.block, device="cpu")).flatten()
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


# random swaps to leave a local optimum; after a single one, the best next swap mostly undoes it
SWAPS_AT_ONCE = 4
Columns = tuple[Tensor, Pattern]  # a matrix (rows, channels) and the pattern along its channels


@torch.no_grad()
def kept_magnitude(layers: Sequence[Columns], order: Tensor | None = None) -> float:
    """The sum of magnitudes ``|w|`` that N:M masks keep of matrices (rows, channels), each with its
    pattern, in an order of the channels."""
    total = 0.0
    for matrix, pattern in layers:
        columns = matrix if order is None else matrix[:, order]
        total += float((columns.abs().double() * nm_mask(columns, pattern)).sum())
    return total


@torch.no_grad()
def best_order(layers: Sequence[Columns], regressions: int = 20, seed: int = 0) -> Tensor:
    """Search the order of channels with which the masks of all layers keep the most magnitude; the
    present one where none is better. The search climbs by greedy swaps from the present order, and
    then ``regressions`` times from the best one so far with a few random swaps. The same input
    gives the same order. ``layers``: matrices (rows, channels), all with the same channels, each with
    its pattern, whose last group may be short. Returns the channel at each position: int64, on
    the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return _if_better(layers, lambda pruned: _Swaps(pruned).search(regressions, generator))


@torch.no_grad()
def assigned_order(layers: Sequence[Columns]) -> Tensor:
    """An order of channels with which the masks of all layers keep more of their scores, as
    :func:`best_order` returns it. ``layers``: scores (rows, channels), 0 or more, all of the
    same channels, each with its pattern. The present order where none is better, or where a
    score is not finite."""
    return _if_better(layers, _assigned)


def _if_better(layers: Sequence[Columns], search: Callable[[Sequence[Columns]], Tensor]) -> Tensor:
    """The order that a search finds for the layers that are pruned; the present one where it keeps
    no more."""
    present = torch.arange(layers[0][0].shape[1], device="cpu")
    pruned = [(matrix, pattern) for matrix, pattern in layers if pattern.n < pattern.m]
    if not pruned or not all(bool(matrix.isfinite().all()) for matrix, _ in pruned):
        return present
    order = search(pruned)
    return order if kept_magnitude(pruned, order) > kept_magnitude(pruned) * (1 + 1e-9) else present


class _Swaps:
    """Greedy swaps of two channels. ``order`` is by position, everything else by channel."""

    def __init__(self, layers: Sequence[Columns]) -> None:
        self.layers = [
            (matrix.abs().T.double().contiguous(), pattern) for matrix, pattern in layers
        ]
        self.device, self.channels = layers[0][0].device, layers[0][0].shape[1]
        self.order = torch.arange(self.channels, device=self.device)
        shape = (len(layers), self.channels, self.channels)
        # [layer, a, b]: the magnitude that the group of a keeps with b in a's place
        self.with_other = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.group = torch.zeros(shape[:2], dtype=torch.int64, device=self.device)
        self._measure(torch.arange(self.channels, device=self.device))

    def search(self, regressions: int, generator: torch.Generator) -> Tensor:
        """Climb; then, ``regressions`` times, swap at random, climb, and keep a better order."""
        self._climb()
        for _ in range(regressions):
            former = self.order.clone(), self.with_other.clone(), self.group.clone()
            total = self._magnitude()
            positions = torch.randperm(self.channels, generator=generator, device="cpu")[
                : 2 * SWAPS_AT_ONCE
            ].tolist()
            self._swap(list(zip(positions[::2], positions[1::2], strict=False)))
            self._climb()
            if self._magnitude() <= total:
                self.order, self.with_other, self.group = former
        return self.order.cpu()

    def _magnitude(self) -> float:
        return float(
            sum(
                each.diagonal()[self.order[:: p.m]].sum()
                for each, (_, p) in zip(self.with_other, self.layers, strict=True)
            )
        )

    def _climb(self) -> None:
        """Make all swaps that gain and share no groups, the best first, until no swap gains.
        Rounding could make this endless, so the number of rounds is limited."""
        least = 1e-12 * self._magnitude()
        for _ in range(2 * self.channels):
            gain = self._gain()
            pairs = []
            while float(gain.max()) > least:
                a, b = divmod(int(gain.argmax()), self.channels)
                pairs.append((a, b))
                touched = (
                    (self.group == self.group[:, [a]]) | (self.group == self.group[:, [b]])
                ).any(0)
                gain[touched], gain[:, touched] = 0.0, 0.0
            if not pairs:
                return
            self._swap(pairs)

    def _gain(self) -> Tensor:
        """[a, b]: the magnitude that all layers gain if channels a and b are swapped."""
        present = self.with_other.diagonal(dim1=1, dim2=2)
        change = self.with_other - present.unsqueeze(2)
        change = change + change.transpose(1, 2)
        return change.masked_fill_(self.group.unsqueeze(1) == self.group.unsqueeze(2), 0.0).sum(0)

    def _swap(self, pairs: Sequence[tuple[int, int]]) -> None:
        place = self.order.argsort()
        for a, b in pairs:
            self.order[place[a]], self.order[place[b]] = b, a
        moved = torch.tensor(pairs, device=self.device).flatten()
        touched = (self.group.unsqueeze(2) == self.group[:, moved].unsqueeze(1)).any(2).any(0)
        self._measure(touched.nonzero().squeeze(1))

    def _measure(self, changed: Tensor) -> None:
        """Measure ``group`` and ``with_other`` anew for all channels of the groups that changed.
        Let a group be without a, s the sum of its N largest and t the smallest of them: with b it
        keeps s + max(0, b - t). As max(0, b - t) is (|b - t| + b - t) / 2, a distance gives its sum
        over the rows for all pairs at once."""
        place = self.order.argsort()
        for i, (columns, pattern) in enumerate(self.layers):
            n, m = pattern.n, pattern.m
            self.group[i] = place // m
            groups = self.group[i, changed].unique()
            positions = groups.unsqueeze(1) * m + torch.arange(m, device=self.device)
            real = positions < self.channels  # the last group may be short
            members = self.order[positions.clamp_max(self.channels - 1)]
            values = columns[members] * real.unsqueeze(2)  # (groups, m, rows)
            top = values.topk(n + 1, 1).values
            inside = values >= top[:, n - 1 : n]
            t = torch.where(inside, top[:, n:], top[:, n - 1 : n])[real]
            s = top[:, :n].sum((1, 2)).unsqueeze(1) + torch.where(
                inside, top[:, n:] - values, 0.0
            ).sum(2)
            above = (torch.cdist(t, columns, p=1.0) + columns.sum(1) - t.sum(1, keepdim=True)) / 2
            self.with_other[i, members[real]] = s[real].unsqueeze(1) + above


LEAST = 1e-4  # share of what is kept; a round that gains less is the last


def _assigned(layers: Sequence[Columns]) -> Tensor:
    channels = layers[0][0].shape[1]
    # where patterns differ, places of blocks that all groups fit into
    block = min(channels, math.lcm(*(pattern.m for _, pattern in layers)))
    by_channel = [(scores.T.contiguous(), pattern) for scores, pattern in layers]
    sums = torch.stack([columns.sum(1).cpu() for columns, _ in by_channel]).sum(0)
    order = _deal(sums, block)
    before = 0.0
    while (now := kept_magnitude(layers, order)) > before * (1 + LEAST):
        before = now
        for place in range(block):
            _assign(by_channel, order, torch.arange(place, channels, block, device="cpu"))
    return order


def _deal(sums: Tensor, block: int) -> Tensor:
    """Deal channels to blocks by their sums, forwards and backwards in turn; returns the order."""
    cards, first = sums.argsort(descending=True, stable=True), 0
    order = torch.empty_like(cards)
    for place in range(block):
        places = torch.arange(place, len(order), block, device="cpu")
        hand = cards[first : first + len(places)]
        order[places] = hand.flip(0) if place % 2 else hand
        first += len(places)
    return order


def _assign(by_channel: Sequence[Columns], order: Tensor, places: Tensor) -> None:
    """Exchange the channels at these places, at most one of a group, as is best; in place. In a
    row, a group whose N-th largest score without the place is t gains max(0, c - t) by a channel
    of score c. Up to sums over c and t, which are the same for every assignment, that is half of
    |c - t|."""
    gains = torch.zeros(len(places), len(places), device="cpu")
    for columns, pattern in by_channel:
        m = pattern.m
        members = torch.arange(m - 1, device="cpu")
        beside = members + (members >= (places % m).unsqueeze(1))
        others = (places // m * m).unsqueeze(1) + beside
        real = (others < len(order)).unsqueeze(2).to(columns.device)  # the last group may be short
        values = columns[order[others.clamp_max(len(order) - 1)]] * real
        t = values.topk(pattern.n, 1).values[:, -1]
        gains = gains + torch.cdist(t, columns[order[places]], p=1.0).cpu()
    _, assignment = linear_sum_assignment(gains.numpy(), maximize=True)
    order[places] = order[places[torch.from_numpy(assignment)]]
