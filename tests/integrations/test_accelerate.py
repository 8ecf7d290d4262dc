"""A loop of accelerate: before or after ``prepare``, accumulation, save_state and load_state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import OPTIONS, TOTAL, attach, batch, bits, everything, net

import nmrun

accelerate = pytest.importorskip("accelerate", reason="needs pip install '.[huggingface]'")
MICRO = 3


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Its state is shared by all of a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return nmrun.optim.AdamW(model.parameters(), lr=0.02)


def rows() -> list[torch.Tensor]:
    return [part for step in range(TOTAL) for part in batch(step)[:6].chunk(MICRO)]


def prepared(recipe: str, first: bool, **options: Any) -> Any:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO, **options)
    model = net()
    optimizer = adamw(model)
    handle = attach(model, optimizer, recipe) if first else None
    loader = DataLoader(rows(), batch_size=None)
    net_, optimizer_, loader = accelerator.prepare(model, optimizer, loader)
    handle = handle or attach(model, optimizer_, recipe)
    return accelerator, net_, optimizer_, loader, handle


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, _: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def plain(recipe: str) -> Any:
    model = net()
    optimizer = adamw(model)
    handle = attach(model, optimizer, recipe)
    for number, x in enumerate(rows()):
        (model(x).square().mean() / MICRO).backward()
        if number % MICRO == MICRO - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, handle


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("recipe", ["sr_ste", "step", "s_ste", "asp"])
def test_the_weights_of_a_plain_loop(recipe, first):
    loop = prepared(recipe, first)
    train(*loop)
    accelerator, model, optimizer, _, handle = loop
    assert handle.recipe.step == TOTAL
    actual = everything(accelerator.unwrap_model(model), optimizer.optimizer, handle)
    assert actual == everything(*plain(recipe))
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude="4")


@pytest.mark.parametrize("recipe", ["sr_ste", "step", "s_ste", "asp"])
@pytest.mark.parametrize("stop", [2, 7])
def test_load_state_resumes_with_the_same_bits(recipe, stop, tmp_path):
    whole = prepared(recipe, first=False)
    accelerator, model, optimizer, loader, handle = whole
    train(accelerator, model, optimizer, list(loader)[: stop * MICRO], handle)
    accelerator.save_state(tmp_path)
    rest = list(loader)[stop * MICRO :]
    train(accelerator, model, optimizer, rest, handle)
    accelerate.state.AcceleratorState._reset_state(True)
    again = prepared(recipe, first=False)
    again[0].load_state(tmp_path)
    assert again[4].recipe.step == stop
    train(*again[:3], rest, again[4])
    assert bits(again[1].state_dict()) == bits(model.state_dict())
    assert bits(again[2].state_dict()) == bits(optimizer.state_dict())


def test_the_line_for_step_names_the_optimizer_inside():
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"torch\.optim\.adamw\.AdamW cannot: use nmrun\.optim"):
        attach(model, optimizer, "step", **OPTIONS["step"])
