"""``nmrun.prune`` on whole networks: against pruning by hand, block by block through the network;
convolutions against their outputs; what is left dense, and why; memory; mistakes.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import nmrun
from nmrun import oneshot
from nmrun.errors import ConfigError, RunError
from nmrun.lab.models.texts import GPTNetwork
from nmrun.patterns import Pattern
from nmrun.sparsity import check_nm


def gpt(layers: int = 3) -> GPTNetwork:
    torch.manual_seed(0)
    return GPTNetwork(vocabulary=17, context=12, layers=layers, heads=2, width=16)


def tokens(batches: int = 3, vocabulary: int = 17, length: int = 12) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (2, length), generator=g) for _ in range(batches)]


def by_hand(model, blocks, batches, method, forward=lambda model, batch: model(batch)):
    """Block by block: all inputs of its linear layers by passes through the whole network, then
    their weights."""
    model.eval()
    for block in blocks:
        layers = [m for m in block.modules() if isinstance(m, nn.Linear) or hasattr(m, "nf")]
        seen = {layer: [] for layer in layers}

        def keep(layer, args, out, seen=seen):
            # a copy, as a block may add to it in place
            seen[layer].append(args[0].flatten(0, -2).to(torch.float32, copy=True))

        hooks = [layer.register_forward_hook(keep) for layer in layers]
        with torch.no_grad():
            for batch in batches:
                forward(model, batch)
        for hook in hooks:
            hook.remove()
        for layer, inputs in seen.items():
            gram = sum(x.T @ x for x in inputs)
            weight = layer.weight.detach()
            weight = weight.T if hasattr(layer, "nf") else weight
            pruned = oneshot.build(method, {}).prune(weight, gram, Pattern(2, 4))
            weight.copy_(pruned)
    return model


@pytest.mark.parametrize("method", oneshot.METHODS)
def test_blocks_one_by_one_are_the_whole_network_in_order(method):
    expected = gpt()
    by_hand(expected, expected.h, tokens(), method)
    model = gpt().train()
    calls = []
    for number, block in enumerate(model.h):
        block.register_forward_hook(lambda m, args, out, number=number: calls.append(number))
    pruned = nmrun.prune(model, tokens(), method)
    bound = 1e-6 if method == "sparsegpt" else 0
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=bound)
    assert [layer["name"] for layer in pruned.layers] == [
        f"h.{i}.{name}.weight"
        for i in range(3)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert check_nm(model, "2:4", exclude="auto") == [layer["name"] for layer in pruned.layers]
    assert all(part.training for part in model.modules())
    # one pass for the order of calls, one that finds the inputs, each batch once more by the blocks
    # alone (the last is not needed), then each block dense and, but for the last, pruned
    found = 2 * [0, 1, 2] + [0, 1] + [0, 1, 2] + 2 * [0, 1]
    assert calls == [0, 1, 2] + found + 6 * [0] + 6 * [1] + 3 * [2]


def test_without_blocks_layers_come_one_by_one():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    expected = copy.deepcopy(model)
    batches = [torch.randn(20, 8) for _ in range(2)]
    by_hand(expected, list(expected), batches, "sparsegpt")
    pruned = nmrun.prune(model, batches, exclude=())
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert str(pruned).splitlines()[0].startswith("0.weight  2:4  output error 0.")
    assert pruned.report()["density"] == 0.5


class Stack(nn.Module):
    """Blocks that are a chain, or are none by how they use the outputs of earlier ones."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(kind, shared) for _ in range(3))
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(3 * (kind == "layer")))
        self.kind = kind

    def forward(self, x):
        bias = None
        start = x
        for number, block in enumerate(self.blocks):
            if self.kind == "bias":  # as T5's: made by the first block, for all
                x, bias = block(x, bias)
            elif self.kind == "between":
                x = block(x * 2.0)
            elif self.kind == "order":
                x = x + self.blocks[-1 - number](start)
            elif self.kind == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = block(x if number else x.bfloat16())
            elif self.kind == "attribute":  # as Swin's, the size of an image
                block.scale = start.mean()
                x = block(x)
            elif self.kind == "sizes":  # likewise, of the first and the last batch the same
                block.scale = start.shape[0]
                x = block(x)
            elif self.kind == "layer":
                x = block(x, self.between[number](start))
            elif self.kind == "twice":
                x = block(x)
                x = self.blocks[0](x) if number == 2 else x
            else:
                x = block(hidden=x)
        return x


class Block(nn.Module):
    def __init__(self, kind: str, shared: nn.Module):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind
        if kind == "shared":
            self.shared = shared

    def forward(self, hidden, bias=None):
        out = self.down(functional.gelu(self.up(hidden)))
        if self.kind == "bias":
            bias = out * 0.1 if bias is None else bias
            return hidden + out + bias, bias
        if self.kind == "shared":
            out = out + self.shared(out)
        if self.kind == "layer":
            out = out * bias
        if self.kind in ("attribute", "sizes"):
            out = out * self.scale
        if self.kind == "in_place":
            hidden += out
            return hidden
        return hidden + out


@pytest.mark.parametrize(
    "kind",
    ["bias", "between", "order", "autocast", "attribute", "sizes", "layer", "twice", "shared", "in_place", "by_name"],
)  # fmt: skip
def test_blocks_of_any_kind_give_what_whole_passes_give(kind):
    """Where what a block takes is not what the one before gave, passes go through the network."""
    batches = [torch.randn(size, 5, 8) for size in (4, 7, 5, 4)]
    model, expected = Stack(kind), Stack(kind)
    # whoever is called first is pruned first
    in_order = list(reversed(expected.blocks) if kind == "order" else expected.blocks)
    if kind == "layer":
        made = (nn.ModuleList([layer]) for layer in expected.between)
        in_order = [part for pair in zip(made, in_order, strict=True) for part in pair]
    if kind == "shared":  # by what all blocks give it
        in_order = [nn.ModuleList([block.up, block.down]) for block in in_order]
        in_order.insert(1, nn.ModuleList([expected.blocks[0].shared]))
    clones = [batch.clone() for batch in batches]
    copied = lambda model, batch: model(batch.clone())  # noqa: E731
    method = "sparsegpt" if kind == "layer" else "wanda"  # the masks are the same there
    by_hand(expected, in_order, clones, method, copied)
    calls = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    nmrun.prune(model, batches, method, exclude=(), forward=copied)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if method == "wanda" else 1e-6)
    in_chain = 3 + 4 * (3 + 2) + 2 * 8 + 4
    assert (len(calls) == in_chain) == (kind in ("in_place", "by_name"))


class Tied(nn.Module):
    """Two layers with one weight, and inputs of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).square() * torch.arange(8.0))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_tied_weight_by_the_inputs_of_all_its_layers(method):
    model, x = Tied(), torch.randn(20, 8)
    inputs, weight = [x], model.first.weight.detach().clone()
    with torch.no_grad():
        model.second.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        model(x)
    both = torch.cat(inputs)
    expected = oneshot.build(method, {}).prune(weight, both.T @ both, Pattern(2, 4))
    pruned = nmrun.prune(model, [x], method, exclude=())
    torch.testing.assert_close(model.first.weight.detach(), expected)
    assert model.second.weight is model.first.weight
    before, after = both @ weight.T, both @ expected.T
    error = float((after - before).square().sum() / before.square().sum())
    assert pruned.layers[0]["error"] == pytest.approx(error, rel=1e-4)


def test_a_compiled_model_that_was_called():
    """Its graph has no place for hooks that come later."""
    model, plain, x = Stack("by_name").eval(), Stack("by_name"), torch.randn(4, 5, 8)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
    nmrun.prune(compiled, [x], "wanda", exclude=())
    nmrun.prune(plain, [x], "wanda", exclude=())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_torch_s_encoder_with_padding():
    """In evaluation torch computes it past its layers, from nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    batch = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padding}
    report = nmrun.prune(model, [batch], "wanda", exclude=()).report()
    names = [f"layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)]
    assert [x["name"] for x in report["layers"]] == names
    assert torch.backends.mha.get_fastpath_enabled()


def layouts():
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    gpt2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
    return transformers, {
        "GPT2": gpt2, "Llama": small, "Qwen2": small, "Qwen3": small, "Mistral": small, "Phi": {**small, "num_key_value_heads": 2},
        "Gemma2": {**small, "head_dim": 8, "sliding_window": 4},
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Phi", "Gemma2"])
def test_networks_of_hugging_face(kind):
    transformers, options = layouts()
    config = transformers.AutoConfig.for_model(kind.lower(), **options[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    expected = copy.deepcopy(model)
    blocks = {"GPT2": "transformer.h"}.get(kind, "model.layers")
    batches = [{"input_ids": batch} for batch in tokens(3, 40)]
    by_hand(expected, expected.get_submodule(blocks), batches, "wanda", lambda m, b: m(**b))
    calls = []
    for block in model.get_submodule(blocks):
        block.register_forward_hook(lambda *_: calls.append(1))
    pruned = nmrun.prune(model, batches, "wanda")
    assert len(calls) == 3 + 3 * (3 + 2) + 2 * 6 + 3
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert check_nm(model, "2:4", exclude="auto") == [layer["name"] for layer in pruned.layers]
    assert all(layer["name"].startswith(blocks) for layer in pruned.layers)
    assert model.config.use_cache  # as it was


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"padding": "same", "dilation": 2},
        {"padding": (1, 2), "padding_mode": "circular"},
        {"kernel_size": (1, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_convolutions_by_their_outputs(options, method):
    """The error that is reported is that of the convolution itself."""
    conv = nn.Conv2d(8, 4, **{"kernel_size": 3, **options}).double()
    before, x = copy.deepcopy(conv), torch.randn(5, 8, 9, 7, dtype=torch.float64).relu()
    pruned = nmrun.prune(nn.Sequential(conv), [x], method, exclude=())
    check_nm(conv.weight, "2:4")
    bias = conv.bias[:, None, None]
    change, output = conv(x) - before(x), before(x) - bias
    expected = float((change.square().sum() / output.square().sum()).detach())
    assert pruned.layers[0]["error"] == pytest.approx(expected, rel=1e-9)
    if method == "wanda":  # the norm of an input at a kernel position, over all output positions
        one = torch.zeros_like(before.weight)
        norms = torch.zeros_like(before.weight[0])
        for place in range(norms.numel()):
            one.zero_()[0].view(-1)[place] = 1.0
            probe = copy.deepcopy(before)
            probe.weight.data, probe.bias.data = one, torch.zeros_like(before.bias)
            norms.view(-1)[place] = probe(x)[:, 0].norm()
        mask = nmrun.sparsity.nm_mask(before.weight * norms, "2:4")
        assert torch.equal(conv.weight, torch.where(mask, before.weight, 0.0))


def test_a_convolution_over_time_and_short_groups():
    conv = nn.Conv1d(6, 4, 3, stride=2, padding=1).double()
    before, x = copy.deepcopy(conv), torch.randn(5, 6, 11, dtype=torch.float64)
    pruned = nmrun.prune(nn.Sequential(conv), [x], exclude=(), pad=True)
    check_nm(conv.weight, "2:4", pad=True)
    assert (conv.weight[:, 4:] != 0).all()  # groups of two keep both
    change, output = conv(x) - before(x), before(x) - conv.bias[:, None]
    expected = float((change.square().sum() / output.square().sum()).detach())
    assert pruned.layers[0]["error"] == pytest.approx(expected, rel=1e-9)


def test_convolutional_blocks():
    from torchvision.models.resnet import BasicBlock

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), *(BasicBlock(16, 16) for _ in range(3)), nn.AdaptiveAvgPool2d(1)]
    blocks = nn.Sequential(*layers[1:4])
    model = nn.Sequential(layers[0], blocks, layers[4], nn.Flatten(), nn.Linear(16, 3))
    pruned = nmrun.prune(model, [torch.randn(4, 3, 12, 12)], "sparsegpt")
    assert [layer["name"] for layer in pruned.layers] == [
        f"1.{block}.conv{number}.weight" for block in range(3) for number in (1, 2)
    ]
    assert check_nm(model, "2:4", exclude="auto") == [layer["name"] for layer in pruned.layers]
    assert all(0 < layer["error"] < 0.5 for layer in pruned.layers)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.groups = nn.Conv1d(8, 8, 1, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rare = nn.Linear(8, 8)
        self.wide = nn.Linear(6, 8)

    def forward(self, x):
        x = self.first(x)
        x = self.attention(x, x, x)[0]
        return self.groups(x.transpose(1, 2)).transpose(1, 2) if x.shape[1] else self.rare(x)


def test_what_is_left_dense_is_said():
    pruned = nmrun.prune(Odd(), [torch.randn(2, 3, 8)], "wanda", exclude=())
    assert [layer["name"] for layer in pruned.layers] == ["first.weight"]
    assert {dense.name: dense.reason for dense in pruned.left_dense} == {
        "wide.weight": "6 inputs are not a multiple of 4 (the option pad allows that)",
        "groups.weight": "a convolution in groups, each with inputs of its own",
        "attention.in_proj_weight": "the inputs of MultiheadAttention cannot be seen (of linear layers, Conv1d and Conv2d they can)",
        "attention.out_proj.weight": "no calibration input reached it",
        "rare.weight": "no calibration input reached it",
    }  # fmt: skip


def test_memory_is_that_of_one_block():
    """Hidden states that are alive while a block works: one of each batch, and those in work."""
    model, batches = gpt(layers=6), tokens(batches=8)
    alive = []

    def count(*_):
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        hidden = [t for t in tensors if t.shape == (2, 12, 16)]
        square = [t for t in tensors if t.dim() == 2 and t.shape[0] == t.shape[1]]
        grams = [t for t in square if t.dtype.is_floating_point]
        alive.append((len({t.untyped_storage().data_ptr() for t in hidden}), len(grams)))

    for block in model.h:
        block.mlp.register_forward_hook(count)
    gc.collect()
    gc.freeze()  # what is there already is neither searched nor counted: seconds a call otherwise
    try:
        nmrun.prune(model, batches, "wanda")
    finally:
        gc.unfreeze()
    assert max(hidden for hidden, _ in alive) <= 8 + 7  # not 8 for each of the blocks
    assert max(grams for _, grams in alive) <= 4 + 1  # the four layers of a block
    assert min(hidden for hidden, _ in alive) > 0 < max(grams for _, grams in alive)


def test_other_dtypes_and_autocast():
    model = gpt().bfloat16()
    pruned = nmrun.prune(model, tokens())
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())
    assert check_nm(model, "2:4", exclude="auto")
    assert max(layer["error"] for layer in pruned.layers) < 1
    model = gpt()
    with torch.autocast("cpu", torch.bfloat16):
        low = nmrun.prune(model, tokens())
    plain = nmrun.prune(gpt(), tokens())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for a, b in zip(low.layers, plain.layers, strict=True):
        assert a["error"] == pytest.approx(b["error"], rel=0.1)


@pytest.mark.parametrize("permute", [False, True])
def test_within_autocast_the_pruned_weights_compute(permute):
    """Autocast keeps its casts of the weights, also of those that are pruned since."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    model, x = nn.Sequential(*layers), torch.randn(64, 8)
    each = copy.deepcopy(model)

    @torch.no_grad()
    def forward(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    options = {"exclude": (), "permute": permute}
    with torch.autocast("cpu", torch.bfloat16):
        nmrun.prune(model, [x], "ria", "1:4", **options)
        with torch.no_grad():
            inside = model(x)
    assert torch.equal(inside, forward(model, x))
    nmrun.prune(each, [x], "ria", "1:4", forward=forward, **options)
    assert all(map(torch.equal, model.parameters(), each.parameters()))


def test_inputs_without_a_batch_are_tokens():
    model, rows = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(20, 8)
    alone, together = copy.deepcopy(model), copy.deepcopy(model)
    nmrun.prune(alone, list(rows), "wanda", exclude=(), pad=True)
    nmrun.prune(together, [rows], "wanda", exclude=(), pad=True)
    for layer, other in zip(alone[::2], together[::2], strict=True):
        assert torch.equal(layer.weight, other.weight)


def test_overrides_and_include():
    model = gpt()
    overrides = {r".*c_fc": "1:8", r"h\.0\..*": "dense"}
    pruned = nmrun.prune(model, tokens(), include=r"h\.\d.*", overrides=overrides)
    ratios = {layer["name"]: layer["pattern"] for layer in pruned.layers}
    assert ratios["h.1.mlp.c_fc.weight"] == "1:8"
    assert ratios["h.2.attn.c_attn.weight"] == "2:4"
    assert [n for n in ratios if n.startswith("h.0")] == ["h.0.mlp.c_fc.weight"]
    for layer in pruned.layers:
        check_nm(model.get_parameter(layer["name"]), layer["pattern"])


def test_asp_keeps_the_mask_of_the_pruned_weights():
    model = gpt()
    nmrun.prune(model, tokens(), "wanda")
    zeros = {name: p == 0 for name, p in model.named_parameters() if name.startswith("h.")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    nmrun.sparsify(model, optimizer, "asp", "2:4", exclude="auto", prune_at=0.0)
    for batch in tokens():
        model(batch).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if name in zeros and parameter.dim() == 2:
            assert torch.equal(parameter == 0, zeros[name]), name


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"batches": []}, "prune takes a list of calibration batches, one at least: [batch]"),
        ({"batches": {"input_ids": tokens()[0]}}, "prune takes a list of calibration batches"),
        ({"patern": "1:4"}, "sparsegpt: patern: no such hyperparameter; did you mean pattern? (there are damping)"),
        ({"pattern": "1:128"}, "no weight of this model can be pruned to 1:128 (wte.weight [17, 16] and 1 more: an embedding; "),
        ({"pattern": "5:4"}, "5:4 is not an N:M pattern"),
        ({"method": "obc"}, "method=obc: no such method (there are magnitude, wanda, ria, sparsegpt)"),
        ({"pattern": "7:2:8"}, "no weight of this model can be pruned to 7:2:8 (wte.weight [17, 16] and 1 more: an embedding; "),
        ({"pattern": "4:2:8", "method": "ria", "permute": True}, "ria: permute=true is for N:M patterns, not for 4:2:8"),
        ({"include": "nothing"}, "include: 'nothing' matches no layer's whole name"),
        ({"batches": [(tokens()[0], torch.zeros(4))]}, "the model does not take this batch: "),
        ({"batches": [torch.randn(2, 5)]}, "the model does not take this batch: "),
        ({"batches": [torch.full((2, 5), 1000)]}, "the model does not take this batch: "),
        ({"batches": None}, "prune takes a list of calibration batches"),
        ({"pad": "no"}, "pad=no: it takes true or false"),
    ],
)  # fmt: skip
def test_mistakes_get_a_line_and_change_nothing(change, line):
    model = gpt()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r".") as caught:
        nmrun.prune(model, **{"batches": tokens(), **change})
    assert str(caught.value).startswith(line)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_weights_that_are_trained_sparse_are_refused():
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude="auto")
    with pytest.raises(ConfigError, match=r"trained sparse: call finalize\(\)"):
        nmrun.prune(model, tokens())
    optimizer.step()
    handle.finalize()
    nmrun.prune(model, tokens())


def test_inputs_that_are_not_finite_are_said_with_their_layer():
    model = gpt()
    with torch.no_grad():
        model.h[1].ln_2.weight[0] = torch.inf
    with pytest.raises(RunError, match=r"h\.1\.mlp\.c_fc\.weight: its weight or calibration in"):
        nmrun.prune(model, tokens())
