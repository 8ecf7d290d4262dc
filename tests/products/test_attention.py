"""Attention as a module: in bfloat16, and in float32 between numbers of bfloat16."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from operands import under_autocast
from torch import Tensor, nn
from torch.nn import functional

from nmrun import accelerate, optim, sparsify
from nmrun.fast import measurement
from nmrun.fast.cpu import probe
from nmrun.fast.measurement import FLOAT32, Times
from nmrun.lab.models.texts import GPTNetwork
from nmrun.products.attention import DotProductAttention


def operands(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).bfloat16().requires_grad_() for _ in range(3)]


def written_out(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """Softmax of scaled products, in float64."""
    queries, keys, values = (t.detach().double().requires_grad_() for t in (queries, keys, values))
    scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    z = scores.softmax(3) @ values
    z.sum().backward()
    return torch.stack([z.detach(), *(t.grad for t in (queries, keys, values))])


@pytest.mark.parametrize("causal", [False, True])
def test_in_float32_only_the_result_is_rounded(causal):
    inputs = operands(2, 3, 20, 16)
    exact, attention = written_out(*inputs, causal), DotProductAttention(causal)
    attention.in_float32 = True
    with torch.autocast("cpu", torch.bfloat16):
        z = attention(*inputs)
    z.sum().backward()
    results = torch.stack([z.detach(), *(t.grad for t in inputs)])
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(results, exact.bfloat16(), rtol=2**-7, atol=1e-3)


def test_else_it_is_torch_s(monkeypatch):
    inputs, attention = operands(2, 3, 20, 16), DotProductAttention(causal=True)
    torchs = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(attention(*inputs), torchs)
    attention.in_float32 = True
    assert not torch.equal(attention(*inputs), torchs)
    assert torch.equal(attention.eval()(*inputs), torchs)
    whole = [t.float() for t in inputs]
    torchs = functional.scaled_dot_product_attention(*whole, is_causal=True)
    assert torch.equal(attention.train()(*whole), torchs)


def gpt() -> GPTNetwork:
    torch.manual_seed(0)
    return GPTNetwork(vocabulary=20, context=16, layers=2, heads=2, width=32)


TOKENS = torch.arange(48).view(3, 16) % 20


def trained(model: nn.Module, forward: object = None) -> list[float]:
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            logits = (model if forward is None else forward)(TOKENS)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("faster", [FLOAT32, "dense"])
def test_a_run_takes_what_is_faster(faster, monkeypatch):
    measure = probe.measure

    def played(shape):
        times = measure(shape)
        assert all(taken.forward > 0 for taken in times.values())
        names = times if isinstance(shape, probe.AttentionShape) else ("dense",)
        return {name: Times(0, 1.0 + (name != faster), 1.0, 1.0) for name in names}

    monkeypatch.setattr(probe, "measure", played)
    model = gpt()
    plain = trained(copy.deepcopy(model))
    handle = sparsify(model, optim.AdamW(model.parameters()), "dense", total_steps=4, exclude=None)
    sample = under_autocast(model, TOKENS)
    choices = [c for c in accelerate(handle, sample) if "attend" in c.name]
    assert [c.name for c in choices] == ["h.0.attn.attend", "h.1.attn.attend"]
    assert {c.path for c in choices} == {FLOAT32 if faster == FLOAT32 else None}
    assert not any(c.is_sparse for c in choices)
    report = "\n".join(measurement.lines(choices))
    assert "causal attention in 2 heads of 16, 3 x 16 tokens, bfloat16: bfloat16 " in report
    losses = trained(copy.deepcopy(model))
    assert (losses == plain) == (faster == "dense")
    assert losses == pytest.approx(plain, rel=2e-2)
    accelerate(handle, sample, "off")
    assert trained(model) == plain


@pytest.mark.slow
def test_compiled_as_one_graph():
    model = gpt()
    for module in model.modules():
        if isinstance(module, DotProductAttention):
            module.in_float32 = True
    again = copy.deepcopy(model)
    expected = trained(model)
    whole = torch.compile(again, fullgraph=True, backend="aot_eager")
    assert trained(again, whole) == pytest.approx(expected, rel=1e-2)
