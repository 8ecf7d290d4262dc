"""A generated corpus for translation: the first word of a source sentence says whether the target
is the rest of it or the rest reversed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.settings.datasets import CopyReverse
from nmrun.tasks.translation import Corpus, Translation

if TYPE_CHECKING:
    from nmrun.settings.config import Config

ORDERS = ("copy", "reverse")
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # with the numbers that fairseq gives them


class Vocabulary:
    """A fixed list of words as a dictionary; see :class:`nmrun.tasks.translation.Dictionary`."""

    def __init__(self, words: list[str]) -> None:
        self.symbols = [*SPECIAL, *words]

    def bos(self) -> int:
        return 0

    def pad(self) -> int:
        return 1

    def eos(self) -> int:
        return 2

    def unk(self) -> int:
        return 3

    def __len__(self) -> int:
        return len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(tuple(self.symbols))


def build(config: Config, device: torch.device) -> Translation:
    """The task of the config's ``dataset`` group. The sentences depend on ``split_seed`` alone, not
    on the run's seed.
    """
    options = config.dataset.as_kind(CopyReverse)
    vocabulary = Vocabulary([*ORDERS, *(f"w{number}" for number in range(options.words))])
    random = np.random.default_rng(options.split_seed)
    splits, references = {}, {}
    for name in ("train", "val", "test"):
        number = {"train": options.size, "val": options.val_size, "test": options.test_size}[name]
        pairs = [
            _sentence(random, vocabulary, options.words, options.longest) for _ in range(number)
        ]
        source, target = ([sentence[side] for sentence in pairs] for side in (0, 1))
        splits[name] = Corpus.of(source), Corpus.of(target)
        references[name] = [
            " ".join(vocabulary.symbols[token] for token in sentence[:-1]) for sentence in target
        ]
    return Translation.of(config, splits, vocabulary, vocabulary, references, " ".join, device)


def _sentence(
    random: np.random.Generator, vocabulary: Vocabulary, words: int, longest: int
) -> tuple[list[int], list[int]]:
    order = int(random.integers(len(ORDERS)))
    first = len(SPECIAL) + len(ORDERS)
    rest = random.integers(first, first + words, size=random.integers(2, longest + 1)).tolist()
    target = rest if ORDERS[order] == "copy" else rest[::-1]
    return [len(SPECIAL) + order, *rest, vocabulary.eos()], [*target, vocabulary.eos()]
