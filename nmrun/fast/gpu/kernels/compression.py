"""2:4 weights in cuSPARSELt's compressed form.

The library's own kernel takes 2.4 ms for 67 million weights (an H100, cuSPARSELt 0.8), ours 0.17;
where ours has its bits, it is taken.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from nmrun.kernels.projection import agrees

# compared once, in whole tiles; kernels differ where 16 divides the groups of a row and where not
SHAPES = ((128, 256), (64, 160))


def compressed(weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Compress a weight (rows, columns) on a CUDA device, 2:4 along its columns, stored by rows or by
    columns, in float32 or in the 16-bit ``dtype``. The result goes into ``out``, if given: what this
    function returned for a weight of the same shape.

    Returns (rows, some), as ``torch._cslt_compress`` does.
    """
    if weight.dtype != torch.float32:
        weight = weight.to(dtype)
    if works(weight.device, dtype):
        if out is None:
            out = torch.empty(blob_shape(*weight.shape), dtype=dtype, device=weight.device)
        write(weight, out)
        return out
    # a mask times a negative weight is -0.0, which the library may take for a number
    low = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    blob = torch._cslt_compress(torch.add(weight.detach(), 0.0, out=low))
    return blob if out is None else out.copy_(blob)


def blob_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of a compressed weight: whole tiles of places, in whole rows."""
    places = -(-rows // 64) * -(-columns // 32) * 256  # bytes
    return rows, -(-(rows * columns + places) // (2 * rows))


def write(weight: Tensor, out: Tensor) -> None:
    """Compress a weight into ``out``, by our kernel."""
    import triton

    from nmrun.fast.gpu.kernels import triton_compression
    from nmrun.kernels.triton_groups import DTYPES, on

    rows, columns = weight.shape
    transposed = not weight.is_contiguous()
    source = weight.t().contiguous() if transposed else weight
    cast = DTYPES[out.dtype] if weight.dtype == torch.float32 else None
    flat, count = out.view(-1), rows * columns // 2
    values, meta = flat[:count].view(torch.int32), flat[count:].view(torch.int16)
    height, width = triton_compression.ROWS, triton_compression.GROUPS
    grid = triton.cdiv(rows, height), triton.cdiv(columns // 4, width)
    with on(out):
        triton_compression.pack[grid](
            source.view(torch.int16) if cast is None else source, values, meta, rows, columns // 4,
            TRANSPOSED=transposed, CAST=cast, ROWS=height, GROUPS=width,
        )  # fmt: skip


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernel has the library's bits on this device: compared once, on small weights."""
    return device.type == "cuda" and agrees(
        "Our compression of 2:4 weights",
        device,
        lambda: all(_has_the_librarys_bits(shape, device, dtype) for shape in SHAPES),
        "cuSPARSELt's",
    )


def _has_the_librarys_bits(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> bool:
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(rows, columns // 4, 4, generator=generator).argsort(2)
    values = torch.randint(1, 8, order.shape, generator=generator)
    # two of each group, none of them zero: the library is free to choose the place of a zero
    weight = torch.where(order < 2, values, 0).view(shape).to(device, dtype)
    turned = weight.t().contiguous().t()
    expected = torch._cslt_compress(weight)
    if expected.shape != blob_shape(rows, columns):
        return False
    for source in (weight, turned, weight.float(), turned.float()):
        out = torch.zeros_like(expected)
        write(source, out)
        if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
            return False
    return True
