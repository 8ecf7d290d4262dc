"""Bi-Mask against the paper's steps by hand: the second mask, the search for the order of the
outputs, whole trajectories.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from reference import DECAY, LR, Net, data, pruned, train_step
from torch import Tensor, nn

import nmrun
from nmrun.recipes.base import generator_of
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.handle import Handle


def sparsify(
    model: nn.Module, pattern: str = "2:4", lr: float = 0.05, **options: Any
) -> tuple[torch.optim.Optimizer, Handle]:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return optimizer, nmrun.sparsify(model, optimizer, "bi_mask", pattern, exclude=None, **options)


def order_of(weight: SparseWeight) -> list[int]:
    return weight["permutation"].view(torch.int64).tolist()


# --- the second mask ------------------------------------------------------------------------------


def second_mask(forward: Tensor, order: list[int], n: int, m: int) -> Tensor:
    """Entry by entry, for a matrix (outputs, columns): within m outputs that follow each other in
    ``order``, the n largest.
    """
    mask = torch.zeros_like(forward, dtype=torch.bool)
    for start, column in itertools.product(range(0, len(order), m), range(forward.shape[1])):
        group = [row for row in order[start : start + m] if row < len(forward)]
        largest = sorted(group, key=lambda row: -abs(float(forward[row, column])))[:n]
        mask[largest, column] = forward[largest, column] != 0
    return mask


LAYERS = {
    "linear": (lambda: nn.Linear(16, 8), (5, 16)),
    "outputs that fill no group": (lambda: nn.Linear(16, 10), (5, 16)),
    "fewer outputs than a group": (lambda: nn.Linear(16, 3), (5, 16)),
    "conv1d": (lambda: nn.Conv1d(8, 8, 3, stride=2, padding=1), (2, 8, 9)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, stride=2, dilation=(1, 2), bias=False), (2, 8, 9, 9)),
    "without a batch": (lambda: nn.Conv2d(8, 6, 3, padding=1), (8, 5, 5)),
    "same": (lambda: nn.Conv2d(8, 6, (2, 3), padding="same"), (2, 8, 5, 5)),
    "circular": (lambda: nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular"), (2, 8, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(8, 8, 2), (1, 8, 3, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("pattern", ["1:4", "2:4", "2:8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_input_gradient_of_every_layer(layer, pattern):
    """The input gradient is that of a plain layer with the weight masked twice; weight and bias
    gradients are SR-STE's.
    """
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    model, n, m = nn.Sequential(make().double()), *map(int, pattern.split(":"))
    forward, backward = copy.deepcopy(model), copy.deepcopy(model)
    (weight,) = sparsify(model, pattern)[1].sparse
    order = order_of(weight)
    outputs = weight.shape[0]
    assert sorted(order) == list(range(-(-outputs // m) * m))
    matrix = weight.weight.flatten(1)
    mask = second_mask(matrix, order, n, m).reshape(weight.shape)
    assert (mask <= (weight.weight != 0)).all()
    assert mask.sum() < (weight.weight != 0).sum() or outputs == 3
    forward[0].weight.data.copy_(weight.weight)
    backward[0].weight.data.copy_(weight.weight * mask)

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    z, at_forward, at_backward = model(x), forward(x), backward(x)
    dz = torch.randn_like(z)
    torch.testing.assert_close(z, at_forward)
    torch.testing.assert_close(
        torch.autograd.grad(z, x, dz, retain_graph=True), torch.autograd.grad(at_backward, x, dz)
    )
    z.backward(dz)
    at_forward.backward(dz)
    torch.testing.assert_close(model[0].weight.grad, forward[0].weight.grad)
    if forward[0].bias is not None:
        torch.testing.assert_close(model[0].bias.grad, forward[0].bias.grad)
    exact = torch.autograd.grad(forward(x), x, dz)[0]
    # evaluation has no reason to prune it
    assert torch.equal(torch.autograd.grad(model.eval()(x), x, dz)[0], exact)


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "pattern"),
    [("linear", "2:4"), ("conv2d", "1:4"), ("outputs that fill no group", "2:8")],
)
def test_the_best_of_the_candidates_is_taken(layer, pattern, monkeypatch):
    drawn: list[list[int]] = []
    randperm = torch.randperm
    monkeypatch.setattr(
        torch, "randperm", lambda *a, **k: (drawn.append((p := randperm(*a, **k)).tolist()), p)[1]
    )
    torch.manual_seed(1)
    model, n, m = nn.Sequential(LAYERS[layer][0]()), *map(int, pattern.split(":"))
    state = torch.get_rng_state()
    _, handle = sparsify(model, pattern, candidates=20)
    assert torch.equal(torch.get_rng_state(), state)  # the run's own random numbers are not touched
    (weight,) = handle.sparse
    counts = [int(second_mask(weight.weight.flatten(1), order, n, m).sum()) for order in drawn]
    assert len(drawn) == 20
    assert len(set(counts)) > 1
    assert order_of(weight) == drawn[counts.index(max(counts))]
    assert int((weight.layer.input_weight != 0).sum()) == max(counts)


def test_each_seed_has_its_own_candidates():
    orders = []
    for seed in (0, 1, 1):
        model = Net()
        torch.manual_seed(seed)
        orders.append([order_of(w) for w in sparsify(model, candidates=1)[1].sparse])
    assert orders[1] == orders[2] != orders[0]
    assert orders[0][0][:4] != orders[0][1][:4]


def test_searched_every_interval_and_the_mask_follows_the_weight_between():
    model = Net()
    optimizer, handle = sparsify(model, interval=3, candidates=5)
    batches, orders = data(1), [[order_of(w) for w in handle.sparse]]
    for t in range(8):
        train_step(model, optimizer, batches(t))
        orders.append([order_of(w) for w in handle.sparse])
        for weight, order in zip(handle.sparse, orders[-1], strict=True):
            expected = weight.weight * second_mask(weight.weight, order, 2, 4)
            assert torch.equal(weight.layer.input_weight, expected)
    changed = [a[0] != b[0] for a, b in itertools.pairwise(orders)]
    assert changed == [False, False, True, False, False, True, False, False]
    again = Net()
    _, other = sparsify(again, interval=3, candidates=5)
    assert [order_of(w) for w in other.sparse] == orders[0]


# --- steps ----------------------------------------------------------------------------------------


def test_pruned_weights_decay():
    model = Net()
    optimizer, handle = sparsify(model, decay=DECAY)
    before = [w.dense.clone() for w in handle.sparse]
    (model(data(1)(0)[0][0])).square().mean().backward()
    grads = [w.grad.clone() for w in handle.sparse]
    optimizer.step()
    for weight, dense, grad in zip(handle.sparse, before, grads, strict=True):
        torch.testing.assert_close(weight.dense, dense - LR * (grad + DECAY * pruned(dense)))
    handle.finalize()
    assert all("forward" not in vars(layer) for layer in model)


def test_what_keeps_the_exact_input_gradient_is_told():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.conv = nn.Conv1d(8, 8, 1, groups=2)

        def forward(self, x):
            return self.conv(self.attention(x, x, x)[0].mT)

    torch.manual_seed(0)
    model = Net()
    _, handle = sparsify(model)
    names = "conv.weight, attention.in_proj_weight, attention.out_proj.weight"
    (event,) = handle.pop_events()
    assert str(event) == f"Bi-Mask leaves the input gradient exact at {names}"
    plain = copy.deepcopy(model)
    handle.finalize(plain)
    x = torch.randn(2, 3, 8, requires_grad=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(m(x).square().sum(), x)[0] for m in (model, plain))
    )


def test_with_estimates_and_fp8_besides():
    """The estimate is for the weight gradient, the second mask for the input gradient: both hold at
    once.
    """
    model = Net(torch.float32)
    _, handle = sparsify(model, mvue="1:4")
    x, dz = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    torch.manual_seed(1)
    model[0](x).backward(dz)
    torch.manual_seed(1)
    torch.testing.assert_close(model[0].weight.grad, nmrun.sparsity.mvue(dz, "1:4", 0).T @ x)
    torch.testing.assert_close(x.grad, dz @ handle.sparse[0].layer.input_weight)


def test_numbers_of_a_recipe_are_apart_by_each_word():
    """Seed 1 at place 23 is not seed 12 at place 3."""
    words = [(1, 23), (12, 3), (123,), (1, 2, 3), (3, 12)]
    drawn = [torch.rand(4, generator=generator_of(*each)).tolist() for each in words]
    assert len({tuple(numbers) for numbers in drawn}) == len(words)
    again = torch.rand(4, generator=generator_of(1, 23)).tolist()
    assert again == drawn[0]
