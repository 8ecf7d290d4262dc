"""Causal language models of Hugging Face: their logits, which of their layers are sparse, a run and
its export, what is refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import models
from nmrun.lab.config.identity import run_folder
from nmrun.lab.export import cli
from nmrun.lab.tasks.hugging_face import fetch
from nmrun.lab.tasks.text.language import LanguageModelling
from nmrun.lab.train import flops
from nmrun.sparsity import check_nm

transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")

SMALL = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "llama": SMALL,
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "mistral": {**SMALL, "sliding_window": 8},
    "phi": {**SMALL, "num_key_value_heads": 2},
    "mixtral": {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma": {**SMALL, "head_dim": 8},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 8},
    "gpt2": {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of each kind, with the network that was saved there."""

    def call(kind: str):
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
        folder = tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(folder)
        return folder, theirs

    return call


def load(folder, vocabulary=256, context=16):
    options = {"name": "hf_causal", "pretrained": str(folder), "include": None, "exclude": ["auto"]}
    return models.build(options, {"vocabulary": vocabulary, "context": context})


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_hugging_faces_and_all_layers_but_the_head_are_sparse(kind, saved):
    folder, theirs = saved(kind)
    model, tokens = load(folder).eval(), torch.randint(256, (3, 20))
    assert torch.equal(model(tokens), theirs(tokens).logits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=["auto"])
    in_blocks = {
        f"network.{name}.weight"
        for name, module in theirs.named_modules()
        if (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
        and name != "lm_head"
    }
    experts = {  # (experts, outputs, inputs)
        f"network.{name}" for name, weight in theirs.named_parameters() if weight.dim() == 3
    }
    assert bool(experts) == (kind == "mixtral")
    assert {weight.name for weight in handle.sparse} == in_blocks | experts
    for weight in handle.sparse:
        assert weight.dim == (2 if weight.name in experts else 0 if kind == "gpt2" else 1)
    optimizer.step()
    handle.finalize()


SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "mixtral", "gemma2")]


@pytest.mark.parametrize("kind", ["llama", "gpt2", *SLOWER])
def test_a_run_and_its_export(kind, saved, tmp_path, capsys):
    folder, _ = saved(kind)
    generation = {"eos_token_id": [2, 7], "do_sample": True, "top_k": 3}
    transformers.GenerationConfig(**generation).save_pretrained(folder)
    words = ("model=hf_causal", f"model.pretrained={folder}", "dataset=stdlib_text", "recipe=asp")
    size = ("recipe.prune_at=0", "trainer.epochs=1", "dataset.context=16")
    cfg, to = runs.config(tmp_path, *words, *size, "trainer.limit_evaluation=40"), tmp_path / "to"
    result, run = runs.finished(cfg), run_folder(cfg)
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    assert cli.export([str(run), "--out", str(to), "--format", "hf"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    ours = load(folder).eval()
    ours.load_state_dict(load_file(run / "model.safetensors"))
    tokens = torch.randint(256, (2, 12))
    assert torch.equal(theirs(tokens).logits, ours(tokens))
    assert generation.items() <= theirs.generation_config.to_dict().items()
    lines = json.loads((to / "sparsity.json").read_text())["layers"]
    assert len(lines) == len(result["sparsity"]["layers"]) > 0
    for line in lines:
        check_nm(theirs.get_parameter(line["name"]), line["pattern"], line["dim"])


@pytest.mark.parametrize("most", [0, flops.COMPUTED])
def test_flops_of_experts_are_those_of_the_tokens_that_they_get(most, saved, monkeypatch):
    """By hand, in a network that counts as large and in a small one."""
    monkeypatch.setattr(flops, "COMPUTED", most)
    model, text = load(saved("mixtral")[0]), np.arange(200, dtype=np.uint8)
    task = LanguageModelling({"train": text, "val": text}, 256, 16, batch_size=2, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude=["auto"])
    cost = flops.count(model, task, handle.sparse)
    # multiplications of a token: in both layers all projections, and of two experts the best one's
    sparse = 2 * (16 * (16 + 8 + 8 + 16) + 3 * 16 * 32)
    attention, routers, head = 2 * 2 * 16 * 16, 2 * 16 * 2, 16 * 256
    assert cost.forward == 2 * (sparse + attention + routers + head)
    assert cost.forward - cost.inference() == sparse
    assert cost.backward == 2 * cost.forward
    recipe = handle.recipe  # which leaves the weights' gradients dense
    assert cost.dense - cost.training(recipe) == 2 * sparse


def test_what_is_refused(saved, tmp_path):
    folder, _ = saved("llama")
    load(folder, vocabulary=250)  # rows that no token has
    for count in (300, 64):
        with pytest.raises(ConfigError, match=f"knows 256 tokens and the data have {count}: take"):
            load(folder, vocabulary=count)
    with pytest.raises(ConfigError, match=r"dataset\.context=33: .* at most 32 tokens"):
        load(folder, context=33)
    with pytest.raises(ConfigError, match=r"model\.pretrained=.*/nothing: cannot be loaded"):
        load(tmp_path / "nothing")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    rest = {key: tensor for key, tensor in weights.items() if key != name}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"there is no {name} of the right shape"):
        load(tmp_path)


def test_what_is_no_causal_model(tmp_path):
    t5 = transformers.T5Config(
        vocab_size=256, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"/t5: t5 is no causal language model$"):
        load(tmp_path / "t5")
    small = {key: SMALL[key] for key in SMALL if "token_id" not in key and "key_value" not in key}
    for kind, causal in (("encoder", False), ("decoder", True)):
        bert = transformers.BertConfig(**small, is_decoder=causal)
        network = transformers.BertLMHeadModel if causal else transformers.BertForMaskedLM
        network(bert).save_pretrained(tmp_path / kind)
    with pytest.raises(ConfigError, match="bert is no causal language model"):
        load(tmp_path / "encoder")
    load(tmp_path / "decoder")


def test_code_in_a_model_folder_is_not_asked_about(tmp_path, monkeypatch):
    """transformers asks at a terminal whether to run it, and whoever types y runs it."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}})
    )
    (tmp_path / "theirs.py").write_text("raise SystemExit\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError):
        fetch("AutoConfig", "model.pretrained", str(tmp_path))
