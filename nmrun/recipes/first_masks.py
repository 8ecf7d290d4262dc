"""Masks that a recipe begins with: those of the largest weights, or of weights in a file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmrun.errors import ConfigError
from nmrun.sparsity.candidates import by_group, candidates
from nmrun.sparsity.masks import nm_mask
from nmrun.sparsity.weight import SparseWeight


def file(place: str) -> Path:
    """The file of weights that ``masks=`` names: such a file, or a folder with a
    ``model.safetensors``."""
    path = Path(place).expanduser()
    return path if path.is_file() else path / "model.safetensors"


def agreement(path: Path | None, weight: SparseWeight) -> Tensor:
    """Say how far every candidate of a group agrees with the masks to begin with.

    Args:
        path: as of :func:`file`; None: the masks of the largest weights.
        weight: the weight.

    Returns:
        How many entries both keep, less N / 2: (groups, C).

    Raises:
        ConfigError: as :func:`kept_in`.
    """
    if path is None:
        groups = by_group(weight.dense, weight.pattern, weight.dim)
        kept = nm_mask(groups, weight.pattern, -1)
    else:
        kept = kept_in(path, weight)
    options = candidates(weight.pattern, weight.dense)
    return kept.to(options.dtype) @ options.T - weight.pattern.n / 2


def kept_in(path: Path, weight: SparseWeight) -> Tensor:
    """Say which of a weight's entries are not zero in a file.

    Args:
        path: the file.
        weight: which of its parameters, and the pattern that it should hold there.

    Returns:
        Ones and zeros by group, as :func:`nmrun.sparsity.candidates.by_group` views the weight.

    Raises:
        ConfigError: where the file cannot be read, or has no such parameter that is N:M.
    """
    try:
        with safe_open(path, "pt") as opened:
            names = set(opened.keys())
            there = opened.get_tensor(weight.name) if weight.name in names else None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"masks={path}: it cannot be read ({error})") from None
    if there is None or there.shape != weight.dense.shape:
        shape = "missing" if there is None else list(there.shape)
        raise ConfigError(
            f"masks={path} is of another network: {weight.name} is {shape} there and "
            f"{list(weight.dense.shape)} here"
        )
    kept = by_group((there != 0).to(weight.dense), weight.pattern, weight.dim)
    most = int(kept.sum(-1).max())
    if most > weight.pattern.n:
        raise ConfigError(
            f"masks={path}: {weight.name} is not {weight.pattern} there: it keeps {most} of a group"
        )
    return kept
