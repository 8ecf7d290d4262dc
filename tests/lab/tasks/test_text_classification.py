"""Classification of texts: metrics, batches, tokens, and whole runs on the generated task."""

from __future__ import annotations

import math
import re
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from encoders import save_tokenizer
from errors import one_line
from runs import config, cut_off, resumed
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.config.identity import run_folder
from nmrun.lab.models.texts import TextEncoderNetwork, gpt_classifier
from nmrun.lab.tasks.text import labelled
from nmrun.lab.tasks.text.classification import (
    PretrainedTokenizer,
    TextClassification,
    Words,
    scores,
)
from nmrun.lab.train import runner

TEXTS = [
    (text,) for text in ("a", "b c", "d e f g", "h i", "j k l", "m n o p q", "r", "s t", "u v w")
]
LABELS = [0, 1, 1, 0, 1, 0, 0, 1, 1]


def task(classes: int = 2, **options: Any) -> TextClassification:
    labels = [label / 4 for label in LABELS] if classes == 1 else LABELS
    splits = dict.fromkeys(("train", "val", "test"), (TEXTS, labels))
    metrics = ("spearman", "pearson") if classes == 1 else ("accuracy", "f1")
    return TextClassification(
        splits, Words(64, 16), classes, metrics, **{"batch_size": 4, "seed": 3, **options}
    )


def tiny(task: TextClassification) -> TextEncoderNetwork:
    torch.manual_seed(0)
    return TextEncoderNetwork(
        **task.inputs, layers=2, heads=2, width=8, dropout=0.0, activation="gelu"
    )


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_of_classes_from_the_table_of_errors():
    generator = torch.Generator().manual_seed(0)
    guess, truth = torch.randint(2, (2, 200), generator=generator)
    pairs = list(zip(guess.tolist(), truth.tolist(), strict=True))
    tp, fp, fn, tn = (pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0)))
    values = scores(("accuracy", "f1", "matthews"), guess, truth)
    assert values["accuracy"] == pytest.approx((tp + tn) / 200)
    assert values["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    bottom = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert values["matthews"] == pytest.approx((tp * tn - fp * fn) / bottom)


def test_correlations_of_scores_with_ties():
    guess, truth = [0.1, 0.4, 0.4, 2.0, 8.0, -1.0], [0.0, 1.5, 0.5, 0.5, 5.0, 1.0]
    # ties share the mean of their places
    ranks = [2, 3.5, 3.5, 5, 6, 1], [1, 5, 2.5, 2.5, 6, 4]
    assert scores(
        ("pearson", "spearman"), torch.tensor(guess), torch.tensor(truth)
    ) == pytest.approx(
        {"pearson": np.corrcoef(guess, truth)[0, 1], "spearman": np.corrcoef(*ranks)[0, 1]}
    )


def test_metrics_that_are_undefined_are_zero():
    same, labels, one = torch.zeros(5), torch.tensor([0.0, 1, 1, 0, 1]), torch.ones(1)
    assert scores(("f1", "matthews"), same.int(), labels.int()) == {"f1": 0.0, "matthews": 0.0}
    for guess, truth in ((same, labels), (one, one)):
        found = scores(("pearson", "spearman"), guess, truth)
        assert found == {"pearson": 0.0, "spearman": 0.0}


# --- tokens and batches ---------------------------------------------------------------------------


def number(word: str) -> int:
    return 3 + zlib.crc32(word.encode()) % 61


def test_words_are_hashed_and_pairs_are_marked():
    tokens, segments, starts = Words(64, 16).encode([("Isn't it",), ("a b", "C!")])
    assert starts.tolist() == [0, 6, 13]
    assert tokens.tolist()[:6] == [1, *map(number, ["isn", "'", "t", "it"]), 2]
    assert tokens.tolist()[6:] == [1, number("a"), number("b"), 2, number("c"), number("!"), 2]
    assert segments.tolist() == [0] * 6 + [0, 0, 0, 0, 1, 1, 1]


def test_long_pairs_lose_the_end_of_the_longer_text():
    tokens, segments, _ = Words(64, 8).encode([("a b c d e f g", "h i"), ("a", "h i j k l m")])
    assert tokens[:8].tolist() == [1, *map(number, "abc"), 2, *map(number, "hi"), 2]
    assert tokens[8:].tolist() == [1, number("a"), 2, *map(number, "hijk"), 2]
    assert segments.tolist() == [0] * 5 + [1] * 3 + [0] * 3 + [1] * 5


@pytest.mark.parametrize("pair", [(), ("",)])
def test_a_text_without_tokens_has_an_answer_of_its_own(pair, tmp_path):
    """With a tokenizer that adds none, as GPT-2's; the answer is the same beside longer texts."""
    tokenizer = PretrainedTokenizer(str(save_tokenizer(tmp_path, eos_token="<end>")), 16)
    texts = [("", *pair), ("film", *pair), ("a", *pair)]
    classification = TextClassification(
        dict.fromkeys(("train", "val"), (texts, [0, 1, 1])), tokenizer, 2, ("accuracy",), 2, 0
    )
    torch.manual_seed(0)
    gpt = gpt_classifier(
        **classification.inputs, context=16, embeddings=None, layers=1, heads=2, width=8
    )
    for model in (gpt.eval(), tiny(classification).eval()):
        alone = classification.scores(model, classification.batch_of(texts[0]))
        together = classification.scores(model, classification.batch_of(*texts))
        assert alone.isfinite().all()
        torch.testing.assert_close(together[:1], alone)
        assert math.isfinite(classification.evaluate(model, "val")["loss"])


def test_a_tokenizer_that_cannot_pad_is_refused(tmp_path):
    folder = save_tokenizer(tmp_path)
    with one_line(ConfigError, rf"dataset.tokenizer .*={folder}: it takes .* one that ends a text"):
        PretrainedTokenizer(str(folder), 16)


def test_a_batch_is_padded_to_its_longest_text():
    classification = task()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3 * 1_000_003 + 1)).tolist()
    for index in range(2):
        tokens, mask, segments, labels = classification.micro_batches(1, index, 1)[0]
        chosen = order[4 * index : 4 * index + 4]
        expected = [[1, *map(number, TEXTS[row][0].split()), 2] for row in chosen]
        assert tokens.shape == (4, max(map(len, expected)))
        for row, text in enumerate(expected):
            assert tokens[row].tolist() == text + [0] * (tokens.shape[1] - len(text))
            assert mask[row].tolist() == [True] * len(text) + [False] * (
                tokens.shape[1] - len(text)
            )
        assert labels.tolist() == [LABELS[row] for row in chosen]
        assert not segments.any()


def test_micro_batches_make_up_the_batch():
    classification, model = task(), tiny(task())
    (whole,), parts = classification.micro_batches(0, 0, 1), classification.micro_batches(0, 0, 3)
    assert torch.cat([part[3] for part in parts]).tolist() == whole[3].tolist()
    sums = [classification.loss(model, part) * len(part[3]) for part in parts]
    torch.testing.assert_close(sum(sums) / 4, classification.loss(model, whole))


def test_padding_changes_no_answer():
    classification = task()
    model = tiny(classification).eval()
    tokens, mask, segments, _ = classification.micro_batches(0, 0, 1)[0]
    together = model(tokens, mask, segments)
    for row in range(4):
        n = int(mask[row].sum())
        alone = model(*(part[row : row + 1, :n] for part in (tokens, mask, segments)))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def test_an_example_has_the_length_of_a_batch():
    classification = task()
    longest = [classification.micro_batches(0, index, 1)[0][0].shape[1] for index in range(2)]
    assert classification.example()[0].shape == (2, round(sum(longest) / 2))


class ByFirstWord(nn.Module):
    """The logit of class 1 (or the score) from the number of the first word, and the number of
    tokens.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        score = (tokens[:, 1] / 16 - mask.sum(1) / 2)[:, None]
        return score if self.classes == 1 else torch.cat([torch.zeros_like(score), score], 1)


def by_first_word(text: str) -> float:
    words = text.split()
    return number(words[0]) / 16 - (len(words) + 2) / 2


def test_evaluation_of_classes_one_by_one():
    metrics = task().evaluate(ByFirstWord(2), "val")
    answers = [by_first_word(text) for (text,) in TEXTS]
    chances = [1 / (1 + math.exp(-score)) for score in answers]
    given = [p if label else 1 - p for p, label in zip(chances, LABELS, strict=True)]
    loss = -sum(map(math.log, given)) / 9
    right = sum(chance > 0.5 for chance in given) / 9
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(right)
    assert 0 < right < 1


def test_scores_are_fitted_by_squares():
    classification = task(classes=1)
    answers, labels = [by_first_word(text) for (text,) in TEXTS], [label / 4 for label in LABELS]
    squares = [(a - b) ** 2 for a, b in zip(answers, labels, strict=True)]
    metrics = classification.evaluate(ByFirstWord(1), "test")
    assert metrics["loss"] == pytest.approx(sum(squares) / 9, rel=1e-5)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(answers, labels)[0, 1], rel=1e-4)
    (batch,) = classification.micro_batches(0, 0, 1)
    gaps = ByFirstWord(1)(*batch[:3])[:, 0] - batch[3]
    loss = classification.loss(ByFirstWord(1), batch)
    assert float(loss) == pytest.approx(float((gaps**2).sum()) / 4, rel=1e-5)
    assert classification.metric == "spearman"


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match=r"batch_size=10: there are only 9 training texts"):
        task(batch_size=10)
    with pytest.raises(ConfigError, match=r"label_smoothing=0\.1 is for classes"):
        task(classes=1, label_smoothing=0.1)


# --- the generated task and the small encoder -----------------------------------------------------


def test_generated_sentences_are_labelled_by_their_words():
    splits = labelled.generated_reviews(400)
    assert [len(texts) for texts, _ in splits.values()] == [400, 500, 500]
    verdict = rf"(not )?\b({'|'.join((*labelled.GOOD, *labelled.BAD))})\b"
    for texts, labels in splits.values():
        assert 0.4 < sum(labels) / len(labels) < 0.6
        for (text,), label in zip(texts, labels, strict=True):
            found = re.findall(verdict, text)
            votes = [(word in labelled.GOOD) != bool(turned) for turned, word in found]
            assert len(votes) in (1, 3)
            assert label == (sum(votes) > len(votes) / 2)
    assert labelled.generated_reviews(400, split_seed=1)["test"] != splits["test"]


def test_attention_and_feed_forward_layers_are_sparse():
    model = tiny(task())
    optimizer = nmrun.optim.AdamW(model.parameters())
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", exclude="head")
    names = ("self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.")
    assert {w.name for w in handle.sparse} == {
        f"encoder.layers.{layer}.{name}weight" for layer in (0, 1) for name in names
    }
    model.eval()
    tokens, mask, segments, _ = task().micro_batches(0, 0, 1)[0]
    with torch.no_grad():
        # torch's fused path reads the weights past the modules
        fast = model(tokens, mask, segments)
    torch.testing.assert_close(fast, model(tokens, mask, segments).detach(), rtol=1e-5, atol=1e-6)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()  # by which the weights stay
    handle.finalize()
    torch.testing.assert_close(fast, model(tokens, mask, segments).detach(), rtol=1e-5, atol=1e-6)


GENERATED = ("dataset=generated_text", "model=text_encoder")


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_with_the_same_bits(tmp_path):
    small = ("dataset.size=200", "model.width=16", "model.heads=2")
    resumed(tmp_path, *GENERATED, *small, "recipe=step", "trainer.accumulate=2", by=cut_off)


@pytest.mark.slow
def test_the_small_encoder_learns(tmp_path):
    words = ("model.layers=1", "recipe=sr_ste", "optimizer.lr=3e-3")
    length = ("trainer.limit_batches=75", "trainer.epochs=2", "trainer.eval_every=2")
    cfg = config(tmp_path, *GENERATED, *words, *length)
    result = runner.run(cfg, run_folder(cfg))
    assert result["metrics"]["final"]["test/accuracy"] > 0.65
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
