"""Text files as a corpus: any, and those of Tiny Shakespeare and WikiText."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.keys.datasets import Fractions
from nmrun.lab.keys.texts import TextFiles, Tokenized
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.text import corpus

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

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
    paths = {split: Path(path).expanduser() for split, path in given.items() if path is not None}
    for split, path in paths.items():
        if not path.is_file():
            raise ConfigError(f"dataset.{split}={given[split]}: there is no such file")
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
