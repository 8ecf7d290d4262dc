"""The Python standard library's own source as a corpus of bytes: real text that every installation
has (no download).

It is program text, and differs a little from one version of Python to the next: its hash is part of
a run's config.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError
from nmrun.lab.keys.texts import StdlibText
from nmrun.lab.tasks.text import corpus

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.language import LanguageModelling

MODULES = {
    "train": (
        "argparse", "ast", "calendar", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses", "dis", "enum",
        "fractions", "functools", "inspect", "optparse", "os", "pickle", "subprocess", "threading",
    ),
    "val": ("heapq", "textwrap"),
    "test": ("shlex", "socketserver"),
}  # fmt: skip


@cache
def read() -> dict[str, bytes]:
    """The source of the modules of each split, one after the other. Raises ConfigError for a Python
    without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        return {
            split: b"".join((folder / f"{module}.py").read_bytes() for module in modules)
            for split, modules in MODULES.items()
        }
    except OSError as error:
        raise ConfigError(
            f"dataset=stdlib_text: {error.filename} is missing: this Python comes without the source of its library; "
            "dataset=text takes any file"
        ) from None


def digest() -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all splits."""
    return hashlib.sha256(b"\0".join(read().values())).hexdigest()[:12]


def build(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says.

    Raises:
        ConfigError: for a config that was made with another Python's text.
    """
    import numpy as np

    from nmrun.lab.tasks.text.language import LanguageModelling

    sha256 = config.dataset.as_kind(StdlibText).sha256
    if sha256 != digest():
        raise ConfigError(
            f"dataset.sha256={sha256}: the library of this Python has another text, {digest()}"
        )
    splits = {split: np.frombuffer(text, np.uint8) for split, text in read().items()}
    return LanguageModelling.of(
        config, splits, 256, device, "byte", lambda: corpus.vocabulary({}, "byte")
    )
