"""Mixtures of experts: each expert against pruning by hand with the tokens that the router sends to
it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import nmrun
from nmrun import oneshot
from nmrun.patterns import Pattern
from nmrun.sparsity import check_nm

transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")


def mixture(experts: int = 4, kind: str = "Mixtral") -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, num_local_experts=experts, num_experts_per_tok=2,
        head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.normal_(std=0.3)
    return model


def batches(count: int = 3, length: int = 12) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(40, (2, length), generator=g)} for _ in range(count)]


def sent(model, inputs) -> list[list[torch.Tensor]]:
    """The tokens (tokens, 16) of each expert of the first block, of all batches."""
    by_expert: list[list[torch.Tensor]] = [[] for _ in model.model.layers[0].mlp.experts.down_proj]

    def keep(module, args):
        hidden, chosen = args[0], args[1]
        for expert, tokens in enumerate(by_expert):
            tokens.append(hidden[(chosen == expert).any(-1)])

    hook = model.model.layers[0].mlp.experts.register_forward_pre_hook(keep)
    with torch.no_grad():
        for batch in inputs:
            model(**batch)
    hook.remove()
    return by_expert


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_each_expert_by_the_tokens_that_it_gets(kind, method, few):
    """GPT-OSS has matrices (inputs, outputs), biases and a gate of its own."""
    model, inputs = mixture(8 if few else 4, kind).eval(), batches()
    if few:
        inputs = [{"input_ids": inputs[0]["input_ids"][:1, :2]}]
    dense, rule, pattern = copy.deepcopy(model), oneshot.build(method, {}), Pattern(2, 4)
    implementation = model.config._experts_implementation
    pruned = nmrun.prune(model, inputs, method)
    assert model.config._experts_implementation == implementation
    names = [layer["name"] for layer in pruned.layers]
    assert check_nm(model, "2:4", exclude="auto") == names
    assert sum("experts" in name for name in names) == 4
    ours, theirs = (net.model.layers[0].mlp.experts for net in (model, dense))
    unreached = 0
    for expert, tokens in enumerate(sent(dense, inputs)):
        x = torch.cat(tokens).detach()
        if kind == "Mixtral":
            gate, up = functional.linear(x, theirs.gate_up_proj[expert]).chunk(2, dim=-1)
            gated = functional.silu(gate) * up
        else:
            gated = theirs._apply_gate(
                x @ theirs.gate_up_proj[expert] + theirs.gate_up_proj_bias[expert]
            )
        for ours_of, theirs_of, seen in (
            (ours.gate_up_proj[expert], theirs.gate_up_proj[expert], x),
            (ours.down_proj[expert], theirs.down_proj[expert], gated.detach()),
        ):
            if kind == "GptOss":
                ours_of, theirs_of = ours_of.T, theirs_of.T
            weight = theirs_of.detach()
            gram = seen.T @ seen if len(seen) else torch.eye(weight.shape[1])
            expected = rule.prune(weight, gram, pattern)
            torch.testing.assert_close(ours_of.detach(), expected, rtol=1e-4, atol=1e-6)
            assert torch.equal(ours_of == 0, expected == 0)
        unreached += not len(x)
    assert bool(unreached) == few


def test_the_error_is_that_of_all_experts_together():
    model, inputs = mixture(), batches()
    dense = copy.deepcopy(model).eval()
    pruned = nmrun.prune(model, inputs, "magnitude")
    change = output = 0.0
    ours, theirs = (net.model.layers[0].mlp.experts.gate_up_proj for net in (model, dense))
    for expert, tokens in enumerate(sent(dense, inputs)):
        x = torch.cat(tokens)
        change += float((x @ (ours[expert] - theirs[expert]).T).square().sum().detach())
        output += float((x @ theirs[expert].T).square().sum().detach())
    (layer,) = (x for x in pruned.layers if x["name"].endswith("layers.0.mlp.experts.gate_up_proj"))
    assert layer["error"] == pytest.approx(change / output, rel=1e-4)
