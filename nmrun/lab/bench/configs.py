"""The networks that ``nmrun bench train`` and ``infer`` measure, as overrides, and their configs;
without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose

from nmrun.lab.keys.config import Config
from nmrun.lab.words import schema, source
from nmrun.lab.words.composing import composing

VOCABULARY = 50304
GPT = ("dataset=token_bin", f"dataset.vocabulary={VOCABULARY}")
IMAGES = ("dataset=digits", "+dataset._target_=nmrun.lab.bench.networks.random_images")
VIT = ("model=vit_base", "model.heads=16")
NETWORKS: dict[str, tuple[str, ...]] = {
    "gpt_tiny": (
        *GPT,
        "dataset.vocabulary=256",
        "dataset.context=64",
        "model=gpt_tiny",
        "trainer.batch_size=16",
    ),
    "gpt_512": (
        *GPT,
        "dataset.vocabulary=256",
        "dataset.context=128",
        "model=gpt2",
        "model.layers=6",
        "model.width=512",
        "model.heads=8",
        "trainer.batch_size=8",
    ),
    "gpt2": (*GPT, "model=gpt2", "trainer.batch_size=16"),
    "gpt2_medium": (*GPT, "model=gpt2_medium", "trainer.batch_size=16"),
    "gpt2_large": (*GPT, "model=gpt2_large", "trainer.batch_size=16"),
    # two blocks as wide as those of language models of 7 thousand million parameters
    "gpt_4096": (
        *GPT,
        "dataset.vocabulary=8192",
        "dataset.context=2048",
        "model=gpt2",
        "model.layers=2",
        "model.width=4096",
        "model.heads=32",
        "trainer.batch_size=4",
    ),
    "vit_small_32": (
        *IMAGES,
        "+dataset.side=32",
        "model=vit_tiny",
        "model.layers=2",
        "trainer.batch_size=16",
    ),
    "vit_large": (
        *IMAGES,
        "+dataset.side=224",
        *VIT,
        "model.layers=24",
        "model.width=1024",
        "trainer.batch_size=64",
    ),
    "vit_huge": (
        *IMAGES,
        "+dataset.side=224",
        *VIT,
        "model.layers=32",
        "model.width=1280",
        "model.patch=14",
        "trainer.batch_size=64",
    ),
    "resnet18": (*IMAGES, "+dataset.side=32", "model=resnet18", "trainer.batch_size=512"),
}
COMMON = ("optimizer=adamw", "trainer.epochs=1000000", "track=local", "trainer.clip=1")


def overrides(folder: Path, words: Sequence[str]) -> list[str]:
    """All overrides of a run that is measured.

    Args:
        folder: where its data and results are.
        words: what is its own.
    """
    data = [f"dataset.folder={folder}"] if "dataset=token_bin" in words else []
    return [*COMMON, *words, *data, f"output_dir={folder}"]


def composed(folder: Path, words: Sequence[str]) -> Config:
    """Compose and check the config of a run.

    Args:
        folder: where its data and results are.
        words: overrides.

    Raises:
        ConfigError: for overrides that are mistaken.
    """
    source.register()
    with composing():
        return schema.check(compose("nmrun", overrides(folder, words)))
