"""Reading comprehension: the passage of a text that answers a question, or that there is none.

Questions are SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250, and 2018, arXiv 1806.03822), or generated.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import Encoding
from nmrun.lab.models.texts import Headed, embedded
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.base import (
    Batch,
    InMemory,
    Tally,
    limited,
    refuse_smoothing,
    sent,
    settings,
    shared,
)
from nmrun.lab.tasks.text.classification import PretrainedTokenizer, Tokenizer, Words, tokenizer
from nmrun.papers.reading import GeneratedQuestions, Squad, Windowed

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

EVALUATED_AT_ONCE = 32  # windows; each takes length^2 numbers
LONGEST = 30  # tokens of an answer, as in the usual scripts


class Reading(InMemory):
    """Cross entropy of the answer's first token and of its last one, their mean.

    A long text is several windows. A window that does not have the answer points to its first
    token, and so does one of a question without an answer. A micro-batch is (tokens, mask,
    segments, spans), the first three (windows, length) int64, bool (False is padding) and int64,
    the last one (windows, 2) int64. Models give (windows, length, 2) for ``model(tokens, mask,
    segments)``.

    An answer is the span of at most 30 tokens of the text with the largest sum of both scores, over
    all windows. Where some questions have none, it is none if the first tokens' sum is larger (in
    the window where it is least). Raises ConfigError for fewer training windows than a batch takes,
    and for a question that is too long.
    """

    metric = "f1"
    higher_is_better = True

    def __init__(
        self,
        splits: Mapping[str, Sequence[Question]],
        tokenizer: Tokenizer,
        stride: int,
        batch_size: int,
        seed: int,
        label_smoothing: float = 0.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        refuse_smoothing(label_smoothing, "answers")
        self.questions = splits
        self.windows = {
            name: windows(questions, tokenizer, stride) for name, questions in splits.items()
        }
        self.cut(len(self.windows["train"]), "training windows", batch_size, limit_batches)
        self.padding, self.device = tokenizer.padding, torch.device(device)
        self.inputs = {"vocabulary": tokenizer.vocabulary, "max_length": tokenizer.max_length}
        self.seed = seed
        self.may_have_none = any(not q.answers for name in splits for q in splits[name])

    @classmethod
    def of(
        cls, config: Config, splits: Mapping[str, Sequence[Question]], device: torch.device
    ) -> Reading:
        few = limited(
            splits,
            config.trainer.limit_evaluation,
            lambda questions, most: questions[:: -(-len(questions) // most)],
        )
        encoder = tokenizer(config.dataset.as_kind(Encoding))
        stride = config.dataset.as_kind(Windowed).stride
        return cls(few, encoder, stride, **settings(config, device))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        *inputs, spans = batch
        return _losses(model(*inputs).float(), inputs[1], spans).mean()

    def example(self) -> Batch:
        """Two windows of the mean length of all."""
        text_windows = self.windows["train"]
        mean = round(float(np.mean([len(window.tokens) for window in text_windows])))
        nearest = sorted(
            range(len(text_windows)), key=lambda row: abs(len(text_windows[row].tokens) - mean)
        )
        return self._batch("train", nearest[:2])

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """Of each window its number, loss, best span's score and characters, and the score of none."""
        rows, results = [], []
        pieces, read = self._evaluated(split), partial(self._batch, split)
        for numbers, batch, counts in shared(pieces, read, rank, world):
            *inputs, spans = batch
            logits = model(*inputs).float()
            losses = _losses(logits, inputs[1], spans).cpu().double()
            begins, ends = (self._places(split, numbers, side) for side in ("begins", "ends"))
            best, start, end = (
                t.cpu() for t in best_spans(logits, (begins != NOWHERE).to(logits.device))
            )
            each = torch.arange(len(numbers))
            none = (logits[:, 0, 0] + logits[:, 0, 1]).cpu().double()
            characters = begins[each, start].double(), ends[each, end].double()
            rows += numbers[: len(numbers) * counts]
            results.append(
                torch.stack([losses, best.double(), *characters, none], 1)[: len(numbers) * counts]
            )
        return {"rows": rows, "results": torch.cat(results)}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        rows = [row for tally in tallies for row in tally["rows"]]
        order = np.argsort(rows, kind="stable")
        results = torch.cat([tally["results"] for tally in tallies])[torch.from_numpy(order)]
        questions = self.questions[split]
        best: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(questions)
        none = [np.inf] * len(questions)
        for window, (_, score, start, end, without) in zip(
            self.windows[split], results.tolist(), strict=True
        ):
            if score > best[window.row][0]:
                best[window.row] = score, int(start), int(end)
            none[window.row] = min(none[window.row], without)
        answers = [
            "" if self.may_have_none and none[row] > score else questions[row].text[start:end]
            for row, (score, start, end) in enumerate(best)
        ]
        return {"loss": float(results[:, 0].mean()), **scores(answers, questions)}

    def _evaluated(self, split: str) -> list[list[int]]:
        """The windows of each batch of an evaluation, short ones first."""
        text_windows = self.windows[split]
        order = sorted(range(len(text_windows)), key=lambda row: len(text_windows[row].tokens))
        return [order[i : i + EVALUATED_AT_ONCE] for i in range(0, len(order), EVALUATED_AT_ONCE)]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return _epoch_order(self.seed, epoch, len(self.windows["train"]))

    def _batch(self, split: str, rows: Sequence[int]) -> Batch:
        text_windows = [self.windows[split][row] for row in rows]
        tokens, mask = self._pad([window.tokens for window in text_windows], self.padding)
        segments, _ = self._pad([window.segments for window in text_windows], 0)
        spans = torch.tensor([w.span(self.questions[split][w.row]) for w in text_windows])
        return tuple(sent(tensor, self.device) for tensor in (tokens, mask, segments, spans))

    def _places(self, split: str, rows: Sequence[int], side: str) -> Tensor:
        text_windows: list[TextWindow] = [self.windows[split][row] for row in rows]
        return self._pad([getattr(window, side) for window in text_windows], NOWHERE)[0]

    @staticmethod
    def _pad(columns: Sequence[Any], filling: int) -> tuple[Tensor, Tensor]:
        tensors = [torch.from_numpy(column).long() for column in columns]
        filled = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filling)
        lengths = torch.tensor([len(column) for column in columns])
        return filled, torch.arange(filled.shape[1]) < lengths[:, None]


@lru_cache(4)
def _epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def best_spans(logits: Tensor, of_text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best span of each window, of at most 30 tokens: the sums of both scores, the first and
    last tokens (windows,).

    ``logits`` are the scores of beginning and end (windows, length, 2). ``of_text`` says where the
    text is; without one the sum is minus infinity.
    """
    length = logits.shape[1]
    first, last = (logits[:, :, side].masked_fill(~of_text, -torch.inf) for side in (0, 1))
    allowed = torch.ones(length, length, dtype=torch.bool, device=logits.device)
    allowed = allowed.triu().tril(LONGEST - 1)
    sums = (first[:, :, None] + last[:, None, :]).masked_fill(~allowed, -torch.inf)
    best, place = sums.flatten(1).max(1)
    return best, place // length, place % length


def _losses(logits: Tensor, mask: Tensor, spans: Tensor) -> Tensor:
    """Of each window, the mean cross entropy of its two ends."""
    masked = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    ends = functional.cross_entropy(masked, spans, reduction="none")  # over the tokens
    return ends.mean(1)


@dataclass(frozen=True)
class Question:
    """A question on a text, with its right answers, if any, and where in the text each begins."""

    key: str
    question: str
    text: str
    answers: tuple[tuple[str, int], ...]


def normal(answer: str) -> list[str]:
    """The words that count: in lower case, without punctuation and the articles a, an, the."""
    letters = "".join(mark for mark in answer.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def exact(answer: str, right: str) -> float:
    """1 if two answers have the same words in the same order, else 0."""
    return float(normal(answer) == normal(right))


def f1(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall of an answer's words. Where one of them has no
    words: 1 if the other has none either, else 0.
    """
    words, right_words = normal(answer), normal(right)
    if not words or not right_words:
        return float(words == right_words)
    common = sum((Counter(words) & Counter(right_words)).values())
    # 2 p r / (p + r), p = common / words, r = common / right words
    return 2 * common / (len(words) + len(right_words))


def scores(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, float]:
    """Means over questions: of each the best over its right answers, the empty one if it has none
    (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1).

    ``exact_match`` and ``f1`` are from 0 to 1. Where some have no answer they are there for both
    kinds too (``f1_answered``, ``f1_unanswered``, ...).
    """
    metrics: dict[str, float] = {}
    pairs = list(zip(answers, questions, strict=True))
    parts = {
        "": pairs,
        "_answered": [pair for pair in pairs if pair[1].answers],
        "_unanswered": [pair for pair in pairs if not pair[1].answers],
    }
    for part, group in parts.items():
        if not group or (part and len(parts["_unanswered"]) == 0):
            continue
        for name, score in (("f1", f1), ("exact_match", exact)):
            # an answer without words, such as "the", is no right one where there are others
            right = [[text for text, _ in q.answers if normal(text)] or [""] for _, q in group]
            best = [
                max(score(answer, text) for text in texts)
                for (answer, _), texts in zip(group, right, strict=True)
            ]
            metrics[f"{name}{part}"] = sum(best) / len(best)
    return metrics


NOWHERE = -1  # where a token of the question stands in the text


@dataclass(frozen=True)
class TextWindow:
    """A question and a part of its text, as (T,) arrays. The first of the ``tokens`` stands for no
    answer; ``segments`` are 1 for the text.

    ``begins`` and ``ends`` are the characters of the text from which and up to which a token is,
    ``NOWHERE`` outside of it. ``row`` is the question's number.
    """

    row: int
    tokens: NDArray[np.int32]
    segments: NDArray[np.uint8]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]

    def span(self, question: Question) -> tuple[int, int]:
        """The first and last token of the first answer; (0, 0) if this window has not all of it."""
        if not question.answers:
            return 0, 0
        answer, first = question.answers[0]
        last = first + len(answer)
        inside = np.flatnonzero(self.begins != NOWHERE)
        if not len(inside) or self.begins[inside[0]] > first or self.ends[inside[-1]] < last:
            return 0, 0
        # the last token that begins no later, the first that ends no earlier
        start = int(inside[np.searchsorted(self.begins[inside], first, side="right") - 1])
        return start, int(inside[np.searchsorted(self.ends[inside], last, side="left")])


def windows(questions: Sequence[Question], tokenizer: Tokenizer, stride: int) -> list[TextWindow]:
    """Questions and their texts in windows of at most the tokenizer's ``max_length`` tokens, of
    which neighbours share ``stride``.

    Raises ConfigError where a question leaves no room for more of its text than ``stride``.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        return list(_by_pretrained(questions, tokenizer, stride))
    return [w for row, q in enumerate(questions) for w in _by_words(row, q, tokenizer, stride)]


def _by_words(row: int, question: Question, tokenizer: Words, stride: int) -> Iterator[TextWindow]:
    """Begin, question, end, text, end."""
    ahead = [tokenizer.begin, *tokenizer.numbers(question.question), tokenizer.end]
    words, numbers = list(re.finditer(Words.WORD, question.text)), tokenizer.numbers(question.text)
    room = tokenizer.max_length - len(ahead) - 1
    step = _step(question, room, stride)
    for first in range(0, max(1, len(words) - stride), step):
        part = words[first : first + room]
        outside = [NOWHERE] * len(ahead)
        yield TextWindow(
            row,
            np.array([*ahead, *numbers[first : first + room], tokenizer.end], np.int32),
            np.array([0] * len(ahead) + [1] * (len(part) + 1), np.uint8),
            np.array([*outside, *(word.start() for word in part), NOWHERE], np.int32),
            np.array([*outside, *(word.end() for word in part), NOWHERE], np.int32),
        )


def _by_pretrained(
    questions: Sequence[Question], tokenizer: PretrainedTokenizer, stride: int
) -> Iterator[TextWindow]:
    pretrained = tokenizer.tokenizer
    extra = pretrained.num_special_tokens_to_add(pair=True)
    for row, question in enumerate(questions):
        ahead = len(pretrained(question.question, add_special_tokens=False)["input_ids"])
        _step(question, tokenizer.max_length - ahead - extra, stride)
        cut = pretrained(
            question.question, question.text, truncation="only_second", max_length=tokenizer.max_length,
            stride=stride, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        for number, tokens in enumerate(cut["input_ids"]):
            of_text = np.array([part == 1 for part in cut.sequence_ids(number)])
            places = np.array(cut["offset_mapping"][number], np.int32)
            begins, ends = (
                np.where(of_text, places[:, side], NOWHERE).astype(np.int32) for side in (0, 1)
            )
            yield TextWindow(
                row, np.array(tokens, np.int32), of_text.astype(np.uint8), begins, ends
            )


def _step(question: Question, room: int, stride: int) -> int:
    if room <= stride:
        raise ConfigError(
            f"dataset.max_length: the question {question.key} leaves room for {max(0, room)} tokens of "
            f"its text, and windows share dataset.stride={stride}"
        )
    return room - stride


class GPTReaderNetwork(Headed):
    """Questions with their texts to logits (B, T, 2): where the answer begins and where it ends."""

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        return self.head(self.states(tokens))


def gpt_reader(
    vocabulary: int,
    max_length: int,
    context: int,
    embeddings: int | None,
    **decoder: Any,
) -> GPTReaderNetwork:
    """A reader, whose head has a bias, as in transformers; see ``gpt_classifier``."""
    size = embedded(vocabulary, max_length, context, embeddings)
    return GPTReaderNetwork(2, True, vocabulary=size, context=context, **decoder)


HOW = "put SQuAD's JSON files there (rajpurkar.github.io/SQuAD-explorer)"


def load_squad(
    version: str,
    held_out: float = Squad.held_out,
    split_seed: int = Squad.split_seed,
    limit: int | None = Squad.limit,
) -> dict[str, list[Question]]:
    """The questions of a version by split, from the official JSON files; in ``v2.0`` some have no
    answer.

    The official test sets are not public, so the development set is the test here, as is usual. The
    share ``held_out`` of the training articles is for validation. ``limit`` takes the questions of
    the first articles of the shuffle. Raises ConfigError for files that are missing or not as they
    should be.
    """
    train, dev = (
        read(storage.find("squad", [f"squad/{name}-{version}.json"], HOW))
        for name in ("train", "dev")
    )
    random.Random(split_seed).shuffle(train)
    cut = len(train) - math.ceil(held_out * len(train))
    first, val, test = (
        [question for article in articles for question in article]
        for articles in (train[:cut], train[cut:], dev)
    )
    return {"train": first[:limit], "val": val, "test": test}


def squad(config: Config, device: torch.device) -> Reading:
    options = config.dataset.as_kind(Squad)
    splits = load_squad(options.version, options.held_out, options.split_seed, options.limit)
    return Reading.of(config, splits, device)


def read(path: Path) -> list[list[Question]]:
    """The questions of a file by article. Raises ConfigError for what is no such file."""
    with refused(f"{path}: no file of SQuAD: ", OSError, ValueError, KeyError, TypeError):
        articles: list[list[Question]] = []
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
            articles.append([])
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = tuple((a["text"], a["answer_start"]) for a in entry["answers"])
                    asked, text = entry["question"].strip(), paragraph["context"]
                    articles[-1].append(Question(entry["id"], asked, text, answers))
        return articles


PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
FACTS = {
    "Where does {} live?": ("{} lives in {}.", ("Rome", "Paris", "Lima", "Oslo", "New York")),
    "What does {} like?": ("{} likes {}.", ("green tea", "chess", "old films", "rain", "jazz")),
}
HELD_OUT = 200  # questions for validation, and as many for the test


@cache
def generated(size: int, split_seed: int) -> dict[str, list[Question]]:
    """Who lives where and likes what, asked of a text that says so of several people; one question
    in five has no answer. All texts differ. ``size`` are for training, and 200 for each other
    split.
    """
    rng = random.Random(split_seed)
    by_text: dict[str, Question] = {}
    while len(by_text) < size + 2 * HELD_OUT:
        question = _question(rng, str(len(by_text)))
        by_text.setdefault(question.text, question)
    rows = list(by_text.values())
    return {
        "train": rows[:size],
        "val": rows[size : size + HELD_OUT],
        "test": rows[size + HELD_OUT :],
    }


def generated_questions(config: Config, device: torch.device) -> Reading:
    options = config.dataset.as_kind(GeneratedQuestions)
    return Reading.of(config, generated(options.size, options.split_seed), device)


def _question(rng: random.Random, key: str) -> Question:
    people = rng.sample(PEOPLE, 4)
    kinds = [rng.choice(list(FACTS)) for _ in people]
    facts = [FACTS[kind] for kind in kinds]
    values = [rng.choice(choices) for _, choices in facts]
    sentences = [
        form.format(who, value) for (form, _), who, value in zip(facts, people, values, strict=True)
    ]
    text, about = " ".join(sentences), rng.randrange(len(people))
    if rng.random() < 0.2:  # the text does not tell this of that person
        other = next(kind for kind in FACTS if kind != kinds[about])
        return Question(key, other.format(people[about]), text, ())
    before = sum(len(sentence) + 1 for sentence in sentences[:about])
    place = before + sentences[about].index(values[about])
    return Question(key, kinds[about].format(people[about]), text, ((values[about], place),))
