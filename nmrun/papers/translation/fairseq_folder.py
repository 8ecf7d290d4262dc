"""Folders that ``fairseq-preprocess`` has written: ``dict.<language>.txt`` and
``<split>.<source>-<target>.<language>.{bin,idx}``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nmrun.errors import ConfigError
from nmrun.papers.translation.fairseq_import import fairseq
from nmrun.papers.translation.keys import Fairseq
from nmrun.papers.translation.sentences import Corpus, Dictionary, check
from nmrun.papers.translation.task import Translation

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def build(config: Config, device: torch.device) -> Translation:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Its ``path`` is a folder of fairseq's binary files.

    Raises:
        ConfigError: for a folder that is missing or that is not as said.
    """
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
    """Build translation of the first language into the second.

    Where there is ``<name>.<source>-<target>.<target>.txt``, as ``nmrun prepare`` writes it, BLEU
    is against the sentences in it; else the target's tokens are detokenised, unknown ones remaining
    so.

    Args:
        device: where batches go.
        texts: the names of the files for train, val and test.
        subwords: ``none``, ``sentencepiece`` or ``subword_nmt``.

    Raises:
        ConfigError: for files that are missing or do not fit each other.
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
    """Make a function from symbols to a plain sentence.

    Args:
        subwords: what becomes words: ``none``, ``sentencepiece`` or ``subword_nmt``.
        moses: the language whose Moses' tokenizer is taken back; None: none.

    Raises:
        ConfigError: with ``moses``, if sacremoses is not installed.
    """
    joined: dict[str, Callable[[list[str]], str]] = {
        "none": " ".join,
        "sentencepiece": lambda symbols: "".join(symbols).replace("\u2581", " ").strip(),
        "subword_nmt": lambda symbols: (" ".join(symbols) + " ").replace("@@ ", "").strip(),
    }
    if moses is None:
        return joined[subwords]
    try:
        from sacremoses import MosesDetokenizer
    except ImportError:
        raise ConfigError(
            "dataset.moses=true needs sacremoses: pip install nmrun[translation]"
        ) from None
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
    try:
        dictionary: Dictionary = fairseq("data").Dictionary.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{file}: not a dictionary of fairseq: {str(error).splitlines()[0]}"
        ) from None
    return dictionary


def _corpus(folder: Path, name: str, dictionary: Dictionary) -> Corpus:
    data, prefix = fairseq("data.data_utils"), str(folder / name)
    try:
        if Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.bin").stat().st_size == 0:
            raise ValueError("the .bin is empty")
        found = data.load_indexed_dataset(prefix, dictionary)
    except (AssertionError, ValueError, OSError) as error:
        raise ConfigError(
            f"{prefix}: not a binarised text of fairseq: {str(error).splitlines()[0]}"
        ) from None
    if found is None:
        others = ", ".join(sorted(file.name for file in folder.glob("*.idx"))) or "no others"
        raise ConfigError(
            f"{prefix}.idx, {prefix}.bin: there are no such files; there are {others}"
        )
    lengths = np.asarray(found.sizes, np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    # the sentences lie one after the other: no need to read them
    if isinstance(found, fairseq("data").MMapIndexedDataset):
        tokens = np.memmap(f"{prefix}.bin", dtype=found._index.dtype, mode="r")
        if len(tokens) != starts[-1]:
            raise ConfigError(
                f"{prefix}.bin: it has {len(tokens)} tokens, and by its .idx it should have {starts[-1]}"
            )
        return Corpus(tokens, starts)
    if found.supports_prefetch:  # an older format, which has to be read before it can be looked at
        found.prefetch(range(len(found)))
    return Corpus(np.concatenate([found[row].numpy() for row in range(len(found))]), starts)


def _text(
    corpus: Corpus, dictionary: Dictionary, detokenize: Callable[[list[str]], str]
) -> list[str]:
    """A corpus as plain sentences. An unknown token is marked such that no translation can be right
    about it.
    """
    symbols = [*dictionary.symbols]
    symbols[dictionary.unk()] = f"<{symbols[dictionary.unk()]}>"
    sentences = np.split(np.asarray(corpus.tokens), corpus.starts[1:-1])
    return [
        detokenize([symbols[token] for token in sentence.tolist()[:-1]]) for sentence in sentences
    ]


def _lines(file: Path) -> list[str]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\r\n") for line in lines]
