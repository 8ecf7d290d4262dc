"""SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, and 2018, arXiv 1806.03822): questions whose
answers are passages of an article of Wikipedia, from the official JSON files; in version 2 some
have none.

The official test sets are not public, so the development set is the test here, as is usual, and
articles are held out of the training set for validation.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.lab.tasks import storage
from nmrun.papers.reading.answers import Question
from nmrun.papers.reading.keys import Squad

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.reading.task import Reading

HOW = "put SQuAD's JSON files there (rajpurkar.github.io/SQuAD-explorer)"


def load(
    version: str, held_out: float = 0.05, split_seed: int = 0, limit: int | None = None
) -> dict[str, list[Question]]:
    """Load both files of a version and split the first.

    Args:
        version: ``v1.1`` or ``v2.0``.
        held_out: the share of the training set's articles that is for validation.
        limit: training questions at most, those of the first articles of the shuffle; None: all.

    Returns:
        The questions of ``train``, ``val`` and ``test``.

    Raises:
        ConfigError: for files that are missing or not as they should be.
    """
    train, dev = (
        read(storage.find("squad", [f"squad/{name}-{version}.json"], HOW))
        for name in ("train", "dev")
    )
    random.Random(split_seed).shuffle(train)
    cut = len(train) - math.ceil(held_out * len(train))
    if not 0 < cut < len(train):
        raise ConfigError(
            f"dataset.held_out={held_out}: of {len(train)} articles for training that leaves {cut}"
        )
    first, held, test = (
        [question for article in articles for question in article]
        for articles in (train[:cut], train[cut:], dev)
    )
    return {"train": first[:limit], "val": held, "test": test}


def build(config: Config, device: torch.device) -> Reading:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.papers.reading.task import Reading

    options = config.dataset.as_kind(Squad)
    splits = load(options.version, options.held_out, options.split_seed, options.limit)
    return Reading.of(config, splits, device)


def read(path: Path) -> list[list[Question]]:
    """Read a file of SQuAD.

    Raises:
        ConfigError: for what is not such a file, and for an answer that is not where the file says.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        found = [[question for text in a["paragraphs"] for question in _of(text)] for a in articles]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no file of SQuAD: {type(error).__name__} {error}") from None
    for question in (question for article in found for question in article):
        for answer, start in question.answers:
            if question.text[start : start + len(answer)] != answer:
                raise ConfigError(
                    f"{path}: question {question.key}: its text has no {answer!r} at {start}"
                )
    if not any(found):
        raise ConfigError(f"{path}: it has no questions")
    return found


def _of(paragraph: dict[str, Any]) -> list[Question]:
    return [
        Question(
            asked["id"],
            asked["question"].strip(),
            paragraph["context"],
            tuple((answer["text"], answer["answer_start"]) for answer in asked["answers"]),
        )
        for asked in paragraph["qas"]
    ]
