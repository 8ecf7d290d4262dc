"""The recipes once more, by hand: plain loops over plain tensors, without hooks, parametrizations
or torch's optimizers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training import by_sgd

N, M, LR, DECAY, TOTAL = 2, 4, 0.05, 0.1, 10
SHAPES = ((8, 8), (8,), (4, 8), (4,))  # weight and bias of two linear layers
SPARSE = (0, 2)  # which of them are sparse
Weights = list[Tensor]


def mask_of(w: Tensor) -> Tensor:
    """Top N of each M magnitudes along the rows, by a stable sort."""
    groups = w.abs().reshape(-1, M)
    order = groups.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter(1, order[:, :N], True)
    return mask.reshape(w.shape)


def pruned(w: Tensor) -> Tensor:
    """(1 - mask) * w."""
    return torch.where(mask_of(w), 0.0, w)


def soft(w: Tensor) -> Tensor:
    t = w.abs().reshape(-1, M).sort(dim=1, descending=True).values[:, N : N + 1]
    return w.sign() * w.abs().sub(t.repeat_interleave(M, 1).reshape(w.shape)).clamp_min(0)


def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.tanh(x @ weights[0].T + weights[1])
    return (hidden @ weights[2].T + weights[3] - y).square().mean()


class Reference:
    """One run of ``TOTAL`` optimizer steps. ``update`` is sgd (momentum 0.9), adam or adamw;
    ``forward`` the weights the network uses.
    """

    def __init__(
        self,
        recipe: str,
        update: str,
        weights: Weights,
        weight_decay: float = 0.0,
        switch: int = 0,
        second_moment: str = "frozen",
    ) -> None:
        self.recipe, self.update, self.weight_decay = recipe, update, weight_decay
        self.switch, self.second_moment = switch, second_moment
        self.weights = [w.clone() for w in weights]
        self.m = [torch.zeros_like(w) for w in weights]
        self.v = [torch.zeros_like(w) for w in weights]
        self.frozen: dict[int, Tensor] = {}
        self.masks: dict[int, Tensor] = {}
        self.t = 0
        self.beta = {
            i: (weights[i] * soft(weights[i])).sum() / soft(weights[i]).square().sum()
            for i in SPARSE
        }
        self.change_phase()

    @property
    def in_phase_two(self) -> bool:
        return self.t >= self.switch

    @property
    def forward(self) -> Weights:
        used = list(self.weights)
        for i in SPARSE if self.in_phase_two else ():
            w = used[i]
            if self.recipe == "asp":
                used[i] = w * self.masks[i]
            elif self.recipe == "s_ste":
                used[i] = self.beta[i] * soft(w)
            elif self.recipe != "dense":
                used[i] = w * mask_of(w)
        return used

    def change_phase(self) -> None:
        """What happens once, after step number ``switch``."""
        if self.t != self.switch:
            return
        for i in SPARSE:
            if self.recipe == "asp":
                self.masks[i] = mask_of(self.weights[i])
                self.weights[i] = self.weights[i] * self.masks[i]
            if self.recipe == "step" and self.second_moment == "frozen":
                self.frozen[i] = (self.v[i] / (1 - 0.999**self.t) + 1e-8).sqrt()

    def step(self, batches: list[tuple[Tensor, Tensor]], clip: float | None = None) -> None:
        used = [w.clone().requires_grad_() for w in self.forward]
        grads = [torch.zeros_like(w) for w in used]
        for x, y in batches:
            of_part = torch.autograd.grad(loss(used, x, y) / len(batches), used)
            grads = [total + g for total, g in zip(grads, of_part, strict=True)]
        if clip is not None:
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
            grads = [g * min(1.0, clip / (norm + 1e-6)) for g in grads]
        for i in SPARSE:
            if self.recipe == "sr_ste" or (self.recipe == "step" and self.in_phase_two):
                grads[i] = grads[i] + DECAY * pruned(self.weights[i])
            if self.recipe == "asp" and self.in_phase_two:
                grads[i] = grads[i] * self.masks[i]
        self.t += 1
        for i, g in enumerate(grads):
            self._update(i, g)
            if i in self.masks:
                self.weights[i] = self.weights[i] * self.masks[i]
        self.change_phase()

    def _update(self, i: int, g: Tensor) -> None:
        w = self.weights[i]
        if self.update == "adamw":
            w = w * (1 - LR * self.weight_decay)
        else:
            g = g + self.weight_decay * w
        if self.update == "sgd":
            self.m[i] = 0.9 * self.m[i] + g
            self.weights[i] = w - LR * self.m[i]
            return
        self.m[i] = 0.9 * self.m[i] + 0.1 * g
        self.v[i] = 0.999 * self.v[i] + 0.001 * g**2
        denominator = self.frozen.get(i)
        if denominator is None:
            denominator = (self.v[i] / (1 - 0.999**self.t)).sqrt() + 1e-8
        self.weights[i] = w - LR * self.m[i] / (1 - 0.9**self.t) / denominator


def data(
    count: int, dtype: torch.dtype = torch.float64
) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    """``data(count)(step)`` is a list of ``count`` micro-batches."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(TOTAL, count, 6, 8, generator=generator, dtype=dtype)
    y = torch.randn(TOTAL, count, 6, 4, generator=generator, dtype=dtype)
    return lambda step: list(zip(x[step], y[step], strict=True))


# (step, which weight, dense weight) -> a tensor of its shape
Rule = Callable[[int, int, Tensor], Tensor]


class ByHand:
    """SGD without momentum under any recipe: ``forward`` gives the weight used, ``edit(step, i, w, g)``
    the gradient that the dense weight i receives for the gradient g of the used one.
    """

    def __init__(
        self,
        weights: Weights,
        forward: Rule,
        edit: Callable[[int, int, Tensor, Tensor], Tensor] = lambda t, i, w, g: g,
    ) -> None:
        self.weights, self.t = [w.clone() for w in weights], 0
        self.forward, self.edit = forward, edit

    @property
    def used(self) -> Weights:
        return [
            self.forward(self.t, i, w) if i in SPARSE else w for i, w in enumerate(self.weights)
        ]

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        used = [w.clone().requires_grad_() for w in self.used]
        grads = torch.autograd.grad(sum(loss(used, x, y) for x, y in batches) / len(batches), used)
        for i, g in enumerate(grads):
            g = self.edit(self.t, i, self.weights[i], g) if i in SPARSE else g
            self.weights[i] = self.weights[i] - LR * g
        self.t += 1


class Net(nn.Sequential):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        torch.manual_seed(3)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)
        self.to(dtype)

    @property
    def used(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters()]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    clip: float | None = None,
) -> None:
    """A step by the mean of micro-batches, with the norm of the gradient clipped."""
    for x, y in batches:
        ((model(x) - y).square().mean() / len(batches)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def follow(recipe: str, hand: ByHand, pattern: str = "2:4", **options: Any) -> Net:
    """The network after ``TOTAL`` steps of SGD, in each of which it used the weights that are worked
    out by hand.
    """
    model, batches = Net(), data(2)
    optimizer, handle = by_sgd(model, recipe, pattern, TOTAL, lr=LR, **options)
    for t in range(TOTAL):
        torch.testing.assert_close(model.used, hand.used, rtol=1e-9, atol=1e-12)
        train_step(model, optimizer, batches(t))
        hand.step(batches(t))
    handle.finalize()
    torch.testing.assert_close(model.used, hand.used, rtol=1e-9, atol=1e-12)
    return model


def top(w: Tensor, n: int, m: int) -> Tensor:
    """The mask of the n largest of m along rows, by sorting each group in plain Python."""
    mask = torch.zeros_like(w)
    for r, row in enumerate(w.tolist()):
        for start in range(0, len(row), m):
            best = sorted(range(start, start + m), key=lambda j: (-abs(row[j]), j))[:n]
            mask[r, best] = 1.0
    return mask


def largest_in_blocks(w: Tensor, ratio: str) -> Tensor:
    """The mask of a matrix by V:N:M, block by block in plain Python; a NaN is kept beside the others."""
    v, n, m = map(int, ratio.split(":"))
    mask = torch.zeros(w.shape, dtype=torch.bool)
    for top, left in itertools.product(range(0, len(w), v), range(0, w.shape[1], m)):
        size = [
            [-1.0 if math.isnan(x) else abs(x) for x in row]
            for row in w[top : top + v, left : left + m].tolist()
        ]
        total = [sum(column) for column in zip(*size, strict=True)]
        four = sorted(sorted(range(len(total)), key=lambda j: (-total[j], j))[:4])
        for r, row in enumerate(size):
            kept = sorted(four, key=lambda j: (-row[j], j))[:n]
            mask[top + r, [left + j for j in kept]] = True
    return mask | w.isnan()


TWO = [row for row in itertools.product((0.0, 1.0), repeat=4) if sum(row) == 2]
BLOCKS = torch.tensor(
    [b for b in itertools.product(TWO, repeat=4) if all(sum(c) == 2 for c in zip(*b, strict=True))],
    dtype=torch.float64,
)


def best_block(w: Tensor) -> Tensor:
    """The 2:4 mask along rows and columns of a 4 x 4 block that keeps the most, by trying all 90."""
    return BLOCKS[(BLOCKS * w.abs()).sum((1, 2)).argmax()].to(w.dtype)


def transposable(w: Tensor) -> Tensor:
    mask = torch.zeros_like(w)
    for r, c in itertools.product(range(0, w.shape[0], 4), range(0, w.shape[1], 4)):
        mask[r : r + 4, c : c + 4] = best_block(w[r : r + 4, c : c + 4])
    return mask
