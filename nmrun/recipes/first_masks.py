"""Masks that a recipe begins with: those of the largest weights, or of weights in a file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.sparsity.candidates import by_group, candidates
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import SparseWeight


def agreement(place: str | None, weight: SparseWeight) -> Tensor:
    """Say how far every candidate of a group agrees with the masks to begin with.

    Args:
        place: as of :func:`kept_in`; None: the masks of the largest weights.
        weight: the weight.

    Returns:
        How many entries both keep, less N / 2: (groups, C).

    Raises:
        ConfigError: as :func:`kept_in`.
    """
    if place is None:
        groups = by_group(weight.dense, weight.pattern, weight.dim)
        kept = nm_mask(groups, weight.pattern, -1)
    else:
        kept = kept_in(place, weight)
    options = candidates(weight.pattern, weight.dense)
    return kept.to(options.dtype) @ options.T - weight.pattern.n / 2


def kept_in(place: str, weight: SparseWeight) -> Tensor:
    """Say which of a weight's entries are not zero in a file.

    Args:
        place: a folder with a ``model.safetensors``, as runs leave one, or such a file.
        weight: which of its parameters, and the pattern that it should hold there.

    Returns:
        Ones and zeros by group, as :func:`nmrun.sparsity.candidates.by_group` views the weight.

    Raises:
        ConfigError: where the file cannot be read, or has no such parameter that is N:M.
    """
    path = Path(place).expanduser()
    path = path / "model.safetensors" if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            there = file.get_tensor(weight.name) if weight.name in names else None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"masks={place}: {path.name} cannot be read ({error})") from None
    if there is None or there.shape != weight.dense.shape:
        shape = "missing" if there is None else list(there.shape)
        raise ConfigError(
            f"masks={place} is of another network: {weight.name} is {shape} there and "
            f"{list(weight.dense.shape)} here"
        )
    kept = by_group((there != 0).to(weight.dense), weight.pattern, weight.dim)
    most = int(kept.sum(-1).max())
    if most > weight.pattern.n:
        raise ConfigError(
            f"masks={place}: {weight.name} is not {weight.pattern} there: it keeps {most} of a group"
        )
    return kept
