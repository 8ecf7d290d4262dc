"""``nmrun sample``: tokens are drawn as the logits say, and written as the data set writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import config, write_run
from torch import nn
from verbs import verb

from nmrun.lab import models
from nmrun.lab.api.sample import continued
from nmrun.lab.tasks.text import corpus

TEXTS = {"train": "ab cab\nb <unk> é\n".encode(), "val": b"cab b\n", "test": b"b\n"}


class Table(nn.Module):
    """Logits that depend on the last token alone; ``seen`` is the longest input."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.seen = logits, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = max(self.seen, tokens.shape[1])
        return self.logits[tokens]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, None), (1.0, 2), (2.0, None)])
def test_tokens_come_as_often_as_the_logits_say(temperature, top_k):
    """The fourth logit is of no token of the data."""
    logits = torch.tensor([0.3, -0.5, 1.1, 9.0], dtype=torch.float64)
    model, draws = Table(logits.expand(4, 4)), 4000
    tokens = continued(model, [0], draws, 5, 3, temperature, top_k, seed=3)
    expected = (logits[:3] / temperature).exp()
    if top_k:
        expected[1] = 0.0
    expected /= expected.sum()
    shares = np.bincount(tokens, minlength=3) / draws
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert (abs(shares - expected.numpy()) <= 4 * deviation.numpy()).all()
    assert model.seen == 5
    assert tokens[:200] == continued(model, [0], 200, 5, 3, temperature, top_k, seed=3)
    assert tokens[:200] != continued(model, [0], 200, 5, 3, temperature, top_k, seed=4)


def test_without_temperature_the_likeliest_follows():
    follows = torch.tensor([2, 0, 1])
    model = Table(nn.functional.one_hot(follows, 3).double())
    assert continued(model, [1], 5, 8, 3, temperature=0) == [0, 2, 1, 0, 2]
    assert continued(model, [1], 5, 8, 3, temperature=1.0, top_k=1) == [0, 2, 1, 0, 2]


@pytest.mark.parametrize("tokenizer", ["byte", "character", "word"])
def test_the_vocabulary_is_that_of_the_token_numbers(tokenizer):
    arrays, _ = corpus.encode(TEXTS, tokenizer)
    vocabulary = corpus.vocabulary(TEXTS, tokenizer)
    for name, text in TEXTS.items():
        assert vocabulary.encode(text.decode()) == arrays[name].tolist()
        # words end with a space, also before a line break
        assert vocabulary.decode(arrays[name].tolist()).replace(" \n", "\n") == text.decode()


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs nmrun[transformers]")
    words = {"<unk>": 0, "ab": 1, "cab": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = corpus.vocabulary(TEXTS, str(tmp_path / "tokenizer.json"))
    assert vocabulary.encode("cab ab zz") == [2, 1, 0]
    assert vocabulary.decode([2, 1]) == "cab ab"


def finished(folder: Path, *words: str, **options: Any) -> Path:
    """A run of a small network with its first weights."""
    cfg = config(folder, "recipe=dense", *words).plain
    state = models.build(cfg["model"], options).state_dict()
    return write_run(folder, state, [], "dense", **cfg)


GPT = ("model=gpt_tiny", "model.layers=1", "model.width=16", "dataset.context=12")


def test_the_verb(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 40)
    text = f"dataset.train={tmp_path / 'text.txt'}"
    run = finished(
        tmp_path / "run",
        *(*GPT, "dataset=text", text, "dataset.tokenizer=character", "trainer.batch_size=2"),
        vocabulary=8,
        context=12,
    )
    texts = []
    for seed in (0, 0, 1):
        words = ("--prompt", "to be", "--tokens", "30", "--seed", str(seed))
        assert verb("sample", str(run), *words) == 0, capsys.readouterr().err
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("to be")
    assert len(texts[0]) == len("to be") + 30 + 1
    assert set(texts[0]) <= set("to be or not\n")
    assert verb("sample", str(run), "--prompt", "to bee?") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no hashes" not in line]
    assert line == "nmrun: '?' is none of the 8 characters of the data"
    assert verb("sample", str(run), "--prompt", "") == 2
    assert "--prompt" in capsys.readouterr().err


def test_runs_without_text_are_refused(tmp_path, capsys):
    digits = finished(tmp_path / "digits", shape=(1, 8, 8), classes=10)
    assert verb("sample", str(digits)) == 2
    assert "dataset=digits is no text to continue" in capsys.readouterr().err
    for split in ("train", "val"):
        np.arange(500, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    words = ("dataset=token_bin", f"dataset.folder={tmp_path}", "dataset.vocabulary=500")
    tokens = finished(
        tmp_path / "tokens", *GPT, *words, "trainer.batch_size=2", vocabulary=500, context=12
    )
    assert verb("sample", str(tokens)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no hashes" not in line]
    assert "dataset=token_bin has token numbers alone" in line
