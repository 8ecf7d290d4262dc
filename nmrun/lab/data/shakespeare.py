"""Tiny Shakespeare: 1,115,394 characters of plays, the usual first corpus of character models
(Karpathy 2015).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmrun.lab.data import local, text

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.language import LanguageModelling

HOW = "it is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn"


def build(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    file = local.find("shakespeare", ["tinyshakespeare/input.txt", "shakespeare/input.txt"], HOW)
    return text.task(config, {"train": file}, device)
