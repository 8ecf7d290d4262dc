"""GPT-2 with new heads: what they see, and how a pre-trained run is fine-tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from safetensors.torch import load_file
from torch import nn
from training import bits

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.models import texts
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.train import flops, weights
from nmrun.papers.reading import task

SIZE: dict[str, Any] = {"layers": 2, "heads": 2, "width": 8, "dropout": 0.0, "bias": True}
SIZE["activation"] = "gelu"
TEXTS = (
    *("dataset=generated_text", "dataset.size=200", "dataset.vocabulary=256"),
    *("model=gpt_classifier", "model.layers=2", "model.heads=4"),
    *("model.width=64", "model.context=64"),
)
MLP = 'model.include=["h[.][0-9]+[.]mlp[.].*"]'


def test_heads_see_what_the_language_model_sees():
    language = GPTNetwork(19, 12, 2, 2, 8)
    classifier = texts.gpt_classifier(19, 9, 3, **SIZE, context=12, embeddings=None)
    reader = task.gpt_reader(19, 9, **SIZE, context=12, embeddings=None)
    body = {k: v for k, v in language.state_dict().items() if not k.startswith("lm_head")}
    for model in (classifier, reader):
        lost = model.load_state_dict(body, strict=False)
        assert all(name.startswith("head.") for name in lost.missing_keys)
        assert not lost.unexpected_keys
    seen = []
    language.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    tokens = torch.tensor([[4, 7, 1, 9, 0, 0], [3, 3, 8, 2, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]).bool()
    language(tokens)
    last = torch.stack([seen[0][0, 3], seen[0][1, 5]])
    torch.testing.assert_close(
        classifier(tokens, mask, tokens * 0), last @ classifier.head.weight.T
    )
    alone = classifier(tokens[:1, :4], mask[:1, :4], tokens[:1, :4] * 0)
    torch.testing.assert_close(alone[0], classifier(tokens, mask, tokens * 0)[0])
    expected = seen[0] @ reader.head.weight.T + reader.head.bias
    torch.testing.assert_close(reader(tokens, mask, tokens * 0), expected)


def test_more_positions_or_tokens_than_the_network_has():
    with pytest.raises(ConfigError, match=r"dataset.max_length=16: .* model.context=12 positions"):
        task.gpt_reader(19, 16, **SIZE, context=12, embeddings=None)
    with pytest.raises(ConfigError, match=r"model\.embeddings=18: the data have 19 tokens"):
        texts.gpt_classifier(19, 8, 2, **SIZE, context=12, embeddings=18)
    padded = texts.gpt_classifier(19, 8, 2, **SIZE, context=12, embeddings=32)
    assert padded.wte.num_embeddings == 32


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of S-STE on text: its weights are 2:4."""
    cfg = runs.config(
        tmp_path_factory.mktemp("pretrained"),
        *("dataset=stdlib_text", "model=gpt_tiny", "recipe=s_ste", "optimizer=adamw", MLP),
    )
    runs.finished(cfg)
    return run_folder(cfg)


def network(folder: Path, *words: str) -> nn.Module:
    cfg = runs.config(folder, *words)
    torch.manual_seed(cfg.seed)
    return weights.network(cfg, tasks.build(cfg, torch.device("cpu")))


@pytest.mark.slow
def test_a_pre_trained_run_gets_a_new_head(pretrained, tmp_path):
    theirs = load_file(pretrained / "model.safetensors")
    begun = network(tmp_path, *TEXTS, f"init={pretrained}").state_dict()
    fresh = network(tmp_path, *TEXTS).state_dict()
    assert begun.keys() == {*theirs, "head.weight"} - {"lm_head.weight"}
    expected = {**theirs, "head.weight": fresh["head.weight"]}
    assert bits(begun) == bits({name: expected[name] for name in begun})
    with pytest.raises(ConfigError, match=r"is another network than this run's: h\.0"):
        network(tmp_path, *TEXTS, "model.width=32", f"init={pretrained}")


@pytest.mark.slow
def test_s_ste_goes_on_with_the_weights_that_it_left(pretrained, tmp_path):
    """A 2:4 weight is its own soft threshold: t is 0, and so the scale is 1."""
    model = network(tmp_path, *TEXTS, f"init={pretrained}")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = nmrun.sparsify(
        model, optimizer, "s_ste", "2:4", include=r"h\.\d+\.mlp\..*", exclude=None
    )
    for weight in handle.sparse:
        assert weight["scale"] == 1.0
        assert torch.equal(weight.weight, before[weight.name])
        assert (weight.weight == 0).double().mean() >= 0.5


@pytest.mark.slow
def test_a_fine_tuned_run_keeps_its_head(pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "COMPUTED", 0)  # as for large networks: counted without values
    cfg = runs.config(tmp_path, *TEXTS, "recipe=dense", f"init={pretrained}")
    assert {"test/accuracy", "test/loss"} <= set(runs.finished(cfg)["metrics"]["final"])
    again = network(tmp_path, *TEXTS, f"init={run_folder(cfg)}").state_dict()
    assert bits(again) == bits(load_file(run_folder(cfg) / "model.safetensors"))
