"""Questions whose answers are passages of a text (SQuAD), and a reader: a table of S-STE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import SHARE, Dataset, Encoding, Seeded
from nmrun.lab.keys.models import GPTClassifier
from nmrun.ranges import one_of, whole

QUESTIONS = "questions on texts"


@dataclass(frozen=True)
class Windowed(Encoding):
    """Questions on texts, which are cut into windows."""

    max_length: Annotated[int, "tokens of question and text; longer texts are cut into windows"] = (
        384
    )
    stride: Annotated[int, whole(0), "tokens that neighbouring windows share"] = 128
    tokenizer: Annotated[str, "words (hashed), or a Hugging Face tokenizer by name or folder"] = (
        "gpt2"
    )


@dataclass(frozen=True)
class GeneratedQuestions(Windowed, Seeded, Dataset):
    """Generated texts on who lives where and likes what, with questions, some without an answer;
    not real language.
    """

    data: ClassVar[str] = QUESTIONS
    builder: ClassVar[str] = "nmrun.papers.reading.task.generated_questions"

    size: Annotated[
        int,
        whole(1),
        "training questions; 200 others are for validation and 200 for the test",
    ] = 2000
    split_seed: Annotated[int, "which texts are generated; not changed by the run's seed"] = 0
    max_length: int = 64
    stride: int = 16
    tokenizer: str = "words"
    vocabulary: int = 256


@dataclass(frozen=True)
class Squad(Windowed, Seeded, Dataset):
    """SQuAD, questions whose answers are passages of a text, from its JSON files in
    NMRUN_DATA/squad.
    """

    data: ClassVar[str] = QUESTIONS
    builder: ClassVar[str] = "nmrun.papers.reading.task.squad"

    version: Annotated[
        str, one_of("v1.1", "v2.0"), "v1.1, or v2.0, in which some questions have no answer"
    ] = "v1.1"
    held_out: Annotated[
        float,
        SHARE,
        "share of the training articles that is for validation; the development set is the test",
    ] = 0.05
    split_seed: Annotated[int, "which articles are held out; not changed by the run's seed"] = 0
    limit: Annotated[
        int | None,
        whole(1, optional=True),
        "training questions that are used, those of the first articles after shuffling; null = all",
    ] = None


@dataclass(frozen=True)
class GPTReader(GPTClassifier):
    """GPT-2's architecture with a new head for answers in texts (SQuAD), to fine-tune a run of
    model=gpt2 (init=RUN).
    """

    data: ClassVar[str] = QUESTIONS
    builder: ClassVar[str] = "nmrun.papers.reading.task.gpt_reader"
