"""Texts that Hugging Face's ``datasets`` loads: of its hub (WikiText, C4), or files in its formats."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.lab.keys.texts import HubText
from nmrun.lab.tasks.text import files

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

BETWEEN = "\n\n"  # rows, as in the code of GPTQ and SparseGPT


def build(config: Config, device: torch.device) -> LanguageModelling:
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
    return files.of_texts(config, ["hub_text", options.column, made_of], [], joined, device)


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
