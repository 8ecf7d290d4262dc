"""``nmrun prepare``: raw parallel text into subwords and fairseq's binary files, ready for
``dataset=fairseq`` (or ``fairseq-train``).

"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nmrun.errors import ConfigError, needs
from nmrun.lab.arguments import Parser
from nmrun.lab.tasks.storage import data_folder
from nmrun.papers.translation.fairseq import fairseq

Files = dict[str, tuple[Path, Path]]


def text_file(prefix: Path, language: str) -> Path:
    """``<prefix>.<language>``, or that with ``.gz``. Raises ConfigError if there is neither."""
    for name in (f"{prefix}.{language}", f"{prefix}.{language}.gz"):
        if Path(name).is_file():
            return Path(name)
    raise ConfigError(f"{prefix}.{language}: there is no such file, nor with .gz")


def multi30k_files(languages: tuple[str, str], test: str) -> Files:
    """The raw text of Multi30k: files of train, valid and test for both languages. Raises
    ConfigError with how to get it.
    """
    folder: Path = data_folder() / "multi30k"
    try:
        return {
            split: (text_file(folder / name, languages[0]), text_file(folder / name, languages[1]))
            for split, name in {"train": "train", "valid": "val", "test": test}.items()
        }
    except ConfigError as error:
        raise ConfigError(
            f"dataset=multi30k: {error} (NMRUN_DATA={data_folder()}); data/task1/raw of github.com/multi30k/dataset has it"
        ) from None


def prepare(
    texts: Files,
    languages: tuple[str, str],
    to: Path,
    vocabulary: int,
    joint: bool = True,
    longest: int = 250,
) -> str:
    """Subwords and fairseq's binary files of raw text, in a folder that appears when it is whole.

    BPE by sentencepiece is learned on the training text; the dictionaries are made as
    ``fairseq-preprocess`` makes them. Beside the binary files there are the ``.model`` files of
    sentencepiece and the target of valid and test as plain text, for BLEU. Training pairs with more
    than ``longest`` subwords on a side, or with an empty side, are left out. Raises ConfigError for
    texts of unequal length, and a vocabulary that they are too small for.
    """
    with needs("BPE", "translation"):
        import sentencepiece
    lines = {split: [read(file) for file in files] for split, files in texts.items()}
    for split, (left, right) in lines.items():
        if len(left) != len(right):
            names = " and ".join(str(file) for file in texts[split])
            raise ConfigError(
                f"{names}: {len(left)} and {len(right)} lines; line i of one has to translate line i of the other"
            )
    full = [
        (left, right)
        for left, right in zip(*lines["train"], strict=True)
        if left.strip() and right.strip()
    ]
    lines["train"] = [[pair[side] for pair in full] for side in (0, 1)]
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        if joint:
            models = [_bpe([*lines["train"][0], *lines["train"][1]], vocabulary)] * 2
        else:
            models = [_bpe(side, vocabulary) for side in lines["train"]]
        pieces = {
            split: [
                sentencepiece.SentencePieceProcessor(model_proto=models[side]).encode(
                    sides[side], out_type=str
                )
                for side in (0, 1)
            ]
            for split, sides in lines.items()
        }
        short = [
            (left, right)
            for left, right in zip(*pieces["train"], strict=True)
            if max(len(left), len(right)) <= longest
        ]
        pieces["train"] = [[pair[side] for pair in short] for side in (0, 1)]
        dictionaries = _dictionaries(pieces["train"], joint)
        for side, language in enumerate(languages):
            dictionaries[side].save(str(folder / f"dict.{language}.txt"))
            (folder / f"sentencepiece.{language}.model").write_bytes(models[side])
            for split in texts:
                name = folder / f"{split}.{'-'.join(languages)}.{language}"
                _binarise(pieces[split][side], dictionaries[side], name)
                if side == 1 and split != "train":
                    Path(f"{name}.txt").write_text(
                        "".join(f"{line}\n" for line in lines[split][1]),
                        encoding="utf-8",
                        newline="\n",
                    )
        about = {
            "files": {split: [str(file) for file in files] for split, files in texts.items()},
            "vocabulary": vocabulary,
        }
        (folder / "prepared.json").write_text(
            json.dumps({**about, "joint": joint, "longest": longest}, indent=2) + "\n"
        )
        folder.chmod(0o755)
        try:
            os.rename(folder, to)
        except OSError:
            if not to.is_dir():  # otherwise another process was faster, with the same
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = ", ".join(f"{split} {len(sides[0])}" for split, sides in pieces.items())
    return f"{to}: {counts} pairs; dictionaries of {len(dictionaries[0])} and {len(dictionaries[1])} tokens"


def read(file: Path) -> list[str]:
    """The lines of a text, which may be compressed. Only a line feed ends one: other separators of
    Unicode occur within sentences.

    Raises ConfigError for a file that is not UTF-8, or damaged.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as raw:
            return [
                line.rstrip("\r\n")
                for line in io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
            ]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 ({error.reason} at byte {error.start} of a part of it)"
        ) from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: damaged: {error}") from None


def _bpe(text: Iterable[str], vocabulary: int) -> bytes:
    """A model of sentencepiece."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            character_coverage=1.0,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"vocabulary={vocabulary}: sentencepiece cannot learn it from this text: {str(error).splitlines()[-1]}"
        ) from None
    return model.getvalue()


def _dictionaries(sides: list[list[list[str]]], joint: bool) -> list[Any]:
    counts = [Counter(piece for sentence in side for piece in sentence) for side in sides]
    if joint:
        counts = [counts[0] + counts[1]] * 2
    dictionaries = []
    for count in counts:
        dictionary = fairseq("data").Dictionary()
        for piece, number in count.items():
            dictionary.add_symbol(piece, number)
        dictionary.finalize()  # the commonest first, and a multiple of 8 tokens
        dictionaries.append(dictionary)
    return dictionaries


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
        "corpus",
        choices=["multi30k", "parallel"],
        help="Multi30k below NMRUN_DATA, or any line-by-line text",
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
            help=f"parallel: the {split} texts, without their ending .<language> or .<language>.gz",
        )
    parser.add_argument(
        "--vocabulary", type=int, default=8000, help="subwords of BPE (default: %(default)s)"
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help="a BPE and a dictionary for each language, not one for both",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=250,
        help="training pairs with more subwords on a side are left out (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    languages = options.source, options.target
    if options.corpus == "parallel":
        prefixes = {split: getattr(options, split) for split in ("train", "valid", "test")}
        if missing := [f"--{split}" for split, prefix in prefixes.items() if prefix is None]:
            raise ConfigError(
                f"prepare parallel: {', '.join(missing)} missing: the text without its .{options.source} and .{options.target}"
            )
    if options.out.exists():
        raise ConfigError(f"--out {options.out}: it is there already")
    if options.corpus == "multi30k":
        texts = multi30k_files(languages, "test_2016_flickr")
    else:
        texts = {
            split: (text_file(prefix, options.source), text_file(prefix, options.target))
            for split, prefix in prefixes.items()
        }
    summary = prepare(
        texts,
        languages,
        options.out,
        options.vocabulary,
        joint=not options.separate,
        longest=options.longest,
    )
    print(
        f"{summary}\n  nmrun dataset=fairseq dataset.path={options.out} dataset.subwords=sentencepiece model=fairseq_transformer"
    )
    return 0
