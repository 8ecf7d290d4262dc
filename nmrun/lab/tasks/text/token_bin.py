"""Files of token numbers, 16 bits each, as nanoGPT prepares them: ``train.bin``, ``val.bin`` and,
if there is one, ``test.bin``.

They are mapped, never read as a whole, so their size does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError
from nmrun.lab.keys.texts import TokenBin
from nmrun.lab.tasks import storage

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

# tokens at the beginning of each file; the others are looked at as they are used
LOOKED_AT = 1 << 20


def build(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Without ``test.bin`` there is no test split.
    """
    from nmrun.lab.tasks.text.language import LanguageModelling

    options = config.dataset.as_kind(TokenBin)
    folder, vocabulary = storage.path_of(options.folder), options.vocabulary
    splits = {split: read(folder / f"{split}.bin", vocabulary) for split in ("train", "val")}
    test = folder / "test.bin"
    if test.exists():
        splits["test"] = read(test, vocabulary)
    return LanguageModelling.of(config, splits, vocabulary, device)


def read(path: Path, vocabulary: int) -> NDArray[np.uint16]:
    """Map a file's tokens.

    Args:
        path: the file: numbers of 16 bits, as nanoGPT writes them.

    Raises:
        ConfigError: if it is missing, or plainly not tokens of 16 bits below ``vocabulary``.
    """
    if not path.is_file():
        raise ConfigError(
            f"dataset=token_bin: there is no {path}; dataset.folder has train.bin and val.bin, as nanoGPT's prepare.py makes"
        )
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ConfigError(f"{path} has {size} bytes: tokens of 16 bits take an even number above 0")
    array = np.memmap(path, np.uint16, mode="r")
    first = array[:LOOKED_AT]
    if bytes(first[:3])[:6] == b"\x93NUMPY":
        raise ConfigError(
            f"{path} is an array as numpy.save writes it; it takes the bare numbers, as tofile writes them"
        )
    if len(first) > 1 and not first[1::2].any():
        raise ConfigError(
            f"{path}: every second number is 0, so its tokens probably have 32 bits; it takes uint16"
        )
    if first.max() >= vocabulary:
        raise ConfigError(
            f"{path} has the token {first.max()}, outside dataset.vocabulary={vocabulary}"
        )
    return array
