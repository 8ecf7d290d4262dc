"""Optimizers of torch and of other packages: each trains what it trains on dense weights by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from errors import one_line
from torch import Tensor, nn
from torch.func import functional_call
from training import batch, net

import nmrun
from nmrun.errors import ConfigError

STEPS, PRUNE_AT, DECAY = 6, 3, 0.1
SPARSE = ("0.weight", "2.weight")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def of(module: str, name: str, **options: Any) -> Make:
    """An optimizer of a package that may not be installed."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        package = pytest.importorskip(module, reason=f"needs {module}")
        return getattr(package, name)(parameters, **options)

    return make


def by_timm(name: str) -> Make:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        timm = pytest.importorskip("timm.optim", reason="needs timm: pip install '.[timm]'")
        optimizer: torch.optim.Optimizer = timm.create_optimizer_v2(parameters, name, lr=0.01)
        return optimizer

    return make


TORCH = {
    "SGD": {"momentum": 0.9}, "AdamW": {}, "Adam": {"amsgrad": True}, "NAdam": {}, "RAdam": {},
    "RMSprop": {}, "Adagrad": {}, "Adadelta": {}, "Adamax": {}, "Adafactor": {}, "ASGD": {},
    "Rprop": {},
}  # fmt: skip
OPTIMIZERS: dict[str, Make] = {
    **{name: of("torch.optim", name, lr=0.01, **options) for name, options in TORCH.items()},
    "AdamW foreach": of("torch.optim", "AdamW", lr=0.01, foreach=True),
    "AdamW fused": of("torch.optim", "AdamW", lr=0.01, fused=True),
    "SGD fused": of("torch.optim", "SGD", lr=0.01, momentum=0.9, fused=True),
    "transformers Adafactor": of("transformers.optimization", "Adafactor"),
    "lion_pytorch": of("lion_pytorch", "Lion", lr=0.01),
    **{
        f"timm {name}": by_timm(name)
        for name in (
            "adabelief", "adafactorbv", "adan", "adopt", "lamb", "laprop", "lars", "lion", "madgrad",
            "mars", "muon", "nadamw", "novograd", "rmsproptf", "sgdp", "sgdw",
        )
    },
    **{
        f"pytorch_optimizer {name}": of("pytorch_optimizer", name, lr=0.01)
        for name in ("SOAP", "Shampoo", "Lion", "AdEMAMix", "Prodigy", "MADGRAD")
    },
    "pytorch_optimizer Ranger21": of(
        "pytorch_optimizer", "Ranger21", lr=0.01, num_iterations=STEPS
    ),
}  # fmt: skip


def loss(model: nn.Module, weights: dict[str, Tensor], step: int) -> Tensor:
    out: Tensor = functional_call(model, weights, (batch(step).double(),)).square().mean()
    return out


def by_hand(make: Make, recipe: str) -> dict[str, Tensor]:
    """The optimizer moves dense weights, and the network computes with projections of them."""
    model = net().double()
    dense = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = make(list(dense.values()))
    masks: dict[str, Tensor] = {}
    scales = {}
    for name in SPARSE:
        soft = reference.soft(dense[name].detach())
        scales[name] = (dense[name].detach() * soft).sum() / soft.square().sum()

    def projected(name: str) -> Tensor:
        w = dense[name].detach()
        if name not in SPARSE or (recipe == "asp" and name not in masks):
            return w
        if recipe == "s_ste":
            return scales[name] * reference.soft(w)
        return w * (masks[name] if recipe == "asp" else reference.mask_of(w))

    for step in range(STEPS):
        if recipe == "asp" and step == PRUNE_AT:
            masks = {name: reference.mask_of(dense[name].detach()) for name in SPARSE}
        used = {name: projected(name).clone().requires_grad_() for name in dense}
        grads = torch.autograd.grad(loss(model, used, step), list(used.values()))
        for (name, p), grad in zip(dense.items(), grads, strict=True):
            if name in SPARSE and recipe == "sr_ste":
                grad = torch.add(grad, reference.pruned(p.detach()), alpha=DECAY)
            if name in masks:
                grad = grad * masks[name]
                p.data.mul_(masks[name])
            p.grad = grad
        optimizer.step()
    return {name: projected(name) for name in dense}


# torch's meet every recipe, those of other packages one in turn
MEETINGS = [
    (name, recipe)
    for i, name in enumerate(OPTIMIZERS)
    for j, recipe in enumerate(("sr_ste", "asp", "s_ste"))
    if name.split()[0] in TORCH or i % 3 == j
]


@pytest.mark.parametrize(("name", "recipe"), MEETINGS)
def test_an_optimizer_moves_the_dense_weights(name, recipe):
    make = OPTIMIZERS[name]
    model = net().double()
    optimizer = make(list(model.parameters()))
    options = {"sr_ste": {"decay": DECAY}, "asp": {"prune_at": PRUNE_AT / STEPS}}
    handle = nmrun.sparsify(
        model, optimizer, recipe, "2:4", STEPS, exclude="4", **options.get(recipe, {})
    )
    for step in range(STEPS):
        loss(model, dict(model.named_parameters()), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.recipe.step == STEPS
    assert not handle.pop_events() or recipe == "asp"
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude="4")
    expected = by_hand(make, recipe)
    start = net().double().get_parameter("0.weight")
    assert not torch.allclose(model.get_parameter("0.weight"), start)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of("schedulefree", "AdamWScheduleFree", lr=0.01), "between train() and eval()"),
        (of("pytorch_optimizer", "ScheduleFreeAdamW", lr=0.01), "between train() and eval()"),
        (of("pytorch_optimizer", "SAM", base_optimizer=torch.optim.SGD, lr=0.01), "two backward"),
        (by_timm("lookahead_sgd"), "not made by torch's constructor"),
    ],
)
def test_who_moves_weights_otherwise_is_refused(make, message):
    model = net()
    with one_line(ConfigError, re.escape(message)):
        nmrun.sparsify(model, make(list(model.parameters())), "sr_ste", "2:4", exclude=None)
