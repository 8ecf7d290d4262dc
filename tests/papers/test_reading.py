"""Questions on texts: files of SQuAD, windows of long texts, the best span by brute force, and
scores by hand and by another implementation.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import one_line
from runs import config
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.tasks.text.classification import Words
from nmrun.lab.train import flops, runner
from nmrun.papers.reading import task as data
from nmrun.papers.reading.task import (
    LONGEST,
    NOWHERE,
    Question,
    Reading,
    best_spans,
    exact,
    f1,
    normal,
    scores,
    windows,
)

TEXT = "Rosa Parks was born in Tuskegee, Alabama, in 1913. She refused to give up her seat in 1955."


def asked(*answers: str, text: str = TEXT, key: str = "q") -> dict[str, Any]:
    entries = [{"text": answer, "answer_start": text.index(answer)} for answer in answers]
    return {"id": key, "question": "Who or where? ", "answers": entries}


def article(*questions: dict[str, Any], text: str = TEXT) -> dict[str, Any]:
    return {"title": "a", "paragraphs": [{"context": text, "qas": list(questions)}]}


def write(folder: Path, name: str, *articles: dict[str, Any]) -> Path:
    (folder / "squad").mkdir(exist_ok=True, parents=True)
    path = folder / "squad" / f"{name}.json"
    path.write_text(json.dumps({"version": "x", "data": articles}), encoding="utf-8")
    return path


# --- files ----------------------------------------------------------------------------------------


def test_a_file_in_the_official_layout(tmp_path):
    none = {**asked(key="n"), "is_impossible": True, "plausible_answers": [{"text": "x"}]}
    path = write(tmp_path, "dev-v2.0", article(asked("Tuskegee", "Alabama"), none))
    assert data.read(path) == [
        [
            Question("q", "Who or where?", TEXT, (("Tuskegee", 23), ("Alabama", 33))),
            Question("n", "Who or where?", TEXT, ()),
        ]
    ]


def test_articles_are_held_out_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    for_each = [f"{i} {TEXT}" for i in range(10)]
    asks = [
        [asked("1955", text=text, key=f"{i}-{j}") for j in range(3)]
        for i, text in enumerate(for_each)
    ]
    every = [article(*some, text=text) for some, text in zip(asks, for_each, strict=True)]
    write(tmp_path, "train-v1.1", *every)
    write(tmp_path, "dev-v1.1", article(asked("1913", key="d")))
    splits = data.load_squad("v1.1", held_out=0.2)
    of = {name: {q.key.partition("-")[0] for q in some} for name, some in splits.items()}
    assert (len(of["train"]), len(of["val"]), of["test"]) == (8, 2, {"d"})
    assert not of["train"] & of["val"]
    assert (len(splits["train"]), len(splits["val"])) == (24, 6)
    assert data.load_squad("v1.1", held_out=0.2, limit=4)["train"] == splits["train"][:4]
    assert data.load_squad("v1.1", held_out=0.2, split_seed=1)["val"] != splits["val"]


@pytest.mark.parametrize("broken", ["{", '{"data": [{"title": "a"}]}'])
def test_a_broken_file_costs_one_line(tmp_path, broken):
    path = tmp_path / "train-v1.1.json"
    path.write_text(broken)
    with one_line(ConfigError, f"{path}: no file of SQuAD: "):
        data.read(path)


def test_real_articles():
    path = Path(os.environ.get("NMRUN_DATA", "nowhere")) / "squad" / "dev-v2.0-five-articles.json"
    if not path.exists():
        pytest.skip("SQuAD's articles are not here")
    questions = [question for one in data.read(path) for question in one]
    assert len(questions) == 1407
    for window in windows(questions[:200], Words(8192, 128), 32):
        of = questions[window.row]
        start, end = window.span(of)
        # an answer can begin within a word
        assert not start or of.answers[0][0] in of.text[window.begins[start] : window.ends[end]]


# --- windows --------------------------------------------------------------------------------------


def test_windows_cover_the_text_and_find_the_answer():
    text = " ".join(f"w{i}" for i in range(50))
    questions = [
        Question("a", "where is it?", text, (("w17 w18", text.index("w17")),)),
        Question("b", "what?", text, ()),
    ]
    parts = windows(questions, Words(256, 20), 6)
    assert all(len(window.tokens) <= 20 for window in parts)
    for row, question in enumerate(questions):
        mine = [window for window in parts if window.row == row]
        words = [
            [text[a:b] for a, b in zip(w.begins, w.ends, strict=True) if a != NOWHERE] for w in mine
        ]
        assert all(left[-6:] == right[:6] for left, right in itertools.pairwise(words))
        assert words[0] + [word for some in words[1:] for word in some[6:]] == text.split()
        spans = [window.span(question) for window in mine]
        found = [
            text[w.begins[a] : w.ends[b]] if a else ""
            for w, (a, b) in zip(mine, spans, strict=True)
        ]
        holding = [bool(question.answers) and {"w17", "w18"} <= {*some} for some in words]
        assert found == ["w17 w18" if holds else "" for holds in holding]


def test_a_question_that_leaves_no_room():
    with pytest.raises(ConfigError, match=r"the question q leaves room for 3 .* dataset.stride=4"):
        windows([Question("q", "one two", TEXT, ())], Words(64, 8), 4)


def test_byte_pairs_of_hugging_face_find_the_answer(tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from nmrun.lab.tasks.text.classification import PretrainedTokenizer

    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "initial_alphabet": alphabet, "special_tokens": ["<end>"]}
    byte_pairs.train_from_iterator([TEXT], trainers.BpeTrainer(**options))
    options = {"eos_token": "<end>", "model_max_length": 64}
    pretrained = PreTrainedTokenizerFast(tokenizer_object=byte_pairs, **options)
    pretrained.save_pretrained(tmp_path)
    tokenizer = PretrainedTokenizer(str(tmp_path), 40)
    assert tokenizer.padding == pretrained.eos_token_id  # GPT-2's has no token for padding
    text = f"Ünïcode first. {TEXT}"
    question = Question("q", "Where?", text, (("Tuskegee, Alabama", text.index("Tuskegee")),))
    parts = windows([question], tokenizer, 16)
    spans = [(window, *window.span(question)) for window in parts]
    holding = [(w, start, end) for w, start, end in spans if start]
    assert 0 < len(holding) < len(parts)
    for window, start, end in holding:
        assert text[window.begins[start] : window.ends[end]].strip() == "Tuskegee, Alabama"


# --- scores ---------------------------------------------------------------------------------------


def test_scores_by_hand():
    assert normal("The  U.S. Army's an, a 2nd-Brigade!") == ["us", "armys", "2ndbrigade"]
    assert exact("The cat!", "a cat") == 1.0
    assert exact("cat", "cats") == 0.0
    # the words green, tea against green, old, tea: p = 1, r = 2 / 3
    assert f1("green tea", "the green old tea") == pytest.approx(0.8)
    assert f1("green green tea", "green tea tea") == pytest.approx(2 / 3)  # words count as often
    assert (f1("", ""), f1("", "tea"), f1("the", ""), f1("the", "tea")) == (1.0, 0.0, 1.0, 0.0)
    answers = ((("green tea", 0), ("tea", 0)), (("Paris", 0),), (), ())
    questions = [Question(str(number), "", "", some) for number, some in enumerate(answers)]
    halves = dict.fromkeys(("exact_match", "exact_match_answered", "exact_match_unanswered"), 0.5)
    by_hand = {"f1": (1 + 2 / 3 + 1 + 0) / 4, "f1_answered": (1 + 2 / 3) / 2, "f1_unanswered": 0.5}
    found = scores(["tea", "in Paris", "", "Rome"], questions)
    assert found == pytest.approx({**halves, **by_hand})
    assert set(scores(["tea", "x"], questions[:2])) == {"f1", "exact_match"}


# --- the task -------------------------------------------------------------------------------------


def test_the_best_span_by_brute_force():
    logits = torch.randn(5, 50, 2, generator=torch.Generator().manual_seed(0))
    of_text = torch.rand(5, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    of_text[4] = False
    best, start, end = best_spans(logits, of_text)
    for row in range(4):
        every = {
            (i, j): float(logits[row, i, 0] + logits[row, j, 1])
            for i in range(50)
            for j in range(i, min(50, i + LONGEST))
            if of_text[row, i] and of_text[row, j]
        }
        expected = max(every, key=every.__getitem__)
        assert (int(start[row]), int(end[row])) == expected
        assert float(best[row]) == pytest.approx(every[expected])
    assert best[4] == -torch.inf


class Knows(nn.Module):
    """Points where it is told to: ``spans`` by the tokens of a window."""

    def __init__(self, spans: dict[tuple[int, ...], tuple[int, int]]) -> None:
        super().__init__()
        self.spans = spans

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 2)
        for row, (row_tokens, inside) in enumerate(zip(tokens, mask, strict=True)):
            start, end = self.spans[tuple(row_tokens[inside].tolist())]
            logits[row, start, 0] = logits[row, end, 1] = 9.0
        return logits


def reading(size: int = 300) -> Reading:
    splits = data.generated(size, 0)
    return Reading(splits, Words(512, 24), 8, batch_size=16, seed=0)


def test_who_knows_the_spans_is_right_and_who_says_none_is_for_questions_without():
    task = reading()
    text_windows = task.windows["val"]
    assert len(text_windows) > len(task.questions["val"])  # some texts are several windows
    knows = {tuple(w.tokens.tolist()): w.span(task.questions["val"][w.row]) for w in text_windows}
    right = task.evaluate(Knows(knows), "val")
    assert right["f1"] == right["exact_match"] == 1.0
    none = task.evaluate(Knows(dict.fromkeys(knows, (0, 0))), "val")
    share = sum(not q.answers for q in task.questions["val"]) / len(task.questions["val"])
    assert 0.1 < share < 0.3
    assert none["f1"] == none["exact_match"] == pytest.approx(share)
    assert (none["f1_unanswered"], none["f1_answered"]) == (1.0, 0.0)
    assert right["loss"] < none["loss"]


def test_the_loss_is_the_mean_of_both_ends_cross_entropies():
    task = reading()
    (batch,) = task.micro_batches(0, 0, 1)
    tokens, mask, _, spans = batch
    torch.manual_seed(0)
    logits = torch.randn(*tokens.shape, 2)
    loss = task.loss(lambda *_: logits, batch)
    by_hand = []
    for row, (start, end) in enumerate(spans.tolist()):
        length = int(mask[row].sum())
        for side, place in ((0, start), (1, end)):
            column = logits[row, :length, side]
            by_hand.append(column.logsumexp(0) - column[place])
    torch.testing.assert_close(loss, torch.stack(by_hand).mean())


def test_shares_of_an_evaluation_make_the_whole():
    task, torch_model = reading(), nn.Embedding(512, 2)
    model = lambda tokens, mask, segments: torch_model(tokens)  # noqa: E731
    whole = task.metrics_of("test", [task.tally(model, "test")])
    tallies = [task.tally(model, "test", rank, 3) for rank in range(3)]
    assert task.metrics_of("test", tallies) == pytest.approx(whole)


def test_batches_are_of_the_seed_and_the_epoch():
    one, two = reading(), reading()
    for epoch, index in ((0, 0), (1, 3)):
        first, again = one.micro_batches(epoch, index, 2), two.micro_batches(epoch, index, 2)
        assert len(first) == 2
        for a, b in zip(first, again, strict=True):
            assert all(map(torch.equal, a, b))
        (part,) = one.micro_batches(epoch, index, 2, range(1, 2))
        assert all(map(torch.equal, part, first[1]))
    assert not torch.equal(one.micro_batches(0, 0, 1)[0][3], one.micro_batches(1, 0, 1)[0][3])
    with pytest.raises(ConfigError, match="there are only"):
        Reading(data.generated(300, 0), Words(512, 64), 8, batch_size=10_000, seed=0)


def test_generated_questions_have_their_answers():
    splits = data.generated(300, 0)
    texts = [question.text for some in splits.values() for question in some]
    assert len(set(texts)) == len(texts) == 700
    for question in itertools.chain(*splits.values()):
        for answer, place in question.answers:
            assert question.text[place : place + len(answer)] == answer
            who = question.question.split()[2]
            does = "lives in" if "live" in question.question else "likes"
            assert f"{who} {does} {answer}." in question.text


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "COMPUTED", 0)  # as for large networks: counted without values
    cfg = config(
        tmp_path,
        *("dataset=generated_questions", "dataset.size=300", "model=gpt_reader"),
        *("model.layers=1", "model.heads=2", "model.width=16", "model.context=64"),
        *("recipe=s_ste", "sparsity=2:4", "optimizer=adamw", "trainer.epochs=1"),
        *("trainer.batch_size=32", 'model.include=["h[.][0-9]+[.]mlp[.].*"]'),
    )
    built = tasks.build(cfg, torch.device("cpu"))
    assert built.inputs == {"vocabulary": 256, "max_length": 64}
    metrics = runner.run(cfg, run_folder(cfg))["metrics"]["final"]
    assert {"test/f1", "test/exact_match", "test/f1_answered", "eval/f1"} <= set(metrics)
