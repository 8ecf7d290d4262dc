"""What the layouts of weights that stay share: tiles of rows, whose segments of columns have as many
slots as their fullest row needs. A slot holds one or more non-zeros of each row of its tile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def start_of(
    values: Tensor, index: Tensor, counts: Tensor, shape: tuple[int, ...], width: int, about: str
) -> Tensor:
    """Where the slots of each tile begin, int32, and behind them where the last ones end.

    Args:
        values, index: (slots, width), the latter uint8.
        counts: uint8, of this ``shape``, the slots of each segment; those of a tile along the last
            dimension.
        about: what the matrix is, for an error.

    Raises:
        ValueError: for tensors that do not fit.
    """
    if counts.shape != shape or counts.dtype != torch.uint8:
        raise ValueError(f"counts {list(counts.shape)} are not those of {about}")
    of_tiles = counts.sum(-1, dtype=torch.int64).flatten()
    start = torch.zeros(len(of_tiles) + 1, dtype=torch.int32)
    start[1:] = of_tiles.cumsum(0)
    slots = (int(start[-1]), width)
    if values.shape != slots or index.shape != slots or index.dtype != torch.uint8:
        raise ValueError(f"{list(values.shape)} values where the counts say {list(slots)}")
    return start


def in_order(
    row: Tensor, column: Tensor, value: Tensor, rows: int, columns: int, segment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Non-zeros (count,), row by row; which one each is in its row's segment of columns; and how many
    each segment of each row has, (rows, segments)."""
    order = (row * columns + column).argsort()
    row, column, value = row[order], column[order], value[order]
    segments = -(-columns // segment)
    run = row * segments + column // segment
    filled = torch.bincount(run, minlength=rows * segments)
    rank = torch.arange(len(run)) - (filled.cumsum(0) - filled)[run]
    return row, column, value, rank, filled.view(rows, segments)
