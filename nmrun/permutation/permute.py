"""A search for the order of a layer's input channels with which N:M masks keep the most magnitude,
and the reordering of a network.

After Pool & Yu, "Channel permutations for N:M sparsity" (NeurIPS 2021): pairs of channels are
swapped as long as that gains something; to get out of a local optimum, a limited number of swaps
that lose is allowed. Here for any N:M, and for several layers that read the same channels. Where
there are few ways to form groups, all are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nmrun.patterns import Pattern
from nmrun.permutation.channels import Channels, Site, tied
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import SparseWeight

ENUMERATED_UP_TO = 1000  # ways to form groups: 35 for 8 channels at M = 4, 945 for 10 at M = 2
MOST_SENTENCES = 8
SWAPS_AT_ONCE = (
    4  # to leave a local optimum; of a single swap, the best next one is mostly the way back
)
Layer = tuple[Tensor, Pattern]  # a matrix (rows, channels) and the pattern along its channels


@torch.no_grad()
def kept_magnitude(layers: Sequence[Layer], order: Tensor | None = None) -> float:
    """The sum of ``|w|`` that N:M masks keep of matrices (rows, channels), with the columns in
    ``order`` (default: as they are).
    """
    total = 0.0
    for matrix, pattern in layers:
        columns = matrix if order is None else matrix[:, order]
        total += float((columns.abs().double() * nm_mask(columns, pattern)).sum())
    return total


@torch.no_grad()
def best_order(layers: Sequence[Layer], regressions: int = 20, seed: int = 0) -> Tensor:
    """The order of the channels (int64, on the CPU) with which the masks of all layers together
    keep the most magnitude, or nearly.

    ``layers`` are matrices (rows, channels), all with the same number of channels, each with its
    own pattern; the last group of a pattern made ``over`` this number may be short. Never worse
    than the order as it is, which is what comes back if nothing is better. Exact where there are no
    more than 1,000 ways to form groups of M; else the best of the local optima to which greedy
    swaps lead, from the order as it is and then ``regressions`` times from the best so far with a
    few pairs swapped at random (``seed``). The same input gives the same order.
    """
    channels = layers[0][0].shape[1]
    start = torch.arange(channels)
    layers = [(matrix, pattern) for matrix, pattern in layers if pattern.n < pattern.m]
    if not layers or not all(bool(matrix.isfinite().all()) for matrix, _ in layers):
        return start
    lengths = {pattern.m for _, pattern in layers}
    m = min(lengths)
    if len(lengths) == 1 and channels % m == 0 and _ways(channels, m) <= ENUMERATED_UP_TO:
        found = max(
            (torch.tensor(order) for order in _partitions(list(range(channels)), m)),
            key=lambda o: kept_magnitude(layers, o),
        )
    else:
        found = _Swaps(layers).search(regressions, torch.Generator().manual_seed(seed))
    return found if kept_magnitude(layers, found) > kept_magnitude(layers) * (1 + 1e-9) else start


def _ways(channels: int, m: int) -> int:
    groups = channels // m
    return math.factorial(channels) // (math.factorial(m) ** groups * math.factorial(groups))


def _partitions(channels: list[int], m: int) -> Iterator[list[int]]:
    """Every way to form groups of m, as an order: the first channel that is left begins a group."""
    if not channels:
        yield []
        return
    first, *rest = channels
    for others in itertools.combinations(rest, m - 1):
        left = [c for c in rest if c not in others]
        for order in _partitions(left, m):
            yield [first, *others, *order]


class _Swaps:
    """Greedy swaps of two channels. ``order`` holds the channel at each position; everything else
    is by channel.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = [
            (matrix.abs().T.double().contiguous(), pattern) for matrix, pattern in layers
        ]
        self.device, self.channels = layers[0][0].device, layers[0][0].shape[1]
        self.order = torch.arange(self.channels, device=self.device)
        shape = (len(layers), self.channels, self.channels)
        # [layer, a, b]: what a's group keeps with b for a
        self.with_other = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.group = torch.zeros(shape[:2], dtype=torch.int64, device=self.device)
        self._measure(torch.arange(self.channels, device=self.device))

    def search(self, regressions: int, generator: torch.Generator) -> Tensor:
        """Climb; then swap random channels, climb again and go back unless that is better,
        ``regressions`` times.
        """
        self._climb()
        for _ in range(regressions):
            former = self.order.clone(), self.with_other.clone(), self.group.clone()
            total = self._kept()
            drawn = torch.randperm(self.channels, generator=generator)[: 2 * SWAPS_AT_ONCE].tolist()
            self._swap(list(zip(drawn[::2], drawn[1::2], strict=False)))
            self._climb()
            if self._kept() <= total:
                self.order, self.with_other, self.group = former
        return self.order.cpu()

    def _kept(self) -> float:
        return float(
            sum(
                each.diagonal()[self.order[:: p.m]].sum()
                for each, (_, p) in zip(self.with_other, self.layers, strict=True)
            )
        )

    def _climb(self) -> None:
        """Take all swaps that gain and do not touch each other's groups, the best first; again,
        until none gains (or for very long).
        """
        least = 1e-12 * self._kept()
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
        """[a, b]: what the masks keep more, over all layers, if channels a and b change places."""
        own = self.with_other.diagonal(dim1=1, dim2=2)
        change = self.with_other - own.unsqueeze(2)
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
        """Bring ``group`` and ``with_other`` up to date for these channels, which hold all channels
        of the groups that changed.

        Let a group be without a, s the sum of its N largest and t the smallest of them: with b it
        keeps s + max(0, b - t). The sum over all rows of max(0, b - t) is (|b - t| + b - t) / 2, so
        a distance gives it for all pairs at once.
        """
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


# --- on a network ---------------------------------------------------------------------------------


def follow(model: nn.Module, events: list[str]) -> dict[str, Channels]:
    """:func:`nmrun.permutation.channels.tied` of the model; empty, with the reason added to
    ``events``, where that cannot be told.
    """
    try:
        return tied(model)
    except ValueError as error:
        events.append(f"no channels will be permuted: {error}")
        return {}


@torch.no_grad()
def permute_inputs(
    weights: Sequence[SparseWeight],
    known: Mapping[str, Channels],
    optimizer: torch.optim.Optimizer,
    reordered: list[tuple[str, int, Tensor]],
) -> list[str]:
    """Reorder the input channels of sparse weights, and all that is tied to them, so that magnitude
    masks keep more.

    ``known``: what :func:`follow` found; if that is empty, nothing happens. Parameters, their
    gradients, buffers and the optimizer's state change in place: the network computes the same
    function (up to rounding), and its next update is the same one, reordered. To ``reordered`` is
    added (name, dim, index) for every tensor that becomes ``tensor.index_select(dim, index)``.
    Returns sentences for a log.
    """
    moved: list[str] = []
    left: dict[str, list[str]] = {}  # names by reason
    total = before = after = 0.0
    for channels, readers in _by_channels(weights, known) if known else ():
        names = [weight.name for weight in readers]
        if reason := channels.held or _obstacle(channels, readers, optimizer):
            left.setdefault(reason, []).extend(names)
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
            reordered += [_reorder(site, order, optimizer) for site in channels.sites]
    said = []
    if total:
        kept = (
            f"{after / total:.2%} of their magnitude is kept, {before / total:.2%} without"
            if moved
            else "no order keeps more"
        )
        said.append(f"input channels permuted of {', '.join(moved) or 'no layer'}: {kept}")
    said += [
        f"input channels not permuted of {_listed(names)}: {reason}"
        for reason, names in left.items()
    ]
    rest = said[MOST_SENTENCES:]
    return said[:MOST_SENTENCES] + ([f"and {len(rest)} more sentences like these"] if rest else [])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _by_channels(
    weights: Sequence[SparseWeight], known: Mapping[str, Channels]
) -> list[tuple[Channels, list[SparseWeight]]]:
    """The sparse weights that read the same channels, together. Those of whose inputs nothing is
    known are held.
    """
    unknown = Channels(0, "it is not known where they come from")
    found: dict[int, tuple[Channels, list[SparseWeight]]] = {}
    for weight in weights:
        channels = (
            known.get(weight.module_name, unknown) if weight.attribute == "weight" else unknown
        )
        found.setdefault(id(channels), (channels, []))[1].append(weight)
    return list(found.values())


def _obstacle(
    channels: Channels, readers: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
) -> str:
    """Why channels cannot be reordered now, as a clause; empty if they can."""
    blocks = {site.module_name: site.block for site in channels.sites if site.dim == 1}
    for weight in readers:
        if blocks[weight.module_name] > 1 and blocks[weight.module_name] % weight.pattern.m:
            return f"groups of {weight.name} hold positions of several channels"
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for site in channels.sites:
        tensor = site.tensor
        if isinstance(tensor, torch.nn.Parameter):
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


def _reorder(
    site: Site, order: Tensor, optimizer: torch.optim.Optimizer
) -> tuple[str, int, Tensor]:
    tensor = site.tensor
    index = (order.unsqueeze(1) * site.block + torch.arange(site.block)).flatten().to(tensor.device)
    state = (
        optimizer.state.get(tensor, {}).values() if isinstance(tensor, torch.nn.Parameter) else ()
    )
    for each in (tensor, tensor.grad, *state):
        if isinstance(each, Tensor) and each.shape == tensor.shape:
            each.copy_(each.index_select(site.dim, index.to(each.device)))
    return site.name, site.dim, index
