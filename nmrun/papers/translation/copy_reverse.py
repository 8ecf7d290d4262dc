"""A generated corpus for translation: the first word of a source sentence says whether the target
is the rest of it or the rest reversed. No sentence is there twice.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.errors import ConfigError
from nmrun.papers.translation.keys import CopyReverse
from nmrun.papers.translation.sentences import Corpus
from nmrun.papers.translation.task import Translation

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

ORDERS = ("copy", "reverse")
Pair = tuple[list[int], list[int]]  # source and target, as tokens
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # with the numbers that fairseq gives them


class Symbols:
    """A fixed list of words as a dictionary; see :class:`nmrun.papers.translation.sentences.Dictionary`."""

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
        return isinstance(other, Symbols) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(tuple(self.symbols))


def build(config: Config, device: torch.device) -> Translation:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: if there are not so many different sentences.
    """
    options = config.dataset.as_kind(CopyReverse)
    vocabulary = Symbols([*ORDERS, *(f"w{number}" for number in range(options.words))])
    splits, references = {}, {}
    for name, pairs in sentences(options, vocabulary).items():
        source, target = ([sentence[side] for sentence in pairs] for side in (0, 1))
        splits[name] = Corpus.of(source), Corpus.of(target)
        references[name] = [
            " ".join(vocabulary.symbols[token] for token in sentence[:-1]) for sentence in target
        ]
    return Translation.of(config, splits, vocabulary, vocabulary, references, " ".join, device)


def sentences(options: CopyReverse, vocabulary: Symbols) -> dict[str, list[Pair]]:
    """Draw different sentences, by ``split_seed`` alone and not by the run's seed.

    They are drawn until there are enough, then dealt out at random, so that all splits have short
    and long ones in the same proportion.

    Returns:
        ``{"train" | "val" | "test": [(source, target), ...]}``.

    Raises:
        ConfigError: if there are not so many different sentences.
    """
    sizes = {"train": options.size, "val": options.val_size, "test": options.test_size}
    wanted = sum(sizes.values())
    possible = sum(len(ORDERS) * options.words**length for length in range(2, options.longest + 1))
    if wanted > possible:
        raise ConfigError(
            f"dataset=copy_reverse: its sizes add up to {wanted} sentences, and with dataset.words={options.words} and "
            f"dataset.longest={options.longest} there are {possible} different ones"
        )
    random = np.random.default_rng(options.split_seed)
    found: dict[tuple[int, ...], Pair] = {}
    while len(found) < wanted:
        pair = _sentence(random, vocabulary, options.words, options.longest)
        found[tuple(pair[0])] = pair
    drawn = list(found.values())
    mixed = iter([drawn[place] for place in random.permutation(wanted)])
    return {name: list(itertools.islice(mixed, size)) for name, size in sizes.items()}


def _sentence(random: np.random.Generator, vocabulary: Symbols, words: int, longest: int) -> Pair:
    order = int(random.integers(len(ORDERS)))
    first = len(SPECIAL) + len(ORDERS)
    rest = random.integers(first, first + words, size=random.integers(2, longest + 1)).tolist()
    target = rest if ORDERS[order] == "copy" else rest[::-1]
    return [len(SPECIAL) + order, *rest, vocabulary.eos()], [*target, vocabulary.eos()]
