"""``nmrun prepare``: raw parallel text into subwords and fairseq's binary files, ready for
``dataset=fairseq`` (or ``fairseq-train``).

"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nmrun.errors import ConfigError, needs, refused
from nmrun.lab.arguments import Parser, in_range
from nmrun.lab.config.command_line import word
from nmrun.lab.runs import locks
from nmrun.lab.tasks.storage import path_of
from nmrun.papers.translation.fairseq import fairseq
from nmrun.ranges import whole

Files = dict[str, tuple[Path, Path]]
LANGUAGE = re.compile(r"\w+")
LONGEST = 250  # subwords of a side of a training pair


def multi30k_files(languages: tuple[str, str], test: str) -> Files:
    """The raw text of Multi30k: files of train, valid and test for both languages. Raises
    ConfigError with how to get it.
    """
    folder = path_of("multi30k")
    names = {"train": "train", "valid": "val", "test": test}
    with refused("dataset=multi30k, data/task1/raw of github.com/multi30k/dataset: ", ConfigError):
        return text_files({split: folder / name for split, name in names.items()}, languages)


def text_files(prefixes: dict[str, Path], languages: tuple[str, str]) -> Files:
    """The files of each split, ``<prefix>.<language>`` or that with ``.gz``. Raises ConfigError where
    there is neither."""
    files = {}
    for split, prefix in prefixes.items():
        sides = [f"{prefix}.{language}" for language in languages]
        left, right = (Path(side if Path(side).is_file() else f"{side}.gz") for side in sides)
        for file in (left, right):
            if not file.is_file():
                raise ConfigError(f"{file.with_suffix('')}: there is no such file, nor with .gz")
        files[split] = left, right
    return files


def prepare(texts: Files, languages: tuple[str, str], to: Path, vocabulary: int) -> str:
    """Subwords and fairseq's binary files of raw text, in a folder that appears when it is whole.

    BPE by sentencepiece is learned on the training text of both languages; their dictionary is made as
    ``fairseq-preprocess --joined-dictionary`` makes it. Beside the binary files there are the ``.model``
    files of sentencepiece and the target of valid and test as plain text, for BLEU. Training pairs with
    more than ``LONGEST`` subwords on a side, or with an empty side, are left out. Raises ConfigError for
    texts of unequal length, and a vocabulary that they are too small for.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with locks.folder_beside(to) as part:  # first, since a folder may not be writable
        (folder := part / to.name).mkdir()
        counts = _write(texts, languages, folder, vocabulary)
        try:
            os.rename(folder, to)
        except OSError:
            if not to.is_dir():  # otherwise another process was faster, with the same
                raise
    return f"{to}: {counts}"


def _write(texts: Files, languages: tuple[str, str], folder: Path, vocabulary: int) -> str:
    """The files of :func:`prepare`; returns how many pairs and tokens they have."""
    with needs("BPE", "translation"):
        from sentencepiece import SentencePieceProcessor
    lines: dict[str, list[tuple[str, str]]] = {}
    for split, files in texts.items():
        left, right = map(read, files)
        if len(left) != len(right):
            names = " and ".join(map(str, files))
            raise ConfigError(f"{names}: {len(left)} and {len(right)} lines")
        lines[split] = list(zip(left, right, strict=True))
    lines["train"] = [pair for pair in lines["train"] if all(side.strip() for side in pair)]
    if empty := next((texts[split][0] for split, pairs in lines.items() if not pairs), None):
        raise ConfigError(f"{empty}: there is no pair of sentences in it")
    model = _bpe(itertools.chain(*zip(*lines["train"], strict=True)), vocabulary)
    encode = SentencePieceProcessor(model_proto=model).encode
    pieces = {
        split: [[encode(side, out_type=str) for side in pair] for pair in pairs]
        for split, pairs in lines.items()
    }
    pieces["train"] = [p for p in pieces["train"] if max(map(len, p)) <= LONGEST]
    dictionary = fairseq("data").Dictionary()
    for piece, number in Counter(itertools.chain(*itertools.chain(*pieces["train"]))).items():
        dictionary.add_symbol(piece, number)
    dictionary.finalize()  # the commonest first, and a multiple of 8 tokens
    for side, language in enumerate(languages):
        dictionary.save(str(folder / f"dict.{language}.txt"))
        (folder / f"sentencepiece.{language}.model").write_bytes(model)
        for split in texts:
            name = folder / f"{split}.{'-'.join(languages)}.{language}"
            _binarise([pair[side] for pair in pieces[split]], dictionary, name)
            if side == 1 and split != "train":
                plain = "".join(f"{target}\n" for _, target in lines[split])
                Path(f"{name}.txt").write_bytes(plain.encode())
    counts = ", ".join(f"{split} {len(pairs)}" for split, pairs in pieces.items())
    return f"{counts} pairs; a dictionary of {len(dictionary)} tokens"


def read(file: Path) -> list[str]:
    """The lines of a text, which may be compressed. Only a line feed ends one: other separators of
    Unicode occur within sentences.

    Raises ConfigError for a file that is not UTF-8, or damaged.
    """
    with (
        refused(f"{file}: ", UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error),
        gzip.open(file) if file.suffix == ".gz" else file.open("rb") as raw,
    ):
        lines = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
        return [line.rstrip("\r\n") for line in lines]


def _bpe(text: Iterable[str], vocabulary: int) -> bytes:
    """A model of sentencepiece."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    with refused(
        f"vocabulary={vocabulary}: sentencepiece cannot learn it: ", RuntimeError, ValueError
    ):
        SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            character_coverage=1.0,
            minloglevel=3,
        )
    return model.getvalue()


def _binarise(sentences: list[list[str]], dictionary: Any, name: Path) -> None:
    import torch

    builder = fairseq("data.indexed_dataset").make_builder(f"{name}.bin", "mmap", len(dictionary))
    for sentence in sentences:
        builder.add_item(
            torch.from_numpy(np.array([*map(dictionary.index, sentence), dictionary.eos()]))
        )
    builder.finalize(f"{name}.idx")


def main(argv: list[str]) -> int:
    """Run ``nmrun prepare`` with these words; returns the exit status."""
    parser = Parser(
        "nmrun prepare",
        description="Make subwords and fairseq's binary files of pairs of sentences, for dataset=fairseq or fairseq-train.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder to write; it must not be there yet"
    )
    parser.add_argument(
        "--source",
        default="de",
        help="language that is translated from: the ending of its files (default: %(default)s)",
    )
    parser.add_argument(
        "--target", default="en", help="language that is translated into (default: %(default)s)"
    )
    for split in ("train", "valid", "test"):
        parser.add_argument(
            f"--{split}",
            type=Path,
            required=True,
            help=f"the {split} texts, without their ending .<language> or .<language>.gz",
        )
    parser.add_argument(
        "--vocabulary",
        type=in_range(int, whole(4)),
        default=8000,
        help="subwords of BPE (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    languages = options.source, options.target
    if languages[0] == languages[1] or not all(map(LANGUAGE.fullmatch, languages)):
        raise ConfigError(
            f"--source {languages[0]} --target {languages[1]}: it takes two names of letters, digits and _, "
            "since fairseq's files have them in theirs, as in train.de-en.de.idx"
        )
    if options.out.exists():
        raise ConfigError(f"--out {options.out}: it is there already")
    prefixes = {split: getattr(options, split) for split in ("train", "valid", "test")}
    texts = text_files(prefixes, languages)
    print(prepare(texts, languages, options.out, options.vocabulary))
    path = word("dataset.path", str(options.out))
    words = ["dataset=fairseq", path, "dataset.subwords=sentencepiece", "model=fairseq_transformer"]
    print(f"  {shlex.join(['nmrun', *words])}")
    return 0
