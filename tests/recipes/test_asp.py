"""ASP's pruned weights stay at 0, whatever the optimizer's momentum wants."""

import pytest
import torch
from training import TOTAL, attach, batch, net

import nmrun


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_pruned_weights_stay_zero(kind, fused):
    model = net()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1, fused=fused)
    else:
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    handle = attach(model, optimizer, "asp")
    momentum, before = 0.0, {}
    for step in range(TOTAL):
        handle.measure_flips = True
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < TOTAL // 2 - 1:
            assert handle.phase == "dense"
            continue
        for weight in handle.sparse:
            pruned = ~weight["mask"]
            assert not weight.dense[pruned].any()
            assert int(pruned.sum()) == weight.dense.numel() // 2
            state = optimizer.state[weight.parameter]
            moment = state["momentum_buffer" if kind == "sgd" else "exp_avg"]
            momentum += float(moment[pruned].abs().sum())
            if weight.name in before:  # no gradient comes to them any more
                faded = 0.9 * before[weight.name]
                torch.testing.assert_close(moment[pruned], faded, rtol=1e-5, atol=1e-9)
            before[weight.name] = moment[pruned].clone()
        if step >= TOTAL // 2:
            assert handle.metrics()["sparsity/kept_energy"] == 1.0
            assert handle.metrics()["sparsity/pruned_norm"] == 0.0
    assert momentum > 0  # which would have moved them
