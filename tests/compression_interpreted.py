"""2:4 weights in cuSPARSELt's compressed form: the kernel in Triton's interpreter, against what the
library wrote on a GPU. test_compression.py runs this file in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nmrun.fast.gpu.kernels import compression
from nmrun.fast.gpu.linear import BatchPacker, SemiStructuredProducts
from nmrun.kernels import triton_mvue
from nmrun.patterns import Pattern
from nmrun.sparsity import hard_threshold

DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
# of cuSPARSELt 0.8.0 on an H100, torch._cslt_compress of pairs(rows, columns)
RECORDED = Path(__file__).parent / "kernels" / "recorded" / "compressed24_h100.npz"
CASES = [
    (name, shape, turned)
    for name in DTYPES
    for shape in ((96, 160), (128, 128))
    for turned in (False, True)
]


def pairs(rows: int, columns: int) -> Tensor:
    """Two ones in every group of four, at random places."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    places = choices[torch.randint(6, (rows * columns // 4,), generator=generator)]
    return torch.zeros(len(places), 4).scatter_(1, places, 1.0).view(rows, columns)


def unpacked(blob: Tensor, rows: int, columns: int) -> Tensor:
    """The weight of a compressed one, by the description in ``triton_compression``, bit by bit."""
    bits = compression.BITS[blob.dtype]
    flat = blob.view(-1).view(torch.uint8)
    count = rows * columns // 2
    values = flat[: count * bits // 8].clone().view(blob.dtype).float().view(rows, columns // 4, 2)
    meta = flat[count * bits // 8 :]
    order = {
        16: ("r3", "g2", "g0", "g1", "r0", "r1", "r2", "r4", "r5"),
        8: ("g0", "r3", "g3", "g1", "g2", "r0", "r1", "r2", "r4", "r5"),
    }[bits]
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
    if not by_columns:
        return weight
    whole = {4: torch.int32, 2: torch.int16, 1: torch.int8}[weight.dtype.itemsize]
    return weight.view(whole).t().contiguous().t().view(weight.dtype)


def written(weight: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.shape
    blob = torch.zeros(compression.blob_shape(rows, columns, dtype), dtype=dtype)
    compression.write(weight, blob)
    return blob


@pytest.mark.parametrize(("name", "shape", "turned"), CASES)
def test_bits_are_the_librarys(name, shape, turned):
    rows, columns = shape
    dtype = DTYPES[name]
    expected = torch.from_numpy(np.load(RECORDED)[f"{name}_{rows}x{columns}"])
    weight = pairs(rows, columns)
    result = written(as_stored(weight.to(dtype), turned), dtype)
    assert result.numel() * dtype.itemsize == expected.numel()
    # of tiles that are not full the library leaves the rest as it was
    assert torch.equal(unpacked(expected.view(dtype), rows, columns), weight)
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
    blob = written(as_stored(weight, turned), torch.bfloat16)
    result = unpacked(blob, 80, 48)
    assert torch.equal(result, weight)
    assert not bool((blob.view(-1)[: 80 * 24].view(torch.int16) == -(2**15)).any())


@pytest.mark.parametrize(("ratio", "shape"), [("2:4", (96, 80)), ("1:4", (32, 136))])
def test_a_gradient_is_estimated_and_compressed_in_one_pass(ratio, shape):
    """The estimate of the kernel that writes it whole, whose tests show that it is unbiased."""
    rows, columns = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).half()
    x[:8, :3], x[5, 1] = 0.0, 7.0
    seed, pattern = torch.tensor([11], dtype=torch.int32), Pattern.parse(ratio)
    whole, blob = torch.empty_like(x), torch.zeros(compression.blob_shape(columns, rows, x.dtype))
    blob = blob.to(x.dtype)
    triton_mvue.estimate(x, whole, pattern, 0, seed)
    compression.write_estimate(x, blob, pattern, seed)
    assert torch.equal(unpacked(blob, columns, rows), whole.t().float())
    assert 0 < int((whole != 0).sum()) <= pattern.n * x.numel() // 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_many_kinds_are_compressed_together(dtype):
    """Shapes that 16 divides and others, both orders in memory, float32 and what is rounded to."""
    low = DTYPES[dtype]
    kinds = [torch.float32, low] if low.itemsize == 2 else [low]
    shapes = (64, 128), (80, 48), (96, 160), (128, 64), (16, 64)
    weights, whole = [], []
    for kind in kinds:
        for i, shape in enumerate(shapes):
            weight = pairs(*shape) * torch.arange(1, 9).repeat(shape[0], shape[1] // 8)
            whole.append(weight.clone())
            weights.append(as_stored(weight.to(kind), i % 2 == 1))
    blobs = [torch.zeros(compression.blob_shape(*w.shape, low), dtype=low) for w in weights]
    copies = [torch.zeros_like(w, dtype=low) if i % 3 else None for i, w in enumerate(weights)]
    batch, members = compression.CompressionBatch(), list(zip(weights, blobs, copies, strict=True))
    batch.write(members)
    for weight, blob in zip(whole, blobs, strict=True):
        assert torch.equal(unpacked(blob, *weight.shape), weight)
    for weight in weights:
        weight.copy_((2 * weight.float()).to(weight.dtype))
    batch.write(members)
    for weight, blob, copy in zip(whole, blobs, copies, strict=True):
        assert torch.equal(unpacked(blob, *weight.shape), 2 * weight)
        assert copy is None or torch.equal(copy.float(), 2 * weight)


@torch.no_grad()
def test_products_of_many_layers_are_packed_together(monkeypatch):
    """With sparse input gradients and dense ones, a weight of its own for them, and one layer that
    does not begin at a multiple of 16 bytes."""
    monkeypatch.setattr(compression, "works", lambda device, dtype: True)
    low = torch.bfloat16
    members, expected = [], []
    for i, (both, apart) in enumerate([(False, False), (True, False), (True, True)] * 2):
        corner = torch.randn(16, 32, generator=torch.Generator().manual_seed(i)).bfloat16()
        memory = torch.empty(16 * 32 + 1)
        new = memory[1:].view(16, 32) if i == 3 else memory[:-1].view(16, 32)
        new.copy_(transposable(corner, 1 + i))
        other = transposable(corner, 7 + i) if apart else None
        products = SemiStructuredProducts("cusparselt:0", torch.zeros(16, 32), other, low, both)
        members.append((products, (new, other, False)))
        expected.append((new, new if other is None else other))
    packer = BatchPacker()
    for _ in range(2):
        for products, _ in members:
            for buffer in products.buffers():
                buffer.zero_()
        buffers = [buffer for products, _ in members for buffer in products.buffers()]
        versions = [buffer._version for buffer in buffers]
        packer.write(members)
        # a backward pass of an earlier step has to raise
        assert all(b._version > v for b, v in zip(buffers, versions, strict=True))
        for (products, _), (weight, backward) in zip(members, expected, strict=True):
            first, second = products.buffers()
            assert torch.equal(unpacked(first, 16, 32), weight)
            if products.both:
                assert torch.equal(unpacked(second, 32, 16), backward.t())
            else:
                assert torch.equal(second, backward.to(low))
        for weight, _ in expected:
            weight *= 2


def transposable(values: Tensor, seed: int) -> Tensor:
    """Numbers that bfloat16 has, 2:4 along both dimensions."""
    block = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
    turned = block.roll(seed, 0).repeat(values.shape[0] // 4, values.shape[1] // 4)
    return values.float() * turned
