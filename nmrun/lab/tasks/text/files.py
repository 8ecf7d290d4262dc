"""Running texts: files of one's own, Tiny Shakespeare, WikiText, what Hugging Face's ``datasets``
loads, the source of Python's standard library, and files of token numbers.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import Fractions, HubText, StdlibText, TextFiles, TokenBin, Tokenized
from nmrun.lab.tasks import hugging_face, storage
from nmrun.lab.tasks.text import corpus

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling


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
    how = f"it takes the three files of {folder}; dataset=text takes other divisions"
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

    def read() -> dict[str, bytes]:
        return _texts(paths, fractions)

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
        arrays, size = corpus.encode(read(), tokenizer)
        return {**arrays, "vocabulary": np.array(size)}

    if tokenizer in ("byte", "character"):  # too fast to be worth a look into the cache
        arrays = encoded()
    else:
        place = Path(tokenizer).expanduser()
        tokenizer_files = [path for path in (place, place / "tokenizer.json") if path.is_file()]
        arrays = storage.cached(
            [what[0], tokenizer, *what[1:]], [*sources, *tokenizer_files], encoded
        )
    vocabulary = int(arrays.pop("vocabulary"))
    unit = tokenizer if tokenizer in corpus.LEVELS else "token"
    task = LanguageModelling.of(config, arrays, vocabulary, device, unit)
    task.codec = partial(corpus.codec, read, tokenizer)
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


def hub(config: Config, device: torch.device) -> LanguageModelling:
    """Raises ConfigError where the texts cannot be loaded, or their column is none of texts."""
    options = config.dataset.as_kind(HubText)
    expressions = {"train": options.train, "val": options.val, "test": options.test}
    splits = {
        name: _rows(options, split) for name, split in expressions.items() if split is not None
    }

    def joined() -> dict[str, bytes]:
        columns = {name: rows[options.column] for name, rows in splits.items()}
        return {
            name: BETWEEN.join(text for text in texts if text is not None).encode()
            for name, texts in columns.items()
        }

    made_of = {name: rows._fingerprint for name, rows in splits.items()}
    return of_texts(config, ["hub_text", options.column, made_of], [], joined, device)


def _rows(options: HubText, split: str) -> Any:
    """A split as ``datasets`` has it."""
    rows = hugging_face.rows(
        f"dataset.path={options.path}",
        options.path,
        options.subset,
        split=split,
        data_files=options.files,
    )
    of_texts = [name for name, kind in rows.features.items() if "string" in str(kind)]
    if options.column not in of_texts:
        raise ConfigError(
            f"dataset.column={options.column}: no column of texts in {options.path} "
            f"(of texts are {', '.join(of_texts) or 'none'})"
        )
    return rows


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
    task.codec = partial(corpus.codec, dict, "byte")
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
