"""The networks that whole steps and forward passes are measured with, on random data: words of
nmrun's command line, as a user gives them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from hydra import compose
from hydra.errors import HydraException

from nmrun.bench import output
from nmrun.bench.timing import Row
from nmrun.config import schema, source
from nmrun.config.composing import composing
from nmrun.errors import ConfigError
from nmrun.settings.config import Config
from nmrun.tasks.vision import Classification
from nmrun.verbs import Parser

VOCABULARY = 50304
GPT = ("dataset=token_bin", f"dataset.vocabulary={VOCABULARY}")
IMAGES = ("dataset=digits", "+dataset._target_=nmrun.bench.networks.random_images")
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


def random_images(config: Config, device: torch.device) -> Classification:
    """Make a data set for ``dataset._target_``: random images, enough for a few batches.

    Args:
        config: ``dataset.side`` is the pixels of a side. There are 1,000 classes.
        device: where the images are.
    """
    side, count = config.dataset.values()["side"], 4 * config.trainer.batch_size
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, device=device)
    labels = torch.randint(1000, (count,), device=device)
    return Classification.of(
        config, dict.fromkeys(("train", "val", "test"), (images, labels)), 1000, device
    )


def random_text(folder: Path) -> None:
    """Files for ``dataset=token_bin`` of a million random tokens, below 256 so that each vocabulary
    has them.
    """
    for name in ("train", "val"):
        np.random.default_rng(0).integers(256, size=1 << 20).astype(np.uint16).tofile(
            folder / f"{name}.bin"
        )


def each(
    names: Sequence[str], parser: Parser, measure: Callable[[tuple[str, ...]], list[Row]]
) -> list[Row]:
    """Measure some networks.

    Args:
        names: keys of ``NETWORKS``.
        parser: tells mistakes.
        measure: gives the rows of a network by its overrides.

    Raises:
        ConfigError: for overrides that are mistaken.
    """
    rows = []
    for name in names:
        output.note(name)
        try:
            rows += [{"model": name, **row} for row in measure(NETWORKS[name])]
        except (ConfigError, HydraException) as error:
            parser.error(str(error).splitlines()[0])
        torch.compiler.reset()  # the compiler keeps what it compiled, up to a limit
        gc.collect()
    return rows


def composed(folder: Path, words: Sequence[str]) -> Config:
    """Compose and check the config of a run.

    Args:
        folder: where its data and results are.
        words: overrides.

    Raises:
        ConfigError: for overrides that are mistaken.
    """
    source.register()
    data = [f"dataset.folder={folder}"] if "dataset=token_bin" in words else []
    with composing():
        return schema.check(compose("nmrun", [*COMMON, *words, *data, f"output_dir={folder}"]))
