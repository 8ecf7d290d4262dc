"""The networks that ``nmrun bench train`` measures, as overrides, and their random data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.errors import HydraException

from nmrun.errors import ConfigError, first_line
from nmrun.lab.keys.config import Config
from nmrun.lab.words.composition import config_of

if TYPE_CHECKING:  # a mistake in the options is answered without torch
    import torch

    from nmrun.lab.bench.harness import Row
    from nmrun.lab.tasks.vision import Classification

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
    "gpt_1_3b": (  # GPT-3 XL's sizes
        *GPT,
        "model=gpt2",
        "model.layers=24",
        "model.width=2048",
        "model.heads=16",
        "trainer.batch_size=8",
    ),
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


def each(
    names: Sequence[str], measure: Callable[[tuple[str, ...]], list[Row]]
) -> Iterator[list[Row]]:
    """The rows of some networks of ``NETWORKS``, which ``measure`` gives by a network's
    overrides."""
    import torch

    from nmrun.lab.bench import harness

    for name in names:
        harness.note(name)
        try:
            yield [{"model": name, **row} for row in measure(NETWORKS[name])]
        except (ConfigError, HydraException) as error:
            raise ConfigError(first_line(error)) from None
        torch.compiler.reset()  # the compiler keeps what it compiled, up to a limit
        gc.collect()
        torch.cuda.empty_cache()
