"""Channel permutation: the search against brute force, the reordered network against itself, ASP
around the pruning.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import build_noisy, config, kill, outcome
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock
from training import by_sgd

import nmrun
from nmrun.lab import models
from nmrun.lab.models.images import MLPNetwork, SmallConvNetwork
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.train.steps import TrainingSteps
from nmrun.patterns import Pattern
from nmrun.permutation import permute
from nmrun.permutation.channels import input_channels
from nmrun.permutation.permute import assigned_order, best_order, kept_magnitude, permute_inputs


def kept_by_hand(layers: list[tuple[Tensor, Pattern]], order: list[int]) -> float:
    total = 0.0
    for matrix, pattern in layers:
        for row in matrix.tolist():
            values = [abs(row[c]) for c in order]
            for start in range(0, len(values), pattern.m):
                group = sorted(values[start : start + pattern.m], reverse=True)
                total += sum(group[: pattern.n])
    return total


def layers_of(
    *parts: tuple[int, str], channels: int, seed: int = 0, pad: bool = False
) -> list[tuple[Tensor, Pattern]]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for rows, text in parts:
        pattern = Pattern.parse(text)
        matrix = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
        layers.append((matrix, pattern.over(channels) if pad else pattern))
    return layers


# --- the search -----------------------------------------------------------------------------------


SEARCHES = [
    ([(6, "2:4")], 12, False),
    ([(6, "1:8")], 24, False),
    ([(4, "2:4"), (6, "1:4")], 16, False),
    ([(4, "2:4"), (5, "3:8")], 16, False),  # one order for groups of two sizes
    ([(5, "1:4")], 14, True),
    ([(5, "2:4"), (5, "1:8")], 19, True),  # the last group of both is short
]


@pytest.mark.parametrize(("parts", "channels", "pad"), SEARCHES)
def test_no_swap_of_two_channels_is_missed(parts, channels, pad):
    layers = layers_of(*parts, channels=channels, pad=pad)

    order = best_order(layers).tolist()
    assert sorted(order) == list(range(channels))
    best = kept_by_hand(layers, order)
    assert best > kept_by_hand(layers, list(range(channels)))
    for a, b in itertools.combinations(range(channels), 2):
        other = list(order)
        other[a], other[b] = other[b], other[a]
        assert kept_by_hand(layers, other) <= best * (1 + 1e-9)


@pytest.mark.parametrize("channels", [5, 6])
@pytest.mark.parametrize(
    "parts", [[(3, "1:2")], [(4, "2:3")], [(3, "1:3"), (2, "2:3")], [(4, "2:4")]]
)
def test_of_few_channels_the_best_order_is_found(parts, channels):
    """Against all orders; most have a short last group."""
    for seed in range(3):
        layers = layers_of(*parts, channels=channels, seed=seed, pad=True)
        orders = itertools.permutations(range(channels))
        best = max(kept_by_hand(layers, list(order)) for order in orders)
        order = best_order(layers)
        assert kept_by_hand(layers, order.tolist()) == pytest.approx(best, rel=1e-12)
        assert kept_magnitude(layers, order) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("find", [best_order, assigned_order])
def test_the_same_input_gives_the_same_order(find):
    layers = layers_of((16, "2:4"), channels=32)
    torch.manual_seed(1)
    first = find(layers)
    torch.manual_seed(2)
    assert torch.equal(first, find(layers))


@pytest.mark.parametrize("find", [best_order, assigned_order])
def test_what_no_order_improves_stays(find):
    matrix = layers_of((4, "1:4"), channels=16)[0][0]
    broken = matrix.clone()
    broken[0, 0] = torch.nan
    for weight in (torch.ones(4, 16), torch.zeros(4, 16), broken):
        assert torch.equal(find([(weight, Pattern(1, 4))]), torch.arange(16))
    for pattern in (Pattern(4, 4), Pattern(2, 16)):
        assert torch.equal(find([(matrix, pattern)]), torch.arange(16))


# --- the network ----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two stages of torchvision's residual blocks, the first of them with the trunk's channels tied
    through all its layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        down = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.Sequential(
            BasicBlock(8, 8), BasicBlock(8, 8), BasicBlock(8, 16, 2, down), BasicBlock(16, 16)
        )
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


class Branches(nn.Module):
    """One trunk read by two branches, whose outputs are concatenated; behind that a map that is
    read both as it is and flattened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.after, self.last = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 5, 1)
        self.fc = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = torch.cat([self.left(x), self.right(x)], 1)
        x = F.adaptive_avg_pool2d(F.gelu(self.after(x)), 2)
        return self.fc(x.view(x.size(0), -1)) + self.last(x).mean((2, 3))


class Assorted(nn.Module):
    """Depthwise, squeeze and excitation, group norms, a layer called twice, a grouped convolution,
    norms over flattened maps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one_group = nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.twice, self.narrow = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.two_groups, self.grouped = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, groups=2)
        self.pool = nn.AdaptiveMaxPool2d(2)
        self.mix = nn.Conv2d(8, 8, 1)
        self.norm, self.wide = nn.BatchNorm1d(32), nn.Linear(32, 16)
        self.layer_norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(F.silu(self.one_group(self.stem(x))))
        x = x * self.excite(self.squeeze(x.mean([2, 3], keepdim=True)).relu()).sigmoid()
        x = self.twice(x) + self.twice(self.twice(x))
        x = self.mix(self.grouped(self.two_groups(self.narrow(x))))
        x = self.pool(x)
        x = self.norm(x.reshape(x.shape[0], -1))
        return self.fc(F.dropout(self.layer_norm(self.wide(x)), 0.0, self.training))


class Series(nn.Module):
    """A map over time, pooled over time alone, and once as if its channels were rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.image = nn.Conv1d(3, 8, 1), nn.AvgPool2d(3, 1, 1)
        self.mix, self.time, self.last = nn.Conv1d(8, 8, 1), nn.AvgPool1d(2), nn.Conv1d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.time(self.mix(self.image(self.stem(x)))))
        return F.max_pool2d(x, (1, 2)).mean(2)


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(9))
TOKENS = torch.arange(24).view(3, 8) % 11
# the network, its input, which layers' inputs can be reordered, and why others cannot
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str], dict[str, str]]] = {
    "small_conv": (
        lambda: SmallConvNetwork((3, 8, 8), 5, (8, 8, 8)), IMAGES, {"inner.0", "inner.1", "head"}, {"stem": "they come from the model's input"},
    ),
    "mlp": (lambda: MLPNetwork((3, 8, 8), 5, (8, 8, 8)), IMAGES, {"inner.0", "inner.1", "head"}, {"stem": "they come from the model's input"}),
    "residual": (
        Residual,
        IMAGES,
        {*(f"blocks.{i}.conv{j}" for i in range(4) for j in (1, 2)), "blocks.2.downsample.0", "fc"},
        {"conv1": "they come from the model's input"},
    ),
    "branches": (
        Branches, IMAGES, {"left", "right", "last", "fc"}, {"stem": "they come from the model's input", "after": "they come from cat"},
    ),
    "assorted": (
        Assorted,
        IMAGES,
        {"squeeze", "excite", "twice", "narrow", "wide", "fc"},
        {"stem": "they come from the model's input", "mix": "they come from two_groups"},
    ),
    "series": (Series, IMAGES[:, :, 0], {"last"}, {"mix": "they come from image"}),
    "gpt": (
        lambda: GPTNetwork(11, 8, 2, 2, 8),
        TOKENS,
        {"h.0.mlp.c_proj", "h.1.mlp.c_proj"},
        {"h.0.mlp.c_fc": "they come from add", "h.1.mlp.c_fc": "they come from add", "lm_head": "they come from add"},
    ),
}  # fmt: skip


def network(name: str) -> tuple[nn.Module, Tensor]:
    """In double precision, with norms that have done something."""
    torch.manual_seed(5)
    model = NETWORKS[name][0]().double()
    generator = torch.Generator().manual_seed(6)
    for key, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + ("running_var" in key))
    x = NETWORKS[name][1]
    return model, x.double() if x.is_floating_point() else x


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In evaluation and in training; running statistics are left alone."""
    twin = copy.deepcopy(model)
    return [twin.train(training)(x).detach() for training in (False, True)]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_can_be_reordered_and_what_cannot(name):
    model, _ = network(name)
    before = copy.deepcopy(model.state_dict())
    inputs = input_channels(model)
    assert {key for key, channels in inputs.items() if not channels.fixed} == NETWORKS[name][2]
    reasons = {key: channels.fixed for key, channels in inputs.items()}
    assert {key: reasons[key] for key in NETWORKS[name][3]} == NETWORKS[name][3]
    assert model.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def sparsified(
    model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str = "2:4", **options: Any
) -> nmrun.Handle:
    options = {"permute": True, "exclude": None, **options}
    return nmrun.sparsify(model, optimizer, "asp", pattern, total_steps=1000, **options)


def shuffled(layers: Any) -> Tensor:
    """Some order in the place of the best one, so that everything moves."""
    return torch.randperm(layers[0][0].shape[1], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("search", [best_order, shuffled])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_computes_the_same(name, search, monkeypatch):
    model, x = network(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = sparsified(model, optimizer, "1:4")

    def kept() -> float:
        matrices = (w.dense.movedim(1, -1).flatten(0, -2) for w in handle.sparse)
        return sum(kept_magnitude([(matrix, Pattern(1, 4))]) for matrix in matrices)

    monkeypatch.setattr(permute, "best_order", search)
    before, weights = outputs(model, x), [w.dense.detach().clone() for w in handle.sparse]
    magnitude, movable = kept(), NETWORKS[name][2]
    sentences = permute_inputs(handle.sparse, handle.recipe.channels, optimizer, [])
    for now, then in zip(outputs(model, x), before, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-10, atol=1e-12)
    pairs = zip(handle.sparse, weights, strict=True)
    moved = {w.module_name for w, old in pairs if not torch.equal(w.dense, old)}
    listing = sentences[0].removeprefix("input channels permuted of ").partition(": ")[0]
    assert {reader.removesuffix(".weight") for reader in listing.split(", ")} <= moved & movable
    if search is shuffled:
        sizes = {key: channels.size for key, channels in handle.recipe.channels.items()}
        whole = {w.module_name for w in handle.sparse if sizes.get(w.module_name) == w.shape[1]}
        assert moved >= whole & movable
    else:
        assert kept() > magnitude


@pytest.mark.parametrize("update", ["sgd", "adam", "adamw"])
def test_the_next_updates_are_the_same_reordered(update, monkeypatch):
    """Train three steps; then one network is reordered, its twin is not, and both train on with the
    same batches.
    """
    monkeypatch.setattr(permute, "best_order", shuffled)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        "adamw": lambda p: nmrun.optim.AdamW(p, 0.01, weight_decay=0.1),
    }[update]
    model, x = network("residual")
    optimizer = make(model.parameters())
    handle = sparsified(model, optimizer)
    labels = torch.arange(len(x)) % 5

    def train(model, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x * (1 + step)), labels).backward()
            optimizer.step()

    train(model, optimizer, 3)
    other, _ = network("residual")
    plain = make(other.parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    named = dict(other.named_parameters()) | dict(other.named_buffers())
    # a dense phase: ASP prunes much later
    dense = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in named.items():
        tensor.data.copy_(dense[name])
        tensor.grad = None if dense[name].grad is None else dense[name].grad.clone()
    moves: list[tuple[str, int, Tensor]] = []
    permute_inputs(handle.sparse, handle.recipe.channels, optimizer, moves)

    def check():
        for name, tensor in named.items():
            expected, gradient = tensor.detach(), tensor.grad
            for moved, dim, index in moves:
                if moved == name:
                    expected = expected.index_select(dim, index)
                    gradient = None if gradient is None else gradient.index_select(dim, index)
            torch.testing.assert_close(dense[name].detach(), expected, rtol=1e-8, atol=1e-10)
            if gradient is not None:
                torch.testing.assert_close(dense[name].grad, gradient, rtol=1e-6, atol=1e-9)

    assert {"blocks.0.bn1.running_var", "blocks.0.bn1.bias", "conv1.weight", "fc.weight"} <= {
        name for name, *_ in moves
    }
    check()
    train(model, optimizer, 3)
    train(other, plain, 3)
    check()


def chain() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class Factored(torch.optim.SGD):
    """Keeps a number for every row and every column of a matrix."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.detach().flatten(1).sum(1) if p.dim() > 1 else torch.zeros(())
                self.state[p]["rows"] = rows
        super().step()


class Reads(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self[2].weight.square().sum(1)[:4]


class Flips(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = self[1](self[0](x))
        return self[4](self[3](self[2](x if self.training else x.flip(-1))))


def trained_at(model: nn.Module, *names: str) -> torch.optim.Optimizer:
    owned = [p for name, p in model.named_parameters() if name not in names]
    return torch.optim.SGD(owned, 0.1, momentum=0.9)


def tie(model: nn.Sequential) -> nn.Module:
    model[1].unused = nn.Linear(8, 8)
    model[1].unused.bias = model[2].bias
    return model


def freeze(model: nn.Sequential) -> nn.Module:
    model[0].bias.requires_grad_(False)
    return model


def hook(model: nn.Sequential) -> nn.Module:
    model[1].register_forward_hook(lambda module, inputs, output: output.flip(-1))
    return model


def normed(model: nn.Sequential) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model[0])
    return model


ALONE: list[tuple[Callable[[Any], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], set[str], str]] = [
    (tie, trained_at, {"2"}, "4.weight: they are in 2.bias, which is tied to another"),
    (freeze, trained_at, {"4"}, "2.weight: they are in 0.bias, which is frozen"),
    (lambda m: m, lambda m: trained_at(m, "0.weight"), {"4"}, "2.weight: they are in 0.weight, which is not in the optimizer"),
    (hook, trained_at, {"4"}, "2.weight: they come from 1"),
    (normed, trained_at, {"4"}, "2.weight: they come from the model's input"),
    (lambda m: Flips(*m), trained_at, {"4"}, "2.weight: they go into flip"),
    (lambda m: Reads(*m), trained_at, set(), "2.weight, 4.weight: they are in 2.weight, which is used elsewhere as well"),
    (lambda m: m, lambda m: Factored(m.parameters(), 0.1), set(), "2.weight: they are in 0.weight, and the optimizer's rows of it has another form"),
]  # fmt: skip


def moved_columns(old: Tensor, new: Tensor) -> bool:
    """Whether the columns are not in the order they were in, whatever became of the rows."""
    return not torch.equal(old.sort(0).values, new.detach().sort(0).values)


@pytest.mark.parametrize(("change", "make", "moving", "sentence"), ALONE)
def test_what_is_not_understood_is_left_alone_and_said(change, make, moving, sentence, monkeypatch):
    monkeypatch.setattr(permute, "best_order", shuffled)
    model = change(chain())
    optimizer = make(model)
    handle = sparsified(model, optimizer, include=r"[024]")
    x = torch.randn(5, 6)
    model(x).square().sum().backward()
    optimizer.step()
    y, weights = model(x), {w.module_name: w.dense.detach().clone() for w in handle.sparse}
    sentences = permute_inputs(handle.sparse, handle.recipe.channels, optimizer, [])
    torch.testing.assert_close(model(x), y)
    assert any(f"input channels not permuted of {sentence}" in line for line in sentences)
    now = {w.module_name: w.dense for w in handle.sparse}
    assert {name for name in now if moved_columns(weights[name], now[name])} == moving


def test_a_group_with_positions_of_several_channels_is_left_alone():
    """Two positions a channel: at M = 8 a group has four channels, at M = 2 one, and then its place
    does not matter.
    """
    for pattern, moves in [("1:8", False), ("1:2", True)]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d((2, 1)), nn.Flatten()
        model = nn.Sequential(*layers, nn.Linear(16, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = sparsified(model, optimizer, pattern, include=["3", "4"])
        sentences = permute_inputs(handle.sparse, handle.recipe.channels, optimizer, [])
        reason = "input channels not permuted of 3.weight: groups of 3.weight hold positions of several channels"
        assert (reason in sentences) is not moves


class Untraceable(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def replaced(model: nn.Sequential) -> nn.Module:
    """Its class's forward does not flip the hidden channels."""
    model.forward = lambda x: model[4](model[2](model[0](x).flip(-1)))  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("wrap", [lambda m: Untraceable(*m), nn.DataParallel, replaced])
def test_a_model_that_cannot_be_traced_is_pruned_as_without(wrap):
    tensors = []
    for option in (True, False):
        model = wrap(chain())
        _, handle = by_sgd(model, "asp", "2:4", prune_at=0, include=".*[24]", permute=option)
        tensors.append(list(model.state_dict().values()))
        events = [str(event) for event in handle.pop_events() if "permute" in str(event)]
        assert len(events) == option
        for event in events:
            assert event.startswith("no channels will be permuted: the model ")
            assert "\n" not in event
    assert all(map(torch.equal, *tensors))


def test_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = chain()
    handle = sparsified(model, torch.optim.SGD(model.parameters(), 0.1))
    (event,) = handle.pop_events()
    assert str(event) == "no channels will be permuted: several processes train the model"


# --- ASP ------------------------------------------------------------------------------------------


def asp(
    permuting: bool, steps: int, total: int = 10, watch: Any = None
) -> tuple[nn.Module, nmrun.Handle, list[str]]:
    model, x = network("small_conv")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    handle = nmrun.sparsify(
        model, optimizer, "asp", "1:4", total, permute=permuting, include="inner.*", exclude=None
    )
    events: list[str] = []
    for step in range(steps):
        if watch:
            watch(step, model, handle)
        F.cross_entropy(model(x), torch.arange(len(x)) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
        events += map(str, handle.pop_events())
    return model, handle, events


def test_pruning_keeps_more_and_the_pattern_holds():
    magnitudes, dense = [], []
    for permuting in (False, True):
        _, handle, _ = asp(permuting, 4)
        dense.append([w.dense.detach().clone() for w in handle.sparse])
        model, handle, events = asp(permuting, 5)
        magnitudes.append([float(w.weight.abs().sum()) for w in handle.sparse])
        told = "step 5: input channels permuted of inner.0.weight, inner.1.weight"
        assert sum(event.startswith(told) for event in events) == permuting
        model, handle, _ = asp(permuting, 8)
        handle.finalize()
        names = nmrun.sparsity.check_nm(model, "1:4", include="inner.*", exclude=None)
        assert names == ["inner.0.weight", "inner.1.weight"]
    assert all(map(torch.equal, *dense))  # up to the pruning it makes no difference
    assert all(more > less for less, more in zip(*magnitudes, strict=True))


def test_a_copy_of_the_model_is_plain_and_computes_what_the_model_did():
    """Whenever it is made; an average of weights is of channels in one order where it begins after
    the pruning.
    """
    copies, results = {}, {}
    x = network("small_conv")[1]

    def watch(step, model, handle):
        if step in (2, 6):
            copies[step] = copy.deepcopy(model)
            results[step] = model(x).detach()

    model, handle, _ = asp(True, 7, watch=watch)
    for step, other in copies.items():
        assert torch.equal(other(x), results[step])
    nmrun.sparsity.check_nm(copies[6], "1:4", include="inner.*", exclude=None)
    copies[6].load_state_dict(model.state_dict())
    assert torch.equal(copies[6](x), model(x))
    handle.finalize(copies[6])
    assert torch.equal(copies[6](x), model(x))


def test_masks_that_are_remembered_follow():
    """With a learning rate of 0 the pruning alone changes masks: those before, reordered, against
    those after, counted by hand.
    """
    model, x = network("small_conv")
    optimizer, handle = by_sgd(model, "asp", "1:4", 2, lr=0.0, permute=True, include="inner.*")
    masks = {w.name: nmrun.sparsity.nm_mask(w.dense, "1:4") for w in handle.sparse}
    reordered = network("small_conv")[0]

    def follow(name, dim, index):
        weight = reordered.get_parameter(name)
        weight.data.copy_(weight.index_select(dim, index))
        if name in masks:
            masks[name] = masks[name].index_select(dim, index)

    handle.stepper.followers.append(follow)
    handle.measure_flips = True
    model(x).sum().backward()
    optimizer.step()
    flips = sum(int((masks[w.name] != (w.weight != 0)).sum()) for w in handle.sparse)
    entries = sum(mask.numel() for mask in masks.values())
    assert flips > 0
    assert handle.metrics()["sparsity/sad"] == flips
    assert handle.metrics()["sparsity/sad_since_first"] == pytest.approx(flips / entries)


def test_a_run_killed_around_the_pruning_ends_with_the_same_bits(tmp_path, monkeypatch):
    """Pruned after step 7, checkpoints after 3, 6, 9 and 12: killed before the pruning, right after
    it, and later.
    """
    monkeypatch.setattr(models, "build", build_noisy)
    overrides = ("recipe=asp", "recipe.prune_at=0.58", "recipe.permute=true")
    overrides += ("model.exclude=[stem,head.*]",)
    alone = outcome(config(tmp_path / "alone", *overrides))
    sentences = [event["sentence"] for event in alone.events]
    assert any("input channels permuted of inner.0.weight" in each for each in sentences)
    for step in (5, 7, 10):
        cfg = config(tmp_path / f"cut{step}", *overrides)
        kill(cfg, TrainingSteps, "train_step", step)
        assert outcome(cfg) == alone
