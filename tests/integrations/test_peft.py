"""A merge of peft's adapters into an N:M model, against its equation."""

from __future__ import annotations

import torch
from errors import one_line
from lazily import Lazily, needs

import nmrun
from nmrun.errors import ConfigError

pytestmark = needs("integrations", "peft", "transformers")
hf, peft, ours = Lazily("hf"), Lazily("peft"), Lazily("nmrun.integrations.peft")
ADAPTED = ["c_attn", "c_fc", "mlp.c_proj"]


def adapted(prunes: bool):
    """GPT-2 with drawn adapters, pruned or not, and the weights of before."""
    model = hf.gpt2()
    if prunes:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = nmrun.sparsify(model, optimizer, "asp", "2:4", 2, prune_at=0, exclude=None)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        handle.finalize()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model, before


def test_a_merge_keeps_the_zeros():
    model, before = adapted(True)
    products = {}
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
            products[f"{name}.weight"] = (2 * up @ down).detach().T  # alpha / rank
    merged = ours.merge(model, "2:4")
    assert len(products) == 6
    nmrun.sparsity.check_nm(merged, "2:4", exclude=None)
    for name, parameter in merged.named_parameters():
        expected = before[name]
        if name in products:
            expected = expected + products[name] * (expected != 0)
        torch.testing.assert_close(parameter.detach(), expected)


def test_a_merge_into_a_dense_model_or_a_second_one_is_refused():
    model, _ = adapted(False)
    with one_line(ConfigError, r"no layer with an adapter is 2:4: .* merge_and_unload"):
        ours.merge(model)
    model, _ = adapted(True)
    model.merge_adapter()
    with one_line(ConfigError, r"has its adapter merged already: call unmerge_adapter\(\) first"):
        ours.merge(model)


def test_a_merge_keeps_the_zeros_of_a_short_last_group():
    model = torch.nn.Sequential(torch.nn.Linear(8, 22), torch.nn.Linear(22, 16))
    nmrun.prune(model, [torch.randn(64, 8)], "magnitude", "2:4", pad=True, exclude=None)
    zeros = [layer.weight == 0 for layer in model]
    options = {"target_modules": ["0", "1"], "init_lora_weights": False}
    merged = ours.merge(peft.get_peft_model(model, peft.LoraConfig(r=2, **options)), "2:4")
    for layer, expected in zip(merged, zeros, strict=True):
        assert torch.equal(layer.weight == 0, expected)
