"""GPT-2: the published sizes, a second implementation, causality, tying, which layers are sparse,
pretrained weights.
"""

from __future__ import annotations

import copy
import json

import pytest
import runs
import torch
from torch.nn import functional

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import models
from nmrun.lab.keys.options import defaults, keys
from nmrun.lab.models.texts import GPTNetwork

SIZES = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
GPT2_DATA = {"vocabulary": 50257, "context": 1024}


def config(name: str) -> dict:
    return {"name": name, **defaults(keys("model", name))}


def tiny(dropout: float = 0.0) -> GPTNetwork:
    torch.manual_seed(0)
    model = GPTNetwork(vocabulary=19, context=12, layers=2, heads=2, width=8, dropout=dropout)
    for parameter in model.parameters():  # biases and norms too, and far from the linear regime
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_published(name):
    with torch.device("meta"):
        model = models.build(config(name), GPT2_DATA)
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]


def test_no_logit_depends_on_a_later_token():
    model, tokens = tiny(), torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6:] = 17
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


def test_initial_weights():
    model = GPTNetwork(vocabulary=500, context=64, layers=8, heads=4, width=64)
    weights = dict(model.named_parameters())
    for name in ("wte.weight", "wpe.weight", "h.3.attn.c_attn.weight", "h.7.mlp.c_fc.weight"):
        assert weights[name].std().item() == pytest.approx(0.02, rel=0.06), name
    for name in ("h.0.attn.c_proj.weight", "h.5.mlp.c_proj.weight"):
        # sqrt(2 * 8 layers)
        assert weights[name].std().item() == pytest.approx(0.02 / 4, rel=0.06), name
    assert not any(tensor.any() for name, tensor in weights.items() if name.endswith("bias"))


def test_the_head_is_the_embedding_through_copying_and_training():
    model = copy.deepcopy(tiny())
    assert model.lm_head.weight is model.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(12)[None]
    functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["lm_head.weight"], model.state_dict()["wte.weight"])


def test_dropout_is_for_training_alone():
    model, tokens = tiny(dropout=0.3), torch.arange(8)[None]
    assert not torch.equal(model.train()(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(("include", "layers"), [(None, 4), (r"h\.\d+\.mlp\..*", 2)])
def test_which_layers_are_sparse(include, layers):
    model = tiny()
    chosen = {"include": include, "exclude": config("gpt_tiny")["exclude"]}
    handle = nmrun.sparsify(model, torch.optim.Adam(model.parameters()), "ste", "2:4", **chosen)
    names = {weight.name.split(".", 2)[2] for weight in handle.sparse}
    ffn = {"mlp.c_fc.weight", "mlp.c_proj.weight"}
    assert names == (ffn if include else ffn | {"attn.c_attn.weight", "attn.c_proj.weight"})
    assert len(handle.sparse) == 2 * layers
    assert all(weight.dim == 1 for weight in handle.sparse)
    left = {dense.name: dense.reason for dense in handle.left_dense}
    assert left["lm_head.weight"] == ("not in include" if include else "tied to wte.weight")


def test_compiles_without_a_break():
    model, tokens = tiny(), torch.arange(8)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


# --- pretrained, against Hugging Face's own network -----------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    torch.manual_seed(1)
    options = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=3, n_inner=48
    )
    theirs = transformers.GPT2LMHeadModel(options).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    folder = tmp_path_factory.mktemp("pretrained")
    theirs.save_pretrained(folder)
    return folder, theirs


def load(folder, vocabulary=31):
    named = {**config("hf_gpt2"), "pretrained": str(folder)}
    return models.build(named, {"vocabulary": vocabulary, "context": 10})


def test_pretrained_gives_hugging_faces_logits(pretrained):
    folder, theirs = pretrained
    model, tokens = load(folder).eval(), torch.randint(31, (3, 16))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert model.lm_head.weight is model.wte.weight


def test_groups_of_pretrained_weights_run_along_the_inputs(pretrained):
    folder, theirs = pretrained
    model = load(folder)
    optimizer = torch.optim.Adam(model.parameters())
    handle = nmrun.sparsify(model, optimizer, "ste", "1:4", exclude=["lm_head"])
    optimizer.step()  # without a gradient, so nothing moves
    handle.finalize()
    stored = theirs.transformer.h[1].mlp.c_fc.weight  # (inputs, outputs)
    groups = stored.T.reshape(48, 3, 4)
    mask = torch.zeros_like(groups).scatter(2, groups.abs().argmax(2, keepdim=True), 1.0)
    assert torch.equal(model.h[1].mlp.c_fc.weight, (groups * mask).reshape(48, 12))


def test_pretrained_is_fine_tuned(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    options = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(options).save_pretrained(tmp_path / "hf")
    words = ("model=hf_gpt2", f"model.pretrained={tmp_path / 'hf'}", "recipe=asp")
    data = ("dataset=stdlib_text", "dataset.context=16", "trainer.epochs=1", "recipe.prune_at=0")
    result = runs.finished(runs.config(tmp_path, *words, *data))
    assert [layer["holds"] for layer in result["sparsity"]["layers"]] == [True] * 4


def test_what_pretrained_refuses(pretrained, tmp_path):
    folder, _ = pretrained
    with pytest.raises(ConfigError, match="knows 31 tokens and the data have 30"):
        load(folder, vocabulary=30)  # here each row has a token
    changes = {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True, "n_inner": 7}
    for key, value in changes.items():
        settings = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, key: value}))
        with pytest.raises(ConfigError, match=rf"than GPT-2's: {key} is {value}"):
            load(tmp_path)
