"""Answers to questions on texts, and how they are scored, as in SQuAD (Rajpurkar et al. 2016,
arXiv 1606.05250, section 6.1).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question on a text.

    Attributes:
        key: its own.
        question, text: strings.
        answers: right ones, each with the place in the text where it begins; none: the text has
            none.
    """

    key: str
    question: str
    text: str
    answers: tuple[tuple[str, int], ...]


def normal(answer: str) -> list[str]:
    """The words that count: in lower case, without punctuation and the articles a, an, the."""
    letters = "".join(mark for mark in answer.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def exact(given: str, right: str) -> float:
    """1 if two answers have the same words in the same order, else 0."""
    return float(normal(given) == normal(right))


def f1(given: str, right: str) -> float:
    """The harmonic mean of precision and recall of an answer's words.

    Returns:
        0 to 1. Where one of them has no words: 1 if the other has none either, else 0.
    """
    own, wanted = normal(given), normal(right)
    if not own or not wanted:
        return float(own == wanted)
    common = sum((Counter(own) & Counter(wanted)).values())
    # 2 p r / (p + r), p = common / own, r = common / wanted
    return 2 * common / (len(own) + len(wanted))


def scores(given: Sequence[str], questions: Sequence[Question]) -> dict[str, float]:
    """Means over questions: of each the best over its right answers, the empty one if it has none.

    Returns:
        ``exact_match`` and ``f1``, from 0 to 1; where some have no answer also both for those that
        have one and those that have none (``f1_answered``, ``f1_unanswered``, ...).
    """
    found: dict[str, float] = {}
    asked = list(zip(given, questions, strict=True))
    parts = {
        "": asked,
        "_answered": [pair for pair in asked if pair[1].answers],
        "_unanswered": [pair for pair in asked if not pair[1].answers],
    }
    for part, some in parts.items():
        if not some or (part and len(parts["_unanswered"]) == 0):
            continue
        for name, score in (("f1", f1), ("exact_match", exact)):
            # an answer without words, such as "the", is no right one where there are others
            right = [[text for text, _ in q.answers if normal(text)] or [""] for _, q in some]
            best = [
                max(score(own, text) for text in texts)
                for (own, _), texts in zip(some, right, strict=True)
            ]
            found[f"{name}{part}"] = sum(best) / len(best)
    return found
