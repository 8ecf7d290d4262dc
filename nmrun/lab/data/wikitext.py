"""WikiText-2 and WikiText-103 (Merity et al. 2017): articles of Wikipedia, rare words replaced by
``<unk>``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmrun.lab.data import local, text

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.language import LanguageModelling

FOLDERS = {"wikitext2": "wikitext-2", "wikitext103": "wikitext-103"}
# as published, as in PyTorch's examples, with the rare words
FILES = (
    "wiki.{}.tokens",
    "{}.txt",
    "wiki.{}.raw",
)
SPLITS = {"train": "train", "val": "valid", "test": "test"}


def build(config: Config, device: torch.device) -> LanguageModelling:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    name = config.dataset.name
    folder = FOLDERS[name]
    how = f"it takes the three files of {folder}; dataset=text takes other divisions"
    paths = {
        split: local.find(name, [f"{folder}/{form.format(called)}" for form in FILES], how)
        for split, called in SPLITS.items()
    }
    return text.task(config, paths, device)
