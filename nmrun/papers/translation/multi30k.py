"""Multi30k, task 1 (Elliott et al. 2016, arXiv 1605.00459): 29,000 image descriptions with their
translations.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nmrun.errors import ConfigError
from nmrun.lab.tasks.storage import cache_folder, data_folder
from nmrun.papers.translation.fairseq_folder import load
from nmrun.papers.translation.keys import Multi30k
from nmrun.papers.translation.prepare import Files, beside, prepare
from nmrun.papers.translation.task import Translation

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def build(config: Config, device: torch.device) -> Translation:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    What ``prepare`` makes of the raw text is kept in the cache.
    """
    options = config.dataset.as_kind(Multi30k)
    languages = options.source, options.target
    texts = files(languages, options.test)
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


def files(languages: tuple[str, str], test: str) -> Files:
    """Find the raw text.

    Returns:
        The files of train, valid and test for both languages.

    Raises:
        ConfigError: if it is not there, with how to get it.
    """
    folder: Path = data_folder() / "multi30k"
    try:
        return {
            split: (beside(folder / name, languages[0]), beside(folder / name, languages[1]))
            for split, name in {"train": "train", "valid": "val", "test": test}.items()
        }
    except ConfigError as error:
        raise ConfigError(
            f"dataset=multi30k: {error} (NMRUN_DATA={data_folder()}); data/task1/raw of github.com/multi30k/dataset has it"
        ) from None
