"""The keys of reading's data sets and model, and what the package says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.data_groups import SHARE, Dataset, Encoded, Seeded
from nmrun.lab.keys.installed import Entry
from nmrun.lab.keys.models import GPTClassifier
from nmrun.ranges import one_of, whole

QUESTIONS = "questions on texts"


@dataclass(frozen=True)
class Windowed(Encoded):
    """Questions on texts, which are cut into windows."""

    stride: Annotated[int, whole(0)]


@dataclass(frozen=True)
class GeneratedQuestions(Windowed, Seeded, Dataset):
    """Generated questions."""

    data: ClassVar[str] = QUESTIONS

    size: Annotated[int, whole(1)]


@dataclass(frozen=True)
class Squad(Windowed, Seeded, Dataset):
    """SQuAD."""

    data: ClassVar[str] = QUESTIONS

    version: Annotated[str, one_of("v1.1", "v2.0")]
    held_out: Annotated[float, SHARE]
    limit: Annotated[int | None, whole(1, optional=True)]


@dataclass(frozen=True)
class GPTReader(GPTClassifier):
    """GPT-2's architecture with a head for answers."""

    data: ClassVar[str] = QUESTIONS


CONF = "nmrun.papers.conf"
GENERATED = Entry(GeneratedQuestions, "nmrun.papers.reading.generated_questions.build", CONF)
SQUAD = Entry(Squad, "nmrun.papers.reading.squad.build", CONF)
GPT_READER = Entry(GPTReader, "nmrun.papers.reading.gpt_reader.build", CONF)
