"""The networks that are measured: of ``nmrun bench train`` as overrides, with random data, and of
``nmrun bench infer`` by their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.lab.config.composition import config_of
from nmrun.lab.keys.config import Config

if TYPE_CHECKING:  # a mistake in the options is answered without torch
    import torch

    from nmrun.lab.tasks.vision import Classification

GPT = ("dataset=token_bin", "dataset.vocabulary=50304")
IMAGES = ("dataset=digits", "+dataset._target_=nmrun.lab.bench.networks.random_images")
NETWORKS: dict[str, tuple[str, ...]] = {
    "gpt_tiny": (
        *GPT, "dataset.vocabulary=256", "dataset.context=64", "model=gpt_tiny", "trainer.batch_size=16",
    ),
    "gpt_512": (
        *GPT, "dataset.vocabulary=256", "dataset.context=128", "model=gpt2", "model.layers=6",
        "model.width=512", "model.heads=8", "trainer.batch_size=8",
    ),
    "gpt2": (*GPT, "model=gpt2", "trainer.batch_size=16"),
    # two blocks as wide as those of language models of 7 thousand million parameters
    "gpt_4096": (
        *GPT, "dataset.vocabulary=8192", "dataset.context=2048", "model=gpt2", "model.layers=2",
        "model.width=4096", "model.heads=32", "trainer.batch_size=4",
    ),
    "vit_large": (
        *IMAGES, "+dataset.side=224", "model=vit_base", "model.heads=16", "model.layers=24",
        "model.width=1024", "trainer.batch_size=64",
    ),
    "resnet18": (*IMAGES, "+dataset.side=32", "model=resnet18", "trainer.batch_size=64"),
}  # fmt: skip
# of encoders: layers, width, heads
ENCODERS = {
    "transformer": (6, 512, 8),
    "bert_base": (12, 768, 12),
    "bert_large": (24, 1024, 16),
    "tiny": (1, 64, 2),
}
IMAGE_SIDES = {"resnet18": 32, "vit_large": 224}
INFERRED = (*ENCODERS, *IMAGE_SIDES)
COMMON = ("optimizer=adamw", "track=local", "trainer.clip=1")


def overrides(folder: Path, words: Sequence[str]) -> list[str]:
    """All overrides of a run that is measured; ``folder`` has its data and results."""
    data = [f"dataset.folder={folder}"] if "dataset=token_bin" in words else []
    return [*COMMON, *words, *data, f"output_dir={folder}"]


def composed(folder: Path, words: Sequence[str]) -> Config:
    return config_of(overrides(folder, words))


def random_images(config: Config, device: torch.device) -> Classification:
    """A data set for ``dataset._target_``: random images of ``dataset.side`` pixels a side in 1,000
    classes."""
    import torch

    from nmrun.lab.tasks.vision import Classification

    side, count = config.dataset.values()["side"], 4 * config.trainer.batch_size
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, device=device)
    labels = torch.randint(1000, (count,), device=device)
    splits = dict.fromkeys(("train", "val", "test"), (images, labels))
    return Classification.of(config, splits, 1000, device)


def random_text(folder: Path) -> None:
    """Files for ``dataset=token_bin`` of a million random tokens, below 256 so that each vocabulary
    has them."""
    import numpy as np

    for name in ("train", "val"):
        tokens = np.random.default_rng(0).integers(256, size=1 << 20)
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
