"""2:4 weights in cuSPARSELt's compressed form: the kernel in Triton's interpreter, against what the
library wrote on a GPU. test_compression.py runs this file in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nmrun.fast.gpu.kernels import cusparselt
from nmrun.sparsity import hard_threshold

# of cuSPARSELt 0.8.0 on an H100, torch._cslt_compress of pairs(rows, columns)
RECORDED = Path(__file__).parent / "kernels" / "recorded" / "compressed24_h100.npz"
LOW = torch.bfloat16


def pairs(rows: int, columns: int) -> Tensor:
    """Two ones in every group of four, at random places."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    places = choices[torch.randint(6, (rows * columns // 4,), generator=generator)]
    return torch.zeros(len(places), 4).scatter_(1, places, 1.0).view(rows, columns)


def unpacked(blob: Tensor, rows: int, columns: int) -> Tensor:
    """The weight of a compressed one, by the description in ``triton_compression``, bit by bit."""
    flat = blob.view(-1).view(torch.uint8)
    size = rows * columns
    values = flat[:size].clone().view(blob.dtype).float().view(rows, columns // 4, 2)
    meta = flat[size:]
    order = ("r3", "g2", "g0", "g1", "r0", "r1", "r2", "r4", "r5")
    in_tile = 1 << sum(bit[0] == "g" for bit in order)
    across = -(-columns // 4 // in_tile)
    weight = torch.zeros(rows, columns // 4, 4)
    for r in range(rows):
        for g in range(columns // 4):
            number = {"r": r, "g": g}
            place = sum((number[bit[0]] >> int(bit[1]) & 1) << i for i, bit in enumerate(order))
            place += ((r // 64) * across + g // in_tile) << len(order)
            nibble = int(meta[place // 2]) >> 4 * (place % 2) & 15
            first, second = nibble & 3, nibble >> 2
            assert first < second
            weight[r, g, first], weight[r, g, second] = values[r, g]
    return weight.view(rows, columns)


def as_stored(weight: Tensor, by_columns: bool) -> Tensor:
    return weight.t().contiguous().t() if by_columns else weight


def written(weight: Tensor) -> Tensor:
    blob = torch.zeros(cusparselt.blob_shape(*weight.shape), dtype=LOW)
    cusparselt.write(weight, blob)
    return blob


@pytest.mark.parametrize("shape", [(96, 160), (128, 128)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_bits_are_the_librarys(shape, turned):
    rows, columns = shape
    expected = torch.from_numpy(np.load(RECORDED)[f"bf16_{rows}x{columns}"])
    weight = pairs(rows, columns)
    result = written(as_stored(weight.to(LOW), turned))
    assert result.numel() * LOW.itemsize == expected.numel()
    # of tiles that are not full the library leaves the rest as it was
    assert torch.equal(unpacked(expected.view(LOW), rows, columns), weight)
    assert torch.equal(unpacked(result, rows, columns), weight)
    if rows % 64 == 0:
        assert torch.equal(result.view(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("what", ["2:4", "1:4", "zeros", "-0.0"])
def test_weights_come_back_whole(what, turned):
    """Of float32 numbers that bfloat16 has."""
    dense = torch.randn(80, 48, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    weight = hard_threshold(dense, "1:4" if what == "1:4" else "2:4")
    if what == "zeros":
        weight[:, 8:24], weight[7] = 0.0, 0.0
    if what == "-0.0":
        weight = torch.where(weight == 0, -0.0, weight)
    blob = written(as_stored(weight, turned))
    result = unpacked(blob, 80, 48)
    assert torch.equal(result, weight)
    assert not bool((blob.view(-1)[: 80 * 24].view(torch.int16) == -(2**15)).any())
