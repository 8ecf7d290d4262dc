"""Pairs of sentences: folders of fairseq-preprocess, Multi30k, and generated ones."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.errors import ConfigError, needs, refused
from nmrun.lab.tasks.storage import cache_folder
from nmrun.papers.translation.fairseq import fairseq
from nmrun.papers.translation.keys import CopyReverse, Fairseq, Multi30k
from nmrun.papers.translation.prepare import multi30k_files, prepare
from nmrun.papers.translation.sentences import Corpus, Dictionary, check
from nmrun.papers.translation.task import Translation

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def fairseq_folder(config: Config, device: torch.device) -> Translation:
    """A folder that ``fairseq-preprocess`` has written."""
    options = config.dataset.as_kind(Fairseq)
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"dataset.path={options.path}: there is no such folder; fairseq-preprocess or nmrun prepare makes one"
        )
    source, target = options.source or "", options.target or ""
    if not (source and target):
        source, target = _languages(folder)
    texts = {"train": options.train, "val": options.val or "valid", "test": options.test or "test"}
    return load(config, device, folder, (source, target), texts, options.subwords, options.moses)


def load(
    config: Config,
    device: torch.device,
    folder: Path,
    languages: tuple[str, str],
    texts: dict[str, str],
    subwords: str,
    moses: bool = False,
) -> Translation:
    """Translation of the first language into the second, from ``dict.<language>.txt`` and
    ``<name>.<source>-<target>.<language>.{bin,idx}``.

    BLEU is against ``<name>.<source>-<target>.<target>.txt``, as ``nmrun prepare`` writes it.
    Without it the target's tokens are detokenised, unknown ones remaining so. ``texts`` are the
    names for train, val and test; ``subwords`` is as of :func:`detokenizer`. Raises ConfigError for
    files that are missing or do not fit each other.
    """
    pair = "-".join(languages)
    source, target = (_dictionary(folder, language) for language in languages)
    detokenize = detokenizer(subwords, languages[1] if moses else None)
    splits, references = {}, {}
    for name, text in texts.items():
        prefix = folder / f"{text}.{pair}"
        splits[name] = (
            _corpus(folder, f"{text}.{pair}.{languages[0]}", source),
            _corpus(folder, f"{text}.{pair}.{languages[1]}", target),
        )
        check(text, splits[name], (source, target))
        plain = Path(f"{prefix}.{languages[1]}.txt")
        if name != "train":
            references[name] = (
                _lines(plain) if plain.exists() else _text(splits[name][1], target, detokenize)
            )
            if len(references[name]) != len(splits[name][1]):
                raise ConfigError(
                    f"{plain}: it has {len(references[name])} lines for {len(splits[name][1])} sentences"
                )
    return Translation.of(config, splits, source, target, references, detokenize, device)


def detokenizer(subwords: str, moses: str | None = None) -> Callable[[list[str]], str]:
    """From symbols to a plain sentence. ``subwords`` is what becomes words: ``none``,
    ``sentencepiece`` or ``subword_nmt``; ``moses`` the language whose Moses' tokenizer is taken
    back.

    Raises ConfigError with ``moses``, if sacremoses is not installed.
    """
    joined: dict[str, Callable[[list[str]], str]] = {
        "none": " ".join,
        "sentencepiece": lambda symbols: "".join(symbols).replace("\u2581", " ").strip(),
        "subword_nmt": lambda symbols: (" ".join(symbols) + " ").replace("@@ ", "").strip(),
    }
    if moses is None:
        return joined[subwords]
    with needs("dataset.moses=true", "translation"):
        from sacremoses import MosesDetokenizer
    detokenizer = MosesDetokenizer(lang=moses)
    return lambda symbols: str(detokenizer.detokenize(joined[subwords](symbols).split()))


def _languages(folder: Path) -> tuple[str, str]:
    """Source and target from the names of the files, if these leave no doubt."""
    pairs = {file.name.split(".")[1] for file in folder.glob("*.*-*.*")}
    source, _, target = pairs.pop().partition("-") if len(pairs) == 1 else ("", "", "")
    if not (source and target):
        what = (
            f"files for {', '.join(sorted(pairs))}; say which by dataset.source and dataset.target"
            if pairs
            else "no <split>.<source>-<target>.<language>"
        )
        raise ConfigError(f"dataset.path={folder}: it has {what}")
    return source, target


def _dictionary(folder: Path, language: str) -> Dictionary:
    file = folder / f"dict.{language}.txt"
    if not file.is_file():
        raise ConfigError(
            f"{file}: there is no such file; a folder of fairseq-preprocess has a dict.<language>.txt for both languages"
        )
    with refused(f"{file}: not a dictionary of fairseq: ", RuntimeError, ValueError):
        dictionary: Dictionary = fairseq("data").Dictionary.load(str(file))
    return dictionary


def _corpus(folder: Path, name: str, dictionary: Dictionary) -> Corpus:
    data, prefix = fairseq("data.data_utils"), str(folder / name)
    with refused(
        f"{prefix}: not a binarised text of fairseq: ", AssertionError, ValueError, OSError
    ):
        if Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.bin").stat().st_size == 0:
            raise ValueError("the .bin is empty")
        dataset = data.load_indexed_dataset(prefix, dictionary)
    if dataset is None:
        others = ", ".join(sorted(file.name for file in folder.glob("*.idx"))) or "no others"
        raise ConfigError(
            f"{prefix}.idx, {prefix}.bin: there are no such files; there are {others}"
        )
    lengths = np.asarray(dataset.sizes, np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    # the sentences lie one after the other: no need to read them
    if isinstance(dataset, fairseq("data").MMapIndexedDataset):
        tokens = np.memmap(f"{prefix}.bin", dtype=dataset._index.dtype, mode="r")
        if len(tokens) != starts[-1]:
            raise ConfigError(
                f"{prefix}.bin: it has {len(tokens)} tokens, and by its .idx it should have {starts[-1]}"
            )
        return Corpus(tokens, starts)
    # an older format, which has to be read before it can be looked at
    if dataset.supports_prefetch:
        dataset.prefetch(range(len(dataset)))
    return Corpus(np.concatenate([dataset[row].numpy() for row in range(len(dataset))]), starts)


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


def _lines(file: Path) -> list[str]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\r\n") for line in lines]


def multi30k(config: Config, device: torch.device) -> Translation:
    """Multi30k, task 1 (Elliott et al. 2016, arXiv 1605.00459); subwords are kept in the cache."""
    options = config.dataset.as_kind(Multi30k)
    languages = options.source, options.target
    texts = multi30k_files(languages, options.test)
    stats = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for pair in texts.values()
        for file in pair
    ]
    key = hashlib.sha256(json.dumps([stats, languages, options.vocabulary]).encode()).hexdigest()[
        :16
    ]
    folder = cache_folder() / f"multi30k-{key}"
    if not folder.is_dir():
        prepare(texts, languages, folder, options.vocabulary)
    names = {"train": "train", "val": "valid", "test": "test"}
    return load(config, device, folder, languages, names, "sentencepiece")


ORDERS = ("copy", "reverse")
TokenPair = tuple[list[int], list[int]]  # source and target, as tokens
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # with the numbers that fairseq gives them


class Symbols:
    """A fixed list of words as a dictionary; see :class:`nmrun.papers.translation.sentences.Dictionary`."""

    def __init__(self, words: list[str]) -> None:
        self.symbols = [*SPECIAL, *words]

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


def copy_reverse(config: Config, device: torch.device) -> Translation:
    options = config.dataset.as_kind(CopyReverse)
    vocabulary = Symbols([*ORDERS, *(f"w{number}" for number in range(options.words))])
    splits, references = {}, {}
    for name, pairs in generated(options, vocabulary).items():
        source, target = ([sentence[side] for sentence in pairs] for side in (0, 1))
        splits[name] = Corpus.of(source), Corpus.of(target)
        references[name] = [
            " ".join(vocabulary.symbols[token] for token in sentence[:-1]) for sentence in target
        ]
    return Translation.of(config, splits, vocabulary, vocabulary, references, " ".join, device)


def generated(options: CopyReverse, vocabulary: Symbols) -> dict[str, list[TokenPair]]:
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
        pair = _sentence(random, vocabulary, options.words, options.longest)
        pairs[tuple(pair[0])] = pair
    token_pairs = list(pairs.values())
    mixed = iter([token_pairs[place] for place in random.permutation(total)])
    return {name: list(itertools.islice(mixed, size)) for name, size in sizes.items()}


def _sentence(
    random: np.random.Generator, vocabulary: Symbols, words: int, longest: int
) -> TokenPair:
    order = int(random.integers(len(ORDERS)))
    first = len(SPECIAL) + len(ORDERS)
    rest = random.integers(first, first + words, size=random.integers(2, longest + 1)).tolist()
    target = rest if ORDERS[order] == "copy" else rest[::-1]
    return [len(SPECIAL) + order, *rest, vocabulary.eos()], [*target, vocabulary.eos()]
