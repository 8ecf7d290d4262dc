"""Texts as a corpus: files of one's own, Tiny Shakespeare and WikiText, and what Hugging Face's
``datasets`` loads, of its hub (C4, say) or of files in its formats.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import Fractions
from nmrun.lab.keys.texts import HubText, TextFiles, Tokenized
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.text import corpus

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

BETWEEN = "\n\n"  # rows, as in the code of GPTQ and SparseGPT
SPACE = re.compile(rb"\s|\Z")
SHAKESPEARE = "it is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn"
WIKITEXTS = {"wikitext2": "wikitext-2", "wikitext103": "wikitext-103"}
# as published, as in PyTorch's examples, with the rare words
WIKITEXT_FILES = (
    "wiki.{}.tokens",
    "{}.txt",
    "wiki.{}.raw",
)
WIKITEXT_SPLITS = {"train": "train", "val": "valid", "test": "test"}


def build(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: for a file that is not there.
    """
    options = config.dataset.as_kind(TextFiles)
    given = {"train": options.train, "val": options.val, "test": options.test}
    paths = {split: storage.path_of(path) for split, path in given.items() if path is not None}
    for split, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"dataset.{split}={given[split]}: there is no such file, neither in "
                f"{storage.data_folder()} (NMRUN_DATA) nor here"
            )
    return task(config, paths, device)


def shakespeare(config: Config, device: torch.device) -> LanguageModelling:
    """Tiny Shakespeare: 1,115,394 characters of plays, the usual first corpus of character models
    (Karpathy 2015).
    """
    file = storage.find(
        "shakespeare", ["tinyshakespeare/input.txt", "shakespeare/input.txt"], SHAKESPEARE
    )
    return task(config, {"train": file}, device)


def wikitext(config: Config, device: torch.device) -> LanguageModelling:
    """WikiText-2 and WikiText-103 (Merity et al. 2017): articles of Wikipedia, rare words replaced by
    ``<unk>``.
    """
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
    """Build language modelling on some files.

    Args:
        config: its ``dataset`` group has ``tokenizer`` and ``context``, and ``<split>_fraction``
            for each split that is cut.
        paths: ``train`` and, unless they are to be cut from the end of it, ``val`` and ``test``.
        device: where batches go.
    """
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
    """Build language modelling on texts. What tokenizers make of them is kept.

    Args:
        config: its ``dataset`` group has ``tokenizer`` and ``context``.
        what: plain data that, with the files ``sources``, says which texts they are.
        read: reads them, UTF-8, by split.
        device: where batches go.
    """
    from nmrun.lab.tasks.text.language import LanguageModelling

    tokenizer = config.dataset.as_kind(Tokenized).tokenizer

    def encoded() -> dict[str, NDArray[Any]]:
        arrays, size = corpus.encode(read(), tokenizer)
        return {**arrays, "vocabulary": np.array(size)}

    if tokenizer in ("byte", "character"):  # faster than a look into the cache would be worth
        arrays = encoded()
    else:
        own = [
            path for path in (Path(tokenizer), Path(tokenizer) / "tokenizer.json") if path.is_file()
        ]
        arrays = storage.cached([what[0], tokenizer, *what[1:]], [*sources, *own], encoded)
    vocabulary = int(arrays.pop("vocabulary"))
    unit = tokenizer if tokenizer in corpus.LEVELS else "token"
    return LanguageModelling.of(
        config, arrays, vocabulary, device, unit, lambda: corpus.vocabulary(read(), tokenizer)
    )


def _texts(paths: Mapping[str, Path], fractions: Mapping[str, float]) -> dict[str, bytes]:
    """The files' bytes; a split that has only a fraction is that share of the training file, from
    its end, cut after white space.
    """
    texts = {split: path.read_bytes() for split, path in paths.items()}
    whole = len(texts["train"])
    for split in ("test", "val"):
        if split in fractions:
            text = texts["train"]
            space = SPACE.search(text, max(0, len(text) - round(fractions[split] * whole)))
            cut = space.end() if space else len(text)
            texts["train"], texts[split] = text[:cut], text[cut:]
    return texts


if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling


def hub(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: where the texts cannot be loaded, or their column is none of texts.
    """
    options = config.dataset.as_kind(HubText)
    asked = {"train": options.train, "val": options.val, "test": options.test}
    splits = {name: _rows(options, split) for name, split in asked.items() if split is not None}

    def joined() -> dict[str, bytes]:
        return {name: BETWEEN.join(rows[options.column]).encode() for name, rows in splits.items()}

    made_of = {name: rows._fingerprint for name, rows in splits.items()}
    return of_texts(config, ["hub_text", options.column, made_of], [], joined, device)


def _rows(options: HubText, split: str) -> Any:
    """A split as ``datasets`` has it."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"dataset=hub_text needs Hugging Face's datasets: pip install 'nmrun[texts]' (dataset.path={options.path})"
        ) from None
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            options.path, options.subset, split=split, data_files=options.files
        )
    except Exception as error:  # each format has errors of its own
        line = textwrap.shorten(str(error) or type(error).__name__, 300)
        raise ConfigError(
            f"dataset.path={options.path}: {split} cannot be loaded ({line})"
        ) from None
    kind = rows.features.get(options.column)
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        of_texts = [name for name, kind in rows.features.items() if "string" in str(kind)]
        raise ConfigError(
            f"dataset.column={options.column}: no column of texts in {options.path} "
            f"(of texts are {', '.join(of_texts) or 'none'})"
        )
    return rows
