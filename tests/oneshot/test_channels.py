"""Channel permutation before one-shot pruning: the same function, scores that masks keep more of,
and no channel that another block reads.
"""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

import nmrun
from nmrun import oneshot
from nmrun.lab.models.texts import GPTNetwork
from nmrun.oneshot.inputs import LayerMatrix, watched
from nmrun.oneshot.prune import free_channels, permute
from nmrun.patterns import Pattern
from nmrun.sparsity import check_nm, nm_mask
from nmrun.sparsity.select import select


def gpt() -> tuple[nn.Module, nn.Module, torch.Tensor, set[str]]:
    torch.manual_seed(0)
    model = GPTNetwork(vocabulary=17, context=12, layers=2, heads=2, width=16)
    return model, model.h[1], torch.randint(17, (3, 12)), {"h.1.mlp.c_proj.weight"}


def llama() -> tuple[nn.Module, nn.Module, torch.Tensor, set[str]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    moved = {"model.layers.1.mlp.down_proj.weight"}
    return model, model.model.layers[1], torch.randint(17, (3, 12)), moved


def residual() -> tuple[nn.Module, nn.Module, torch.Tensor, set[str]]:
    from torchvision.models.resnet import BasicBlock

    torch.manual_seed(0)
    model = nn.Sequential(*(BasicBlock(8, 8) for _ in range(2)), nn.Flatten(), nn.Linear(8 * 25, 3))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean), nn.init.uniform_(module.weight)
    return model, model[1], torch.randn(4, 8, 5, 5), {"1.conv2.weight"}


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(x)
    return getattr(out, "logits", out)


def every(model: nn.Module) -> set[int]:
    return {id(module) for module in model.modules()}


@pytest.mark.parametrize("make", [gpt, llama, residual], ids=lambda make: make.__name__)
def test_the_function_stays_and_the_masks_keep_more(make):
    model, block, x, expected = make()
    model.eval()
    inside = {id(module) for module in block.modules()}
    chosen = [c for c in select(model, Pattern(2, 4))[0] if id(c.module) in inside]
    stage = [LayerMatrix(c, [c.module]) for c in chosen]
    method, before = oneshot.build("ria", {}), logits(model, x)

    def grams():
        with watched(stage) as sums:
            logits(model, x)
        return sums

    def score(layer, gram):
        scores = method.scores(layer.matrix(), gram.diagonal().sqrt())
        return float((scores * nm_mask(scores, "2:4")).sum())

    first = grams()
    old = {layer.name: (layer.matrix().clone(), score(layer, first[layer.name])) for layer in stage}
    followed = dict(first)
    with torch.no_grad():
        permute(stage, followed, method, free_channels(block, model, every(model)))
    torch.testing.assert_close(logits(model, x), before)
    again = grams()
    for layer in stage:
        torch.testing.assert_close(followed[layer.name], again[layer.name], rtol=1e-4, atol=1e-4)
        columns_moved = not torch.equal(first[layer.name], followed[layer.name])
        assert columns_moved == (layer.name in expected), layer.name
        if columns_moved:
            assert score(layer, again[layer.name]) > old[layer.name][1] * 1.001
            assert not torch.equal(layer.matrix(), old[layer.name][0])


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria"])
def test_a_network_is_pruned_with_permuted_channels(method):
    model, _, x, _ = gpt()
    plain = copy.deepcopy(model)
    without = nmrun.prune(plain, [x], method).layers
    pruned = nmrun.prune(model, [x], method, permute=True).layers
    assert check_nm(model, "2:4", exclude="auto") == [layer["name"] for layer in pruned]
    for a, b in zip(pruned[:3], without[:3], strict=True):
        assert a["error"] == pytest.approx(b["error"], rel=1e-4)
    weight, before = model.h[0].mlp.c_proj.weight, plain.h[0].mlp.c_proj.weight
    assert not torch.equal(weight, before)
    if method == "magnitude":
        assert weight.abs().sum() > before.abs().sum()


def test_channels_that_others_have_too_stay():
    """Of a chain each block's outputs are the next one's inputs, and a tied weight is in two."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    assert free_channels(blocks[1], blocks, every(blocks)) == []
    pair = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert len(free_channels(pair, pair, every(pair))) == 1
    model = nn.ModuleDict({"pair": pair, "other": nn.Linear(8, 8)})
    model["other"].weight = pair[0].weight
    assert free_channels(pair, model, every(model)) == []


class Tapped(nn.Module):
    """Reads between the layers of its list, and branches, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.side = nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.layers[1](self.layers[0](x))
        return self.side(hidden.cumsum(-1)) + (self.layers[2](hidden) if x.sum() != 0 else 0.0)


def replaced() -> nn.Module:
    """Its class's forward would be traced, and says nothing of this one."""

    def reads_in_order(self, x):
        return self[2](self[1](self[0](x)).cumsum(-1))

    block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    block.forward = types.MethodType(reads_in_order, block)
    return block


@pytest.mark.parametrize("make", [Tapped, replaced])
def test_channels_that_a_module_reads_inside_another_stay(make):
    model, x = make(), torch.randn(50, 8)
    plain = copy.deepcopy(model)
    nmrun.prune(model, [x], "ria", exclude=(), permute=True)
    nmrun.prune(plain, [x], "ria", exclude=())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("permute", [False, True])
def test_a_scripted_part_takes_no_hooks(permute):
    plain, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(50, 8)
    traced = torch.jit.trace(nn.ReLU(), x)
    model = nn.Sequential(copy.deepcopy(plain[0]), traced, copy.deepcopy(plain[2]))
    nmrun.prune(model, [x], "ria", exclude=(), permute=permute)
    nmrun.prune(plain, [x], "ria", exclude=())  # nothing is known of what is scripted
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
