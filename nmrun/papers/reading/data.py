"""Questions on texts: SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, and 2018, arXiv 1806.03822),
and generated ones.
"""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import refused
from nmrun.lab.tasks import storage
from nmrun.papers.reading.keys import GeneratedQuestions, Squad
from nmrun.papers.reading.task import Question

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.reading.task import Reading


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
    from nmrun.papers.reading.task import Reading

    options = config.dataset.as_kind(Squad)
    splits = load_squad(options.version, options.held_out, options.split_seed, options.limit)
    return Reading.of(config, splits, device)


def read(path: Path) -> list[list[Question]]:
    """The questions of a file by article. Raises ConfigError for what is no such file."""
    with refused(f"{path}: no file of SQuAD: ", OSError, ValueError, KeyError, TypeError):
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            [question for text in a["paragraphs"] for question in _questions(text)]
            for a in articles
        ]


def _questions(paragraph: dict[str, Any]) -> list[Question]:
    return [
        Question(
            entry["id"],
            entry["question"].strip(),
            paragraph["context"],
            tuple((answer["text"], answer["answer_start"]) for answer in entry["answers"]),
        )
        for entry in paragraph["qas"]
    ]


PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
FACTS = {
    "Where does {} live?": ("{} lives in {}.", ("Rome", "Paris", "Lima", "Oslo", "New York")),
    "What does {} like?": ("{} likes {}.", ("green tea", "chess", "old films", "rain", "jazz")),
}
HELD_OUT = 200  # questions for validation, and as many for the test


@cache
def generated(size: int = 2000, split_seed: int = 0) -> dict[str, list[Question]]:
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
    from nmrun.papers.reading.task import Reading

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
