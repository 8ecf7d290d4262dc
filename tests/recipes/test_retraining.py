"""SLoPe, AST, CAST, ProxSparse and SQFT against loops written by hand, and what they refuse."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from counting import Operations
from reference import LR, SPARSE, TOTAL, Net, Weights, data, loss, top, train_step
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from training import by_sgd

import nmrun
from nmrun.recipes.proxsparse import proximal
from nmrun.sparsity.weight import SparseWeight

# --- SLoPe ----------------------------------------------------------------------------------------


class DoublePruned(torch.autograd.Function):
    """x W^T; the input's gradient by W pruned once more along the outputs, the weight's masked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, mask)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, mask = ctx.saved_tensors
        again = w * top(w.T.contiguous(), 2, 4).T
        return gradient @ again, gradient.T @ x * mask, None


def test_slope_prunes_twice():
    """The algorithm: a mask from the initial weights, masked gradients, double-pruned input gradients."""
    model = Net()
    weights = [w.clone() for w in model.used]
    masks = {i: top(weights[i], 2, 4) for i in SPARSE}
    weights = [w * masks[i] if i in SPARSE else w for i, w in enumerate(weights)]
    optimizer = torch.optim.SGD(model.parameters(), LR, weight_decay=0.1)
    handle = nmrun.sparsify(model, optimizer, "slope", "2:4", exclude=None)
    batches = data(1)
    for t in range(TOTAL):
        torch.testing.assert_close(model.used, weights, rtol=1e-9, atol=1e-12)
        x, y = batches(t)[0]
        leaves = [w.clone().requires_grad_() for w in weights]
        hidden = torch.tanh(DoublePruned.apply(x, leaves[0], masks[0]) + leaves[1])
        out = DoublePruned.apply(hidden, leaves[2], masks[2]) + leaves[3]
        grads = torch.autograd.grad((out - y).square().mean(), leaves)
        weights = [w - LR * (g + 0.1 * w) for w, g in zip(weights, grads, strict=True)]
        train_step(model, optimizer, batches(t))
    handle.finalize()
    torch.testing.assert_close(model.used, weights, rtol=1e-9, atol=1e-12)


def test_slope_draws_random_masks_for_each_seed():
    masks = []
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        largest = nmrun.sparsity.nm_mask(model[0].weight, "2:4", 1)
        before = torch.get_rng_state()
        _, handle = by_sgd(model, "slope", "2:4", lr=LR, mask="random")
        assert torch.equal(torch.get_rng_state(), before)
        masks.append([weight["mask"] for weight in handle.sparse])
        nmrun.sparsity.check_nm(model, "2:4", exclude=None)
    assert all(map(torch.equal, *masks[1:]))
    assert not any(map(torch.equal, *masks[:2]))
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[1][0], largest)


def test_slope_says_where_the_input_gradient_is_exact():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    _, handle = by_sgd(model, "slope", "2:4", lr=LR)
    (event,) = handle.pop_events()
    assert str(event) == "SLoPe leaves the input gradient exact at 1.weight"
    assert len(handle.sparse) == 2


def test_slope_goes_on_with_a_model_that_was_saved_whole():
    """Pickle sets the layers' forward, which is that of their class then."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Conv1d(8, 8, 1))
    by_sgd(model, "slope", "2:4", lr=LR)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    again = torch.load(file, weights_only=False)
    _, handle = by_sgd(again, "slope", "2:4", lr=LR)
    assert handle.pop_events() == []
    assert len(handle.sparse) == 2


def test_slope_prunes_twice_by_itself():
    model = Net()
    with pytest.raises(ValueError, match="slope makes the input gradient N:M by itself"):
        by_sgd(model, "slope", "2:4", lr=LR, input_gradient="double_prune")


# --- AST ------------------------------------------------------------------------------------------


class AdaptiveSparseTrainer:
    """The authors' AdamW (``adamw.py``) for the two sparse weights and plain AdamW for the biases,
    in loops over plain tensors. Masks change after steps 1, ..., by ``interval``."""

    def __init__(
        self, weights: Weights, decay: float, rise: int, interval: int, wd: float, decoupled: bool
    ) -> None:
        self.weights = [w.clone() for w in weights]
        self.decay, self.rise, self.interval, self.wd = decay, rise, interval, wd
        self.decoupled = decoupled
        self.m = [torch.zeros_like(w) for w in weights]
        self.v = [torch.zeros_like(w) for w in weights]
        self.masks = {i: top(weights[i], 2, 4) for i in SPARSE}
        self.t = 0

    @property
    def used(self) -> Weights:
        return [w * self.masks[i] if i in SPARSE else w for i, w in enumerate(self.weights)]

    def step(self, batches: list[Any]) -> None:
        leaves = [w.clone().requires_grad_() for w in self.used]
        total = sum(loss(leaves, x, y) for x, y in batches) / len(batches)
        grads = torch.autograd.grad(total, leaves)
        factor = self.decay * self.t / self.rise if self.t < self.rise else self.decay
        self.t += 1
        for i, g in enumerate(grads):
            w = self.weights[i]
            if self.decoupled:
                w = w * (1 - LR * self.wd)
            else:
                g = g + self.wd * w
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            if i in SPARSE:
                update = self.m[i] + factor * (1 - self.masks[i]) * w
                self.v[i] = 0.999 * self.v[i] + 0.001 * update**2
            else:
                update = self.m[i]
                self.v[i] = 0.999 * self.v[i] + 0.001 * g**2
            root = (self.v[i] / (1 - 0.999**self.t)).sqrt() + 1e-8
            self.weights[i] = w - LR / (1 - 0.9**self.t) * update / root
        if self.t % self.interval == 0:
            self.masks = {i: top(self.weights[i], 2, 4) for i in SPARSE}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, nmrun.optim.AdamW])
@pytest.mark.parametrize(("rise", "interval"), [(0.5, 3), (0.0, 1)])
def test_ast_is_the_authors_adamw(kind, rise, interval):
    model = Net()
    hand = AdaptiveSparseTrainer(
        model.used, 0.3, round(rise * TOTAL), interval, 0.2, kind is not torch.optim.Adam
    )
    optimizer = kind(model.parameters(), LR, weight_decay=0.2)
    handle = nmrun.sparsify(
        model, optimizer, "ast", "2:4", TOTAL, decay=0.3, rise=rise, interval=interval, exclude=None
    )
    batches = data(2)
    for t in range(TOTAL):
        torch.testing.assert_close(model.used, hand.used, rtol=1e-8, atol=1e-10)
        expected = 0.3 * min(1.0, t / (rise * TOTAL)) if rise else 0.3
        assert handle.metrics()["ast/decay"] == pytest.approx(expected)
        train_step(model, optimizer, batches(t))
        hand.step(batches(t))
    handle.finalize()
    torch.testing.assert_close(model.used, hand.used, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, LR),
        lambda p: torch.optim.NAdam(p, LR),
        lambda p: torch.optim.AdamW(p, LR, amsgrad=True),
    ],
)
@pytest.mark.parametrize("recipe", ["ast", "cast"])
def test_ast_and_cast_name_the_optimizer_they_need(recipe, make):
    model = Net()
    before = model.used
    with pytest.raises(ValueError, match=f"^{recipe} .* takes Adam or AdamW, without amsgrad"):
        nmrun.sparsify(model, make(model.parameters()), recipe, "2:4", TOTAL, exclude=None)
    assert all(map(torch.equal, model.used, before))


# --- CAST -----------------------------------------------------------------------------------------


def scaled(w: Tensor, scales: Tensor) -> Tensor:
    """Each row in as many equal spans as it has scales."""
    rows, parts = scales.shape
    return (w.reshape(rows, parts, -1) * scales[:, :, None]).reshape(w.shape)


def test_cast_is_its_algorithm():
    """Algorithm 1 for the two sparse weights, whose forward weights are scaled (equation 12), and
    plain Adam for biases and scales; in the end pruned."""
    model, lam, interval = Net(), 0.02, 3
    weights = [w.clone() for w in model.used]
    scales = {i: torch.ones(len(weights[i]), 2).double() for i in SPARSE}
    m = [torch.zeros_like(w) for w in weights]
    v = [torch.zeros_like(w) for w in weights]
    rest = [weights[1], weights[3], scales[0], scales[2]]
    plain = torch.optim.Adam(rest, LR)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    handle = nmrun.sparsify(
        model, optimizer, "cast", "2:4", TOTAL, decay=lam, interval=interval, exclude=None
    )
    batches, masks, flips = data(2), dict[int, Tensor](), 0
    for t in range(TOTAL):
        if t % interval == 0:
            again = {i: top(weights[i], 2, 4) for i in SPARSE}
            flips += sum(int((again[i] != masks[i]).sum()) for i in masks)
            masks = again
        used = [scaled(w, scales[i]) if i in SPARSE else w for i, w in enumerate(weights)]
        assert handle.phase == "transition"
        torch.testing.assert_close(model.used, used, rtol=1e-9, atol=1e-12)
        with handle.evaluation_weights():
            for i, w in zip(SPARSE, (model[0].weight, model[2].weight), strict=True):
                torch.testing.assert_close(w.detach(), used[i] * top(weights[i], 2, 4))
        leaves = [weights[0].clone(), rest[0], weights[2].clone(), rest[1], *rest[2:]]
        for leaf in leaves:
            leaf.requires_grad_()
            leaf.grad = None
        forward = [scaled(leaves[0], leaves[4]), leaves[1], scaled(leaves[2], leaves[5]), leaves[3]]
        (sum(loss(forward, x, y) for x, y in batches(t)) / len(batches(t))).backward()
        plain.step()
        for leaf in rest:
            leaf.requires_grad_(False)
        alpha = t / TOTAL
        for i in SPARSE:
            m[i] = 0.9 * m[i] + 0.1 * leaves[i].grad
            moved = (1 - alpha) * m[i] + alpha * lam * weights[i].sign()
            moved = torch.where(masks[i].bool(), m[i], moved)
            v[i] = 0.999 * v[i] + 0.001 * moved**2
            root = (v[i] / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8
            weights[i] = weights[i] - LR * moved / (1 - 0.9 ** (t + 1)) / root
        train_step(model, optimizer, batches(t))
    assert flips > 0
    assert all(bool((scales[i][:, 0] != scales[i][:, 1]).all()) for i in SPARSE)
    final = [
        scaled(w, scales[i]) * top(w, 2, 4) if i in SPARSE else w for i, w in enumerate(weights)
    ]
    assert handle.phase == "sparse"
    torch.testing.assert_close(model.used, final, rtol=1e-9, atol=1e-12)
    train_step(model, optimizer, batches(0))  # goes on where it is
    for weight, w in zip(handle.sparse, (final[0], final[2]), strict=True):
        assert torch.equal(weight.weight != 0, w != 0)
        assert not torch.equal(weight.weight, w)


# of 20 inputs, five groups of four, and of 10, three of which the last is short
SPANS = {20: {1: [20], 2: [12, 8], 3: [8, 8, 4]}, 10: {1: [10], 2: [8, 2], 3: [4, 4, 2]}}


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(lambda: nn.Conv2d(20, 4, 3), (2, 20, 5, 5)), (lambda: nn.Linear(10, 4), (5, 10))],
    ids=["convolution", "short last group"],
)
def test_casts_scales(layer, shape, parts):
    """One for each output and each span of whole groups of its inputs. Their gradients are those of
    autograd; one step, then all is pruned and scaled by hand."""
    model = layer().double()
    columns = torch.repeat_interleave(torch.arange(parts), torch.tensor(SPANS[shape[1]][parts]))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    options = {"parts": parts, "interval": 2, "pad": True}
    handle = nmrun.sparsify(
        nn.Sequential(model), optimizer, "cast", "2:4", 2, exclude=None, **options
    )
    w, scales = model.weight.detach().clone(), torch.ones(4, parts).double().requires_grad_()

    def spread(scales):
        return scales[:, columns].view(4, -1, *[1] * (w.dim() - 2))

    x = torch.randn(shape, dtype=torch.float64)
    fixed = {"weight": w * spread(scales), "bias": model.bias.detach()}
    torch.func.functional_call(model, fixed, (x,)).square().mean().backward()
    model(x).square().mean().backward()
    optimizer.step()
    moved = scales.detach() - LR * scales.grad.sign()  # Adam's first step, but for eps
    torch.testing.assert_close(handle.sparse[0]["scales"], moved, rtol=1e-5, atol=1e-7)
    expected = handle.sparse[0].dense * spread(moved)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=1e-7)


# --- ProxSparse -----------------------------------------------------------------------------------


def test_proxsparse_learns_masks_and_gives_the_weights_back():
    """Half the steps plain, half with proximal steps on the two weights alone; in the end the old
    values under the masks of the moved ones."""
    model, half, lr = Net(), TOTAL // 2, 1.0
    optimizer, handle = by_sgd(model, "proxsparse", "2:4", TOTAL, lr=lr, strength=0.4)
    weights, batches = [w.clone() for w in model.used], data(1)
    original: Weights = []
    for t in range(TOTAL):
        assert handle.phase == ("dense" if t < half else "transition")
        torch.testing.assert_close(model.used, weights, rtol=1e-9, atol=1e-12)
        leaves = [w.clone().requires_grad_() for w in weights]
        grads = torch.autograd.grad(loss(leaves, *batches(t)[0]), leaves)
        if t == half:
            original = [w.clone() for w in weights]
        for i, g in enumerate(grads):
            if t < half or i in SPARSE:
                weights[i] = weights[i] - lr * g
            if t >= half and i in SPARSE:
                weights[i] = proximal(weights[i], nmrun.Pattern(2, 4), 1, 0.4)
        train_step(model, optimizer, batches(t))
        if half <= t < TOTAL - 1:  # evaluated as if it ended now
            with handle.evaluation_weights():
                for i, w in zip(SPARSE, (model[0].weight, model[2].weight), strict=True):
                    torch.testing.assert_close(w.detach(), original[i] * top(weights[i], 2, 4))
    final = [
        original[i] * top(w, 2, 4) if i in SPARSE else original[i] for i, w in enumerate(weights)
    ]
    assert handle.phase == "sparse"
    torch.testing.assert_close(model.used, final, rtol=1e-9, atol=1e-12)
    learned, first = top(weights[0], 2, 4), top(original[0], 2, 4)
    assert not torch.equal(learned, first)
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


# --- SQFT -----------------------------------------------------------------------------------------


class Stored(nn.Module):
    """A layer like Hugging Face's Conv1D, whose weight is (inputs, outputs)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def first_adapters(weight: SparseWeight, *shape: int) -> list[Tensor]:
    """B, zeros, and A, uniform within one over the root of the inputs, for (rank, outputs, inputs)."""
    rank, outputs, inputs = shape
    up, down = weight["up"].clone(), weight["down"].clone()
    assert up.shape == (outputs, rank)
    assert not up.any()
    assert down.shape == (rank, inputs)
    assert 0.5 < float(down.abs().max()) * inputs**0.5 <= 1
    return [up.requires_grad_(), down.requires_grad_()]


def test_sqft_draws_adapters_for_each_seed():
    drawn = []
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 32), nn.Linear(256, 32))
        before = torch.get_rng_state()
        _, handle = by_sgd(model, "sqft", "2:4", lr=LR)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append([weight["down"].clone() for weight in handle.sparse])
    assert all(map(torch.equal, *drawn[1:]))
    assert not any(map(torch.equal, *drawn[:2]))
    assert not torch.equal(*drawn[0])
    scaled = drawn[0][0].double() * 16  # uniform in +-1: mean 0, variance 1/3
    assert abs(float(scaled.mean())) < 5 * (1 / 3 / scaled.numel()) ** 0.5
    assert float(scaled.var()) == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ratio", ["2:4", "4:2:8"])
def test_sqft_trains_masked_adapters(turned, ratio):
    """Against autograd through base + mask * alpha / rank * B A, with torch's Adam. Its schedule, which
    was made for the groups of before, moves the adapters' rate too."""
    model, rank, alpha = Net(), 3, 6.0
    used = model.used
    if turned:
        model[2] = Stored(model[2])
    parts = ratio.split(":")
    n, m = int(parts[-2]), int(parts[-1])
    masks = {i: nmrun.sparsity.nm_mask(used[i], ratio) for i in SPARSE}
    base = {i: used[i] * masks[i] for i in SPARSE}
    others = [used[i].clone().requires_grad_() for i in (1, 3)]
    optimizer = torch.optim.Adam(model.parameters(), LR)
    falls = [LambdaLR(optimizer, lambda step: 0.9**step)]
    dims = {"2.weight": 0} if turned else None
    handle = nmrun.sparsify(
        model, optimizer, "sqft", ratio, rank=rank, alpha=alpha, dims=dims, exclude=None
    )
    by_index = dict(zip(SPARSE, handle.sparse, strict=True))
    adapters = {i: first_adapters(by_index[i], rank, *used[i].shape) for i in SPARSE}
    by_hand = torch.optim.Adam([*others, *adapters[0], *adapters[2]], LR)
    falls.append(LambdaLR(by_hand, lambda step: 0.9**step))
    batches = data(1)
    for t in range(TOTAL):
        merged = {i: base[i] + masks[i] * (adapters[i][0] @ adapters[i][1]) * 2 for i in SPARSE}
        x, y = batches(t)[0]
        by_hand.zero_grad()
        loss([merged[0], others[0], merged[2], others[1]], x, y).backward()
        by_hand.step()
        train_step(model, optimizer, batches(t))
        for schedule in falls:
            schedule.step()
        weights = [model[0].weight, model[2].weight.t() if turned else model[2].weight]
        for i, weight in zip(SPARSE, weights, strict=True):
            expected = base[i] + masks[i] * (adapters[i][0] @ adapters[i][1]) * 2
            torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-6, atol=1e-8)
            assert int((weight != 0).unflatten(1, (-1, m)).sum(2).max()) == n
        torch.testing.assert_close(model[0].bias, others[0], rtol=1e-6, atol=1e-8)
    assert not any("exp_avg" in optimizer.state[weight.parameter] for weight in handle.sparse)
    handle.finalize()


def test_sqft_goes_on_from_weights_that_were_written_in_between():
    model = Net()
    optimizer, handle = by_sgd(model, "sqft", "2:4", lr=LR, rank=2, alpha=2.0)
    batches = data(1)
    for t in range(4):
        train_step(model, optimizer, batches(t))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    halved, mask = model[0].weight.detach().clone(), handle.sparse[0]["mask"].clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_step(model, optimizer, batches(4))
    assert any(event.kind == "outside" for event in handle.pop_events())
    torch.testing.assert_close(model[0].weight.detach(), halved, rtol=1e-6, atol=1e-9)
    for group in optimizer.param_groups:
        group["lr"] = LR
    train_step(model, optimizer, batches(5))
    assert not torch.allclose(model[0].weight.detach(), halved, rtol=1e-6, atol=1e-9)
    assert torch.equal(model[0].weight != 0, mask)


def test_sqft_multiplies_its_adapters_once_a_step():
    """With the two gradients of the adapters that is three products for each weight."""
    model = Net()
    optimizer, handle = by_sgd(model, "sqft", "2:4", lr=LR, rank=2, alpha=2.0)
    batches = data(1)
    for t in range(3):
        x, y = batches(t)[0]
        (model(x) - y).square().mean().backward()
        with Operations(lambda each: each is torch.ops.aten.mm.default) as products:
            optimizer.step()
        optimizer.zero_grad()
        assert products.count == (4 if t == 0 else 3) * len(handle.sparse)
    with handle.dense_weights(), torch.no_grad():
        model[0].weight.mul_(2)
    doubled = model[0].weight.detach().clone()
    optimizer.param_groups[-1]["lr"] = 0.0
    train_step(model, optimizer, batches(3))
    torch.testing.assert_close(model[0].weight.detach(), doubled, rtol=1e-6, atol=1e-9)


def test_sqft_of_convolutions():
    """The adapters of a kernel are a convolution with `rank` outputs and one of 1 x 1, as in LoRA."""
    model = nn.Conv2d(8, 4, 3).double()
    base, bias = model.weight.detach().clone(), model.bias.detach().clone().requires_grad_()
    mask = nmrun.sparsity.nm_mask(base, "2:4")
    optimizer = torch.optim.SGD(model.parameters(), LR)
    handle = nmrun.sparsify(
        nn.Sequential(model), optimizer, "sqft", "2:4", rank=2, alpha=2.0, exclude=None
    )
    up, down = first_adapters(handle.sparse[0], 2, 4, 72)
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    for _ in range(3):
        kernel = (up.view(4, 2, 1, 1, 1) * down.view(1, 2, 8, 3, 3)).sum(1)
        out = nn.functional.conv2d(x, (base + kernel) * mask, bias)
        grads = torch.autograd.grad(out.square().mean(), (up, down, bias))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for tensor, grad in zip((up, down, bias), grads, strict=True):
                tensor -= LR * grad
    kernel = (up.view(4, 2, 1, 1, 1) * down.view(1, 2, 8, 3, 3)).sum(1)
    assert bool((kernel != 0).any())
    expected = ((base + kernel) * mask).detach()
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("recipe", ["ast", "cast"])
def test_adams_count_goes_on_from_a_training_without_the_recipe(recipe):
    """With betas of 0 but for the second moment's correction, a step is lr * sign(g) exactly where
    v and its count belong together."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), LR, betas=(0.0, 0.99), eps=0.0)

    def step() -> None:
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()

    for _ in range(20):
        step()
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", 10, decay=0.0, exclude=None)
    (weight,) = handle.sparse
    before = weight.dense.clone()
    step()
    kept = weight["mask"]
    torch.testing.assert_close((before - weight.dense)[kept], torch.full_like(before, LR)[kept])
