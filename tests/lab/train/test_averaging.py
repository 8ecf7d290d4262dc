"""Averaging the weights of the last epochs: against means taken by hand, through sparse layers and
interruptions.
"""

from __future__ import annotations

import pytest
import torch
from runs import after_step, config, cut_off, finished, resumed
from safetensors.torch import load_file
from torch import nn

import nmrun
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train.weights import Average
from nmrun.sparsity import nm_mask

STEPS_AN_EPOCH, EPOCHS, LAST = 3, 4, 2


@pytest.mark.parametrize("recipe", ["dense", "sr_ste"])
def test_the_final_weights_are_the_mean_of_the_last_epochs(tmp_path, recipe):
    seen: list[dict[str, torch.Tensor]] = []

    def watch(loop):
        if loop.step % STEPS_AN_EPOCH == 0:
            dense = {weight.name: weight.dense for weight in loop.parts.handle.sparse}
            plain = dict(loop.parts.model.named_parameters())
            seen.append({name: tensor.detach().clone() for name, tensor in (plain | dense).items()})

    cfg = config(
        tmp_path, f"recipe={recipe}", f"trainer.average={LAST}", f"trainer.epochs={EPOCHS}"
    )
    with after_step(None, watch):
        finished(cfg)
    final = load_file(run_folder(cfg) / "model.safetensors")
    assert len(seen) == EPOCHS
    assert final.keys() == seen[0].keys()
    for name, tensor in final.items():
        mean = (seen[-2][name].double() + seen[-1][name].double()) / 2
        if recipe != "dense" and name.startswith("inner") and name.endswith("weight"):
            mean = mean * nm_mask(mean, "2:4", dim=1)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(seen[-1][name], final[name]) for name in final)


def test_an_interrupted_run_has_the_same_mean(tmp_path):
    """In the last epoch, when one was added already."""
    words = ("recipe=step", "recipe.switch=0.5", "trainer.average=2")
    resumed(tmp_path, *words, by=cut_off, steps=(10,))


def test_channels_that_change_places_are_averaged_with_themselves(tmp_path):
    """Nothing learns: the mean over epochs before and after the permutation is the network."""
    words = ("recipe=asp", "recipe.permute=true", "sparsity='1:4'", "model.channels=[8,16,16]")
    weights = []
    for last in (1, EPOCHS):
        cfg = config(tmp_path, *words, "optimizer.lr=1e-12", f"trainer.average={last}")
        assert any(
            "channels permuted of inner" in event["sentence"] for event in finished(cfg)["events"]
        )
        weights.append(load_file(run_folder(cfg) / "model.safetensors"))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_running_statistics_are_averaged_and_one_epoch_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    handle = nmrun.sparsify(model, torch.optim.SGD(model.parameters(), 0.1), "dense", exclude=None)
    average, single = Average(model, handle, 2), Average(model, handle, 1)
    for value in (1.0, 2.0, 6.0):
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(value)
        left = {1.0: 2, 2.0: 1, 6.0: 0}[value]
        average.add(left)
        single.add(left)
    single.apply()
    assert float(model[1].running_mean[0]) == 6.0
    average.apply()
    assert {
        float(value)
        for t in model.state_dict().values()
        if t.is_floating_point()
        for value in t.flatten()
    } == {4.0}
    assert int(model[1].num_batches_tracked) == 0
