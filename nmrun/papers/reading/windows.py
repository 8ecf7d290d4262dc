"""Questions on texts as token numbers: a long text is cut into windows that overlap, each after the
question, and of each token of the text it is known where in the text it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.tasks.text_classification.tokens import PretrainedTokenizer, Tokenizer, Words
from nmrun.papers.reading.answers import Question

NOWHERE = -1  # where a token of the question stands in the text


@dataclass(frozen=True)
class TextWindow:
    """A question and a part of its text.

    Attributes:
        row: the question's number.
        tokens: (T,) int32; the first one stands for no answer.
        segments: (T,) uint8, 1 for the text.
        begins, ends: (T,) int32: the characters of the text from which and up to which a token is;
            ``NOWHERE`` outside of the text.
    """

    row: int
    tokens: NDArray[np.int32]
    segments: NDArray[np.uint8]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]

    def span(self, question: Question) -> tuple[int, int]:
        """The first and last token of the question's first answer: (0, 0) if this window has not
        all of it.
        """
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
    """Cut questions and their texts into windows.

    Args:
        tokenizer: of :func:`nmrun.lab.tasks.text_classification.tokens.tokenizer`; a window has its ``max_length`` tokens at
            most.

    Raises:
        ConfigError: where a question leaves no room for more of its text than ``stride``.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        return list(_by_pretrained(questions, tokenizer, stride))
    assert isinstance(tokenizer, Words)
    return [w for row, q in enumerate(questions) for w in _by_words(row, q, tokenizer, stride)]


def _by_words(row: int, asked: Question, tokenizer: Words, stride: int) -> Iterator[TextWindow]:
    """Begin, question, end, text, end."""
    ahead = [tokenizer.begin, *tokenizer.numbers(asked.question), tokenizer.end]
    words, numbers = list(re.finditer(Words.WORD, asked.text)), tokenizer.numbers(asked.text)
    room = tokenizer.max_length - len(ahead) - 1
    step = _step(asked, room, stride)
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
    own = tokenizer.tokenizer
    if not own.is_fast:
        raise ConfigError(
            "dataset.tokenizer: this one does not tell where in the text its tokens stand"
        )
    extra = own.num_special_tokens_to_add(pair=True)
    for row, asked in enumerate(questions):
        ahead = len(own(asked.question, add_special_tokens=False)["input_ids"])
        _step(asked, tokenizer.max_length - ahead - extra, stride)
        cut = own(
            asked.question, asked.text, truncation="only_second", max_length=tokenizer.max_length,
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


def _step(asked: Question, room: int, stride: int) -> int:
    if room <= stride:
        raise ConfigError(
            f"dataset.max_length: the question {asked.key} leaves room for {max(0, room)} tokens of "
            f"its text, and windows share dataset.stride={stride}"
        )
    return room - stride
