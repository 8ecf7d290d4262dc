"""Running texts: files of one's own, Tiny Shakespeare, WikiText, what Hugging Face's ``datasets``
loads, the source of Python's standard library, and files of token numbers. Texts become token
numbers by bytes, characters, words, or a tokenizer of Hugging Face.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError, needs, refused
from nmrun.lab.keys.datasets import Fractions, HubText, StdlibText, TextFiles, TokenBin, Tokenized
from nmrun.lab.runs.run_folder import expanded
from nmrun.lab.tasks import hugging_face, storage

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

LEVELS = ("byte", "character", "word")
END, UNKNOWN = "<eos>", "<unk>"
PIECE = 1 << 20  # characters that a Hugging Face tokenizer gets at once; pieces end with a line
BETWEEN = "\n\n"  # rows, as in the code of GPTQ and SparseGPT
SPACE = re.compile(rb"\s|\Z")
SHAKESPEARE = "it is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn"
WIKITEXTS = {"wikitext2": "wikitext-2", "wikitext103": "wikitext-103"}
WIKITEXT_FILES = ("wiki.{}.tokens", "{}.txt")  # as published, as in PyTorch's examples
WIKITEXT_SPLITS = {"train": "train", "val": "valid", "test": "test"}


def text_files(config: Config, device: torch.device) -> LanguageModelling:
    options = config.dataset.as_kind(TextFiles)
    names = {"train": options.train, "val": options.val, "test": options.test}
    paths = {split: storage.path_of(path) for split, path in names.items() if path is not None}
    return task(config, paths, device)


def shakespeare(config: Config, device: torch.device) -> LanguageModelling:
    """Tiny Shakespeare: 1,115,394 characters of plays (Karpathy 2015)."""
    file = storage.find("shakespeare", ["tinyshakespeare/input.txt"], SHAKESPEARE)
    return task(config, {"train": file}, device)


def wikitext(config: Config, device: torch.device) -> LanguageModelling:
    """WikiText-2 and WikiText-103 (Merity et al. 2017), with ``<unk>`` for rare words."""
    name = config.dataset.name
    folder = WIKITEXTS[name]
    how = (
        f"it takes the three files of {folder}, which dataset=hub_text dataset.path=Salesforce/wikitext "
        "loads; dataset=text takes other divisions"
    )
    paths = {
        split: storage.find(
            name, [f"{folder}/{form.format(called)}" for form in WIKITEXT_FILES], how
        )
        for split, called in WIKITEXT_SPLITS.items()
    }
    return task(config, paths, device)


def task(config: Config, paths: Mapping[str, Path], device: torch.device) -> LanguageModelling:
    """Language modelling on files; ``val`` and ``test`` may be cut from the end of ``train``."""
    fractions = {}
    if not {"val", "test"} <= paths.keys():
        cut = config.dataset.as_kind(Fractions)
        each = {"val": cut.val_fraction, "test": cut.test_fraction}
        fractions = {split: fraction for split, fraction in each.items() if split not in paths}

    read = partial(_texts, paths, fractions)
    return of_texts(config, ["text", fractions], paths.values(), read, device)


def of_texts(
    config: Config,
    what: list[Any],
    sources: Iterable[Path],
    read: Callable[[], Mapping[str, bytes]],
    device: torch.device,
) -> LanguageModelling:
    """Language modelling on texts. What tokenizers make of them is kept.

    ``read`` reads them, UTF-8, by split. ``what`` is plain data that, with the files ``sources``,
    says which they are.
    """
    from nmrun.lab.tasks.text.language import LanguageModelling

    tokenizer = config.dataset.as_kind(Tokenized).tokenizer

    def encoded() -> dict[str, NDArray[Any]]:
        arrays, size = encode(read(), tokenizer)
        return {**arrays, "vocabulary": np.array(size)}

    if tokenizer in ("byte", "character"):  # too fast to be worth a look into the cache
        arrays = encoded()
    else:
        place = expanded(tokenizer)
        tokenizer_files = [path for path in (place, place / "tokenizer.json") if path.is_file()]
        arrays = storage.cached(
            [what[0], tokenizer, *what[1:]], [*sources, *tokenizer_files], encoded
        )
    vocabulary = int(arrays.pop("vocabulary"))
    unit = tokenizer if tokenizer in LEVELS else "token"
    task = LanguageModelling.of(config, arrays, vocabulary, device, unit)
    task.codec = partial(codec, read, tokenizer)
    return task


def _texts(paths: Mapping[str, Path], fractions: Mapping[str, float]) -> dict[str, bytes]:
    """The files' bytes. A split that has only a fraction is that share of the training file, from
    its end, cut after white space.
    """
    with refused("dataset: ", OSError):
        texts = {split: path.read_bytes() for split, path in paths.items()}
    whole = len(texts["train"])
    for split in ("test", "val"):
        if split in fractions:
            text = texts["train"]
            space = SPACE.search(text, max(0, len(text) - round(fractions[split] * whole)))
            cut = space.end() if space else len(text)
            texts["train"], texts[split] = text[:cut], text[cut:]
    return texts


@dataclass(frozen=True)
class Codec:
    """How a text becomes token numbers below ``vocabulary``, and these a text again. ``encode``
    raises ConfigError for a letter or word that is no token."""

    encode: Callable[[str], Iterable[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int


def codec(read: Callable[[], Mapping[str, bytes]], tokenizer: str) -> Codec:
    """The codec of a tokenizer, by the texts (UTF-8, by split) that ``read`` reads where their
    letters or words are the tokens.

    ``byte`` has 256 tokens, and ``character`` those that occur in any of the texts, in the order of
    Unicode. ``word`` is what white space separates, with ``<eos>`` where a line ends. Its vocabulary
    is that of the training text; another word is ``<unk>`` if that text has such a word itself.
    Anything else is a ``tokenizer.json``, a folder that has one, or a name on the Hugging Face hub.

    Raises ConfigError for a text that is not UTF-8, and a tokenizer that cannot be had.
    """
    if tokenizer == "byte":
        return Codec(
            lambda text: text.encode(errors="surrogateescape"),  # of a command, any bytes
            lambda numbers: bytes(numbers).decode(errors="replace"),
            256,
        )
    if tokenizer not in LEVELS:
        return _of_hugging_face(tokenizer)
    texts = _decoded(read(), tokenizer)
    of_words = tokenizer == "word"
    cut: Callable[[str], Iterable[str]] = _words if of_words else iter
    first_seen = dict.fromkeys(cut(texts["train"] if of_words else "".join(texts.values())))
    tokens = [*first_seen] if of_words else sorted(first_seen)
    numbers = {token: number for number, token in enumerate(tokens)}

    def encode(text: str) -> Iterator[int]:
        for piece in cut(text):
            number = numbers.get(piece, numbers.get(UNKNOWN))
            if number is None:
                raise ConfigError(f"{piece!r} is not in the vocabulary of the training text")
            yield number

    def decode(some: Sequence[int]) -> str:
        pieces = [tokens[number] for number in some]
        if not of_words:
            return "".join(pieces)
        text = " ".join("\n" if piece == END else piece for piece in pieces)
        return text.replace("\n ", "\n").replace(" \n", "\n")

    return Codec(encode, decode, len(tokens))


def encode(texts: Mapping[str, bytes], tokenizer: str) -> tuple[dict[str, NDArray[Any]], int]:
    """Texts (UTF-8, by split) as arrays of token numbers, and the size of the vocabulary; see
    :func:`codec`."""
    made = codec(lambda: texts, tokenizer)
    if tokenizer == "byte":  # which need not be UTF-8
        return {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}, 256
    kind = np.min_scalar_type(made.vocabulary - 1)
    decoded = _decoded(texts, tokenizer)
    arrays = {name: np.fromiter(made.encode(text), kind) for name, text in decoded.items()}
    return arrays, made.vocabulary


def _words(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n")):
        if number:
            yield END
        yield from line.split()


def _decoded(texts: Mapping[str, bytes], tokenizer: str) -> dict[str, str]:
    """The texts; where words are the tokens, the last line of each ends too."""
    with refused("a text is not UTF-8 (dataset.tokenizer=byte takes any): ", UnicodeDecodeError):
        decoded = {name: text.decode() for name, text in texts.items()}
    if tokenizer != "word":
        return decoded
    return {name: text.removesuffix("\n") + "\n" for name, text in decoded.items()}


def _of_hugging_face(name: str) -> Codec:
    with needs(f"dataset.tokenizer={name}: other than {', '.join(LEVELS)}", "transformers"):
        from tokenizers import Tokenizer
    place = expanded(name)
    file = place / "tokenizer.json" if place.is_dir() else place
    none = f"dataset.tokenizer={name}: not {', '.join(LEVELS)}, and no tokenizer has that name: "
    with refused(none, Exception):  # the library raises bare Exceptions
        tokenizer = (
            Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> Iterator[int]:
        begin = 0
        while begin < len(text):
            end = text.find("\n", begin + PIECE) + 1 or len(text)
            yield from tokenizer.encode(text[begin:end], add_special_tokens=False).ids
            begin = end

    def decode(numbers: Sequence[int]) -> str:
        return str(tokenizer.decode(list(numbers), skip_special_tokens=False))

    return Codec(encode, decode, tokenizer.get_vocab_size())


def hub(config: Config, device: torch.device) -> LanguageModelling:
    """Raises ConfigError where the texts cannot be loaded, or their column is none of texts."""
    options = config.dataset.as_kind(HubText)
    setting, column = f"dataset.path={options.path}", options.column
    where = {"train": options.train, "val": options.val, "test": options.test}
    splits = {
        name: hugging_face.rows(
            setting, options.path, options.subset, split=split, data_files=options.files
        )
        for name, split in where.items()
        if split is not None
    }
    kinds = splits["train"].features
    texts = [name for name in kinds if "string" in getattr(kinds[name], "dtype", "")]
    if column not in texts:
        raise ConfigError(
            f"dataset.column={column}: no column of texts in {options.path} "
            f"(of texts are {', '.join(texts) or 'none'})"
        )

    def joined() -> dict[str, bytes]:
        return {
            name: BETWEEN.join(text for text in rows[column] if text is not None).encode()
            for name, rows in splits.items()
        }

    made_of = {name: rows._fingerprint for name, rows in splits.items()}
    return of_texts(config, ["hub_text", column, made_of], [], joined, device)


MODULES = {
    "train": (
        "argparse", "ast", "calendar", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses", "dis", "enum",
        "fractions", "functools", "inspect", "optparse", "os", "pickle", "subprocess", "threading",
    ),
    "val": ("heapq", "textwrap"),
    "test": ("shlex", "socketserver"),
}  # fmt: skip


# tests, what is not the library's, and tables of characters that are alike in dozens of files
NO_PART = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
SHARE = 40  # one file of so many is for validation, and another for the test


@cache
def stdlib_sources(dataset: str) -> dict[str, bytes]:
    """The source of some modules of the standard library, or of all, by split.

    It differs a little between versions of Python, so its hash is part of a run's config. Raises
    ConfigError for a Python without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    some = {split: [f"{name}.py" for name in names] for split, names in MODULES.items()}
    files = some if dataset == "stdlib_text" else all_modules(folder)
    with refused(f"dataset={dataset}: this Python comes without its source: ", OSError):
        return {
            split: b"".join((folder / name).read_bytes() for name in names)
            for split, names in files.items()
        }


def all_modules(folder: Path) -> dict[str, list[str]]:
    """The modules in a folder and below by split, in the order of their paths; without what the
    build of this Python wrote.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    names = sorted(
        path.as_posix()
        for path in paths
        if not NO_PART.intersection(path.parts) and not path.name.startswith("_sysconfigdata")
    )
    held = {"val": names[SHARE // 2 - 1 :: SHARE], "test": names[SHARE - 1 :: SHARE]}
    rest = set(names).difference(*held.values())
    return {"train": sorted(rest), **held}


def stdlib_digest(dataset: str) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all splits."""
    return hashlib.sha256(b"\0".join(stdlib_sources(dataset).values())).hexdigest()[:12]


def stdlib(config: Config, device: torch.device) -> LanguageModelling:
    """Raises ConfigError for a config that was made with another Python's text."""
    from nmrun.lab.tasks.text.language import LanguageModelling

    name, sha256 = config.dataset.name, config.dataset.as_kind(StdlibText).sha256
    if sha256 != stdlib_digest(name):
        raise ConfigError(
            f"dataset.sha256={sha256}: the library of this Python has another text, {stdlib_digest(name)}"
        )
    splits = {split: np.frombuffer(text, np.uint8) for split, text in stdlib_sources(name).items()}
    task = LanguageModelling.of(config, splits, 256, device, "byte")
    task.codec = partial(codec, dict, "byte")
    return task


# tokens at the beginning of each file; the others are looked at as they are used
LOOKED_AT = 1 << 20


def token_bin(config: Config, device: torch.device) -> LanguageModelling:
    """Files of token numbers as nanoGPT prepares them, mapped; ``test.bin`` may be missing."""
    from nmrun.lab.tasks.text.language import LanguageModelling

    options = config.dataset.as_kind(TokenBin)
    folder, vocabulary = storage.path_of(options.folder), options.vocabulary
    splits = {split: read_tokens(folder / f"{split}.bin", vocabulary) for split in ("train", "val")}
    test = folder / "test.bin"
    if test.exists():
        splits["test"] = read_tokens(test, vocabulary)
    return LanguageModelling.of(config, splits, vocabulary, device)


def read_tokens(path: Path, vocabulary: int) -> NDArray[np.uint16]:
    """A file's tokens, mapped. Raises ConfigError if it is missing, or plainly not tokens of 16
    bits below ``vocabulary``.
    """
    what = "dataset.folder has train.bin and val.bin with tokens of 16 bits, as nanoGPT's prepare.py makes them"
    with refused(f"{path}: {what}: ", OSError, ValueError):
        array = np.memmap(path, np.uint16, mode="r")
    first = array[:LOOKED_AT]
    if len(first) > 1 and not first[1::2].any():
        raise ConfigError(f"{path}: {what}; every second of these is 0, so they probably have 32")
    if first.max() >= vocabulary:
        raise ConfigError(
            f"{path} has the token {first.max()}, outside dataset.vocabulary={vocabulary}"
        )
    return array
