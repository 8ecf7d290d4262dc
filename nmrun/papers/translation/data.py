"""Pairs of sentences: folders of fairseq-preprocess, Multi30k, and generated ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.errors import ConfigError, refused
from nmrun.lab.tasks.storage import cache_folder, key_of, path_of
from nmrun.papers.translation import CopyReverse, Fairseq, Multi30k
from nmrun.papers.translation.fairseq import Dictionary, dictionary, fairseq
from nmrun.papers.translation.prepare import multi30k_files, prepare, read
from nmrun.papers.translation.task import Corpus, Translation

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def fairseq_folder(config: Config, device: torch.device) -> Translation:
    """A folder that ``fairseq-preprocess`` has written."""
    options = config.dataset.as_kind(Fairseq)
    folder = path_of(options.path)
    pairs = {file.name.split(".")[1] for file in folder.glob("train.*-*.*.idx")}
    if len(pairs) != 1:
        raise ConfigError(
            f"dataset.path={options.path}: it takes a folder with train.<source>-<target>.<language>.idx of one "
            f"pair, as fairseq-preprocess or nmrun prepare makes it; there is {', '.join(sorted(pairs)) or 'none'}"
        )
    source, _, target = pairs.pop().partition("-")
    return load(config, device, folder, (source, target), options.subwords)


def load(
    config: Config,
    device: torch.device,
    folder: Path,
    languages: tuple[str, str],
    subwords: str,
) -> Translation:
    """Translation of the first language into the second, from ``dict.<language>.txt`` and
    ``<split>.<source>-<target>.<language>.{bin,idx}``, where splits are train, valid and test.

    BLEU is against ``<split>.<source>-<target>.<target>.txt``, as ``nmrun prepare`` writes it.
    Without it the target's tokens are joined, unknown ones remaining so. ``subwords`` is a key of
    ``JOINED``. Raises ConfigError for files that are missing or do not fit each other.
    """
    splits, references = {}, {}
    pair = "-".join(languages)
    with refused(f"{folder}: ", OSError, ValueError, RuntimeError, AssertionError):
        load_dictionary = fairseq("data").Dictionary.load
        source, target = (load_dictionary(str(folder / f"dict.{each}.txt")) for each in languages)
        for name, text in (("train", "train"), ("val", "valid"), ("test", "test")):
            sides = [folder / f"{text}.{pair}.{language}" for language in languages]
            splits[name] = _corpus(sides[0], source), _corpus(sides[1], target)
            plain = Path(f"{sides[1]}.txt")
            if name != "train":
                references[name] = (
                    read(plain)
                    if plain.exists()
                    else _text(splits[name][1], target, JOINED[subwords])
                )
    return Translation.of(config, splits, source, target, references, JOINED[subwords], device)


# from symbols to a plain sentence, by what became symbols
JOINED: dict[str, Callable[[list[str]], str]] = {
    "none": " ".join,
    "sentencepiece": lambda symbols: "".join(symbols).replace("\u2581", " ").strip(),
    "subword_nmt": lambda symbols: (" ".join(symbols) + " ").replace("@@ ", "").strip(),
}


def _corpus(prefix: Path, dictionary: Dictionary) -> Corpus:
    dataset = fairseq("data.data_utils").load_indexed_dataset(str(prefix), dictionary)
    if not isinstance(dataset, fairseq("data").MMapIndexedDataset):
        raise ConfigError(f"there is no {prefix}.idx of fairseq-preprocess's default kind (mmap)")
    lengths = np.asarray(dataset.sizes, np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    # the sentences lie one after the other: no need to read them
    return Corpus(np.memmap(f"{prefix}.bin", dtype=dataset._index.dtype, mode="r"), starts)


def _text(
    corpus: Corpus, dictionary: Dictionary, detokenize: Callable[[list[str]], str]
) -> list[str]:
    """A corpus as plain sentences. No translation is right about the mark of an unknown token."""
    symbols = [*dictionary.symbols]
    symbols[dictionary.unk()] = f"<{symbols[dictionary.unk()]}>"
    sentences = np.split(np.asarray(corpus.tokens), corpus.starts[1:-1])
    return [
        detokenize([symbols[token] for token in sentence.tolist()[:-1]]) for sentence in sentences
    ]


def multi30k(config: Config, device: torch.device) -> Translation:
    """Multi30k, task 1 (Elliott et al. 2016, arXiv 1605.00459); subwords are kept in the cache."""
    options = config.dataset.as_kind(Multi30k)
    languages = options.source, options.target
    texts = multi30k_files(languages, options.test)
    what = ["multi30k", languages, options.vocabulary]
    key = key_of(what, [file for pair in texts.values() for file in pair])
    folder = cache_folder() / f"multi30k-{key}"
    if not folder.is_dir():
        prepare(texts, languages, folder, options.vocabulary)
    return load(config, device, folder, languages, "sentencepiece")


ORDERS = ("copy", "reverse")
TokenPair = tuple[list[int], list[int]]  # source and target, as tokens
END = 2  # fairseq's number of the end mark; words begin after those of four marks
ORDER = 4


def copy_reverse(config: Config, device: torch.device) -> Translation:
    options = config.dataset.as_kind(CopyReverse)
    vocabulary = dictionary([*ORDERS, *(f"w{number}" for number in range(options.words))])
    splits, references = {}, {}
    for name, pairs in generated(options).items():
        source, target = ([sentence[side] for sentence in pairs] for side in (0, 1))
        splits[name] = Corpus.of(source), Corpus.of(target)
        references[name] = [
            " ".join(vocabulary.symbols[token] for token in sentence[:-1]) for sentence in target
        ]
    return Translation.of(config, splits, vocabulary, vocabulary, references, " ".join, device)


def generated(options: CopyReverse) -> dict[str, list[TokenPair]]:
    """Different sentences, source and target, by split: the first word says whether the target is
    the rest or the rest reversed.

    They are drawn by ``split_seed`` alone until there are enough, then dealt out at random. So all
    splits have short and long ones in the same proportion. Raises ConfigError if there are not so
    many different sentences.
    """
    sizes = {"train": options.size, "val": options.val_size, "test": options.test_size}
    total = sum(sizes.values())
    possible = sum(len(ORDERS) * options.words**length for length in range(2, options.longest + 1))
    if total > possible:
        raise ConfigError(
            f"dataset=copy_reverse: its sizes add up to {total} sentences, and with dataset.words={options.words} and "
            f"dataset.longest={options.longest} there are {possible} different ones"
        )
    random = np.random.default_rng(options.split_seed)
    pairs: dict[tuple[int, ...], TokenPair] = {}
    while len(pairs) < total:
        pair = _sentence(random, options.words, options.longest)
        pairs[tuple(pair[0])] = pair
    token_pairs = list(pairs.values())
    mixed = iter([token_pairs[place] for place in random.permutation(total)])
    return {name: list(itertools.islice(mixed, size)) for name, size in sizes.items()}


def _sentence(random: np.random.Generator, words: int, longest: int) -> TokenPair:
    order = int(random.integers(len(ORDERS)))
    first = ORDER + len(ORDERS)
    rest = random.integers(first, first + words, size=random.integers(2, longest + 1)).tolist()
    target = rest if ORDERS[order] == "copy" else rest[::-1]
    return [ORDER + order, *rest, END], [*target, END]
