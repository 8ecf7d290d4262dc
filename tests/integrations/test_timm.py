"""timm's parts of a training script: scaler, layer decay, averages, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import reference
import torch
from lazily import Lazily, needs
from torch import Tensor, nn
from training import bits

import nmrun

pytestmark = needs("timm", "timm")
timm, optim, utils = Lazily("timm"), Lazily("timm.optim"), Lazily("timm.utils")
STEPS = 6
EXCLUDE = r"patch_embed\.proj|head"


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=4, num_classes=4, embed_dim=16,
        depth=2, num_heads=2,
    )  # fmt: skip
    return model


def images(step: int) -> Tensor:
    return torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    options = {"lr": 0.01, "weight_decay": 0.05, "layer_decay": 0.8}
    optimizer: torch.optim.Optimizer = optim.create_optimizer_v2(model, name, **options)
    return optimizer


def sparse(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> nmrun.Handle:
    return nmrun.sparsify(model, optimizer, recipe, "2:4", STEPS, exclude=EXCLUDE)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    for step in numbers:
        model(images(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("sr_ste", "adamw"), ("asp", "sgd"), ("asp", "lamb"), ("sr_ste", "muon"), ("asp", "adafactorbv")],
)  # fmt: skip
def test_its_scaler_changes_no_bit(recipe, name):
    """With two micro-batches a step, and the learning rates of layer decay."""
    weights = []
    for scaled in (False, True):
        model = vit()
        optimizer = optimizer_of(model, name)
        assert len({group["lr_scale"] for group in optimizer.param_groups}) == 4
        handle, scaler = sparse(model, optimizer, recipe), utils.NativeScaler("cpu")
        for number in range(2 * STEPS):
            loss, last = model(images(number)).square().mean() / 2, number % 2 == 1
            if scaled:
                parameters = list(model.parameters())
                scaler(loss, optimizer, clip_grad=0.5, parameters=parameters, need_update=last)
            else:
                loss.backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
            if last:
                optimizer.zero_grad()
        assert handle.recipe.step == STEPS
        assert len(handle.sparse) == 8
        handle.finalize()
        nmrun.sparsity.check_nm(model, "2:4", exclude=EXCLUDE)
        weights.append(bits(model.state_dict()))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("first", [True, False])
def test_its_average_made_before_or_after(first):
    """Dense weights are averaged; the average is projected."""
    model = vit()
    optimizer = optimizer_of(model)
    average = utils.ModelEmaV3(model, decay=0.5) if first else None
    handle = sparse(model, optimizer, "sr_ste")
    if average is None:
        with handle.dense_weights():
            average = utils.ModelEmaV3(model, decay=0.5)
    mean = {w.name: w.dense.clone() for w in handle.sparse}
    for step in range(STEPS):
        steps(model, optimizer, [step])
        with handle.dense_weights():
            average.update(model)
        for weight in handle.sparse:
            mean[weight.name].lerp_(weight.dense, 0.5)
    handle.finalize(average.module)
    assert len(mean) == 8
    for name, dense in mean.items():
        expected = dense * reference.mask_of(dense)
        torch.testing.assert_close(average.module.get_parameter(name).detach(), expected)


@pytest.mark.parametrize("stop", [2, 4])
def test_its_checkpoints_are_read_by_a_plain_model_and_resume(stop, tmp_path):
    """In and after ASP's dense phase."""
    model = vit()
    optimizer = optimizer_of(model)
    saver = utils.CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path))
    handle = sparse(model, optimizer, "asp")
    steps(model, optimizer, range(stop))
    saver.save_checkpoint(0, metric=0.0)
    now = copy.deepcopy(bits(model.state_dict()))
    steps(model, optimizer, range(stop, STEPS))
    again = vit()
    nn.init.zeros_(again.get_parameter("head.weight"))
    timm.models.load_checkpoint(again, str(tmp_path / "last.pth.tar"))
    assert bits(again.state_dict()) == now
    if stop == 4:
        nmrun.sparsity.check_nm(again, "2:4", exclude=EXCLUDE)
    other = optimizer_of(again)
    state = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    other.load_state_dict(state["optimizer"])
    second = sparse(again, other, "asp")
    assert second.recipe.step == stop
    steps(again, other, range(stop, STEPS))
    assert bits(again.state_dict()) == bits(model.state_dict())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    assert handle.recipe.step == second.recipe.step == STEPS
