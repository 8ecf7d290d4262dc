"""Texts and pairs of texts as token numbers, as encoders read them: by a tokenizer of Hugging Face,
or by words hashed to numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.lab.tasks.hugging_face import fetch

if TYPE_CHECKING:
    from nmrun.lab.keys.texts import Encoding

Text = tuple[str, ...]  # one text, or two: a premise and a hypothesis, say


class Tokenizer(Protocol):
    """What makes token numbers of texts.

    Attributes:
        vocabulary: the number of different tokens.
        padding: the token that fills up.
        max_length: the most tokens that a text gets.
    """

    vocabulary: int
    padding: int
    max_length: int

    def encode(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """Encode texts, or pairs of texts.

        Returns:
            Tokens (int32) and segments (uint8) of all texts, one after the other, and where each
            starts (int64, texts + 1).
        """


def tokenizer(options: Encoding) -> Tokenizer:
    """Make the tokenizer of a ``dataset:`` config.

    Args:
        options: ``tokenizer`` is ``words``, or a folder or name of Hugging Face; ``vocabulary`` and
            ``max_length`` are numbers of tokens.

    Raises:
        ConfigError: if it cannot be had, or cannot pad.
    """
    if options.tokenizer == "words":
        return Words(options.vocabulary, options.max_length)
    return PretrainedTokenizer(options.tokenizer, options.max_length)


class Words:
    """Words in lower case and punctuation marks, each hashed (CRC-32), which needs no file.

    0 is padding, 1 begins a text, 2 ends it, and each text of a pair. Where that is too long, words
    go from the end of the longer text.

    Args:
        vocabulary: number of different tokens; words have ``vocabulary`` - 3 of them.
    """

    WORD = r"\w+|[^\w\s]"
    padding, begin, end = 0, 1, 2

    def __init__(self, vocabulary: int, max_length: int) -> None:
        self.vocabulary, self.max_length = vocabulary, max_length

    def encode(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Tokenizer.encode`."""
        tokens, segments = [], []
        for text in texts:
            parts = [self.numbers(part) for part in text]
            while sum(map(len, parts)) + len(parts) + 1 > self.max_length:
                max(parts, key=len).pop()
            tokens.append([self.begin, *(token for part in parts for token in (*part, self.end))])
            segments.append(
                [0, *(number for number, part in enumerate(parts) for _ in range(len(part) + 1))]
            )
        return _flat(tokens, segments)

    def numbers(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin and end it."""
        words = re.findall(self.WORD, text.lower())
        return [3 + zlib.crc32(word.encode()) % (self.vocabulary - 3) for word in words]


class PretrainedTokenizer:
    """A tokenizer of Hugging Face. What has no token for padding, as GPT-2's, pads with the one that
    ends a text.

    Raises:
        ConfigError: if it cannot be had, or cannot pad.
    """

    def __init__(self, source: str, max_length: int) -> None:
        key = "dataset.tokenizer (default: model.pretrained)"
        self.tokenizer = fetch("AutoTokenizer", key, source)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(
                f"dataset.tokenizer={source}: it has no token for padding, nor one that ends a text"
            )
        if self.tokenizer.model_max_length < max_length:
            raise ConfigError(
                f"dataset.max_length={max_length}: {source} takes at most {self.tokenizer.model_max_length} tokens"
            )
        self.vocabulary, self.padding, self.max_length = (
            len(self.tokenizer),
            self.tokenizer.pad_token_id,
            max_length,
        )

    def encode(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Tokenizer.encode`."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded = self.tokenizer(
            *columns,
            truncation=True,
            max_length=self.max_length,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        return _flat(encoded["input_ids"], encoded["token_type_ids"])


def _flat(tokens: list[list[int]], segments: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    starts = np.cumsum([0, *map(len, tokens)])
    numbers = np.fromiter((n for some in tokens for n in some), np.int32, starts[-1])
    kinds = np.fromiter((n for some in segments for n in some), np.uint8, starts[-1])
    return torch.from_numpy(numbers), torch.from_numpy(kinds), torch.from_numpy(starts)
