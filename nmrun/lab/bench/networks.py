"""Whole steps and forward passes of networks, on random data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from hydra.errors import HydraException

from nmrun.errors import ConfigError
from nmrun.lab.bench import output
from nmrun.lab.bench.configs import NETWORKS
from nmrun.lab.bench.timing import Row
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.vision import Classification


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
    names: Sequence[str], measure: Callable[[tuple[str, ...]], Iterable[Row]]
) -> Iterator[Row]:
    """Measure some networks, one after the other.

    Args:
        names: keys of ``NETWORKS``.
        measure: gives the rows of a network by its overrides.

    Raises:
        ConfigError: for overrides that are mistaken.
    """
    for name in names:
        output.note(name)
        try:
            for row in measure(NETWORKS[name]):
                yield {"model": name, **row}
        except (ConfigError, HydraException) as error:
            raise ConfigError(str(error).splitlines()[0]) from None
        torch.compiler.reset()  # the compiler keeps what it compiled, up to a limit
        gc.collect()
