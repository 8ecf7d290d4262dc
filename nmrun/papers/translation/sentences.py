"""Pairs of sentences as token numbers, and how they are cut into batches of similar lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError

Rows = NDArray[np.int64]


class Dictionary(Protocol):
    """The tokens of a language; ``fairseq.data.Dictionary`` is one. Token i is ``symbols[i]``."""

    symbols: list[str]

    def pad(self) -> int: ...
    def eos(self) -> int: ...
    def unk(self) -> int: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Corpus:
    """Sentences as token numbers, one after the other: sentence i is ``tokens[starts[i] : starts[i
    + 1]]``, its last token the end mark.
    """

    tokens: NDArray[Any]
    starts: Rows

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Corpus:
        """Join sentences, each a sequence of token numbers with the end mark last."""
        flat = [token for sentence in sentences for token in sentence]
        return cls(np.array(flat, np.int32), np.cumsum([0, *map(len, sentences)]))

    def first(self, count: int) -> Corpus:
        """The first ``count`` sentences."""
        starts = self.starts[: count + 1]
        return Corpus(self.tokens[: starts[-1]], starts)

    @property
    def lengths(self) -> Rows:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def padded(
        self, rows: Rows, padding: int, left: bool = False
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Sentences padded to the longest of them, int64, and where there is no padding, (n,
        length) each. ``left``: as encoders want it.
        """
        lengths = (self.starts[rows + 1] - self.starts[rows])[:, None]
        columns = np.arange(lengths.max()) - (lengths.max() - lengths if left else 0)
        inside = (columns >= 0) & (columns < lengths)
        places = np.where(inside, self.starts[rows, None] + columns, 0)
        return np.where(inside, self.tokens[places], padding), inside


Pair = tuple[Corpus, Corpus]


def bucketed(pair: Pair, max_tokens: int) -> tuple[Rows, Rows]:
    """Sentences ``rows`` by length, and ``cuts``: batch i is ``rows[cuts[i] : cuts[i + 1]]``."""
    source, target = (corpus.lengths for corpus in pair)
    rows = np.lexsort((target, source))
    cuts, widest = [0], 0
    for end, width in enumerate(np.maximum(source, target)[rows].tolist()):
        widest = max(widest, width)
        if widest * (end + 1 - cuts[-1]) > max_tokens and end > cuts[-1]:
            cuts.append(end)
            widest = width
    return rows, np.array([*cuts, len(rows)])


def shuffled_within(rows: Rows, pair: Pair, random: np.random.Generator) -> Rows:
    """``rows`` of :func:`bucketed` in another order that it could have given: sentences of equal
    lengths change places.
    """
    mixed = random.permutation(rows)
    source, target = (corpus.lengths[mixed] for corpus in pair)
    return mixed[np.lexsort((target, source))]


def check(name: str, pair: Pair) -> None:
    """Raises ConfigError where the two sides of a split do not fit each other."""
    source, target = map(len, pair)
    if source != target or not source:
        raise ConfigError(f"{name}: {source} source sentences and {target} target sentences")
