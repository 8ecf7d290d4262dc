"""2:4 weights in cuSPARSELt's compressed form.

The library's own kernel takes 2.4 ms for 67 million weights (an H100, cuSPARSELt 0.8), ours 0.17;
where ours has its bits, it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nmrun.kernels.comparison import agrees
from nmrun.patterns import Pattern
from nmrun.sparsity import estimators

if TYPE_CHECKING:
    from nmrun.kernels.triton_launches import LaunchMember

BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 8}
# compared once, in whole tiles; kernels differ where 16 divides the groups of a row and where not
SHAPES = {16: ((128, 256), (64, 160)), 8: ((128, 256),)}


def compressed(weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Compress a weight (rows, columns) on a CUDA device, 2:4 along its columns, stored by rows or by
    columns. It is in float32 or in ``dtype``, which is 16-bit, or e4m3fn with a weight of that dtype.
    The result goes into ``out``, if given: what this function returned for a weight of the same shape.

    Returns (rows, some), as ``torch._cslt_compress`` does.
    """
    rows, columns = weight.shape
    if weight.dtype != torch.float32:
        weight = weight.to(dtype)
    if _applies(rows, columns, dtype) and works(weight.device, dtype):
        if out is None:
            out = torch.empty(blob_shape(rows, columns, dtype), dtype=dtype, device=weight.device)
        write(weight, out)
        return out
    if dtype.itemsize == 1:
        low = weight.contiguous()
    else:  # a mask times a negative weight is -0.0, which the library may take for a number
        low = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        torch.add(weight.detach(), 0.0, out=low)
    blob = torch._cslt_compress(low)
    return blob if out is None else out.copy_(blob)


def estimated(x: Tensor, pattern: Pattern) -> Tensor:
    """Compress E^T, (columns, rows), where E is the unbiased estimate of ``x`` (rows, columns) along
    the rows (:func:`nmrun.sparsity.mvue`), by a pattern that fits into 2:4; in the dtype of ``x``,
    which is 16-bit. N:4 patterns take one pass."""
    rows, columns = x.shape
    one_pass = pattern.m == 4 and rows % 4 == 0 and x.is_contiguous()
    if not one_pass or not works(x.device, x.dtype):
        return compressed(estimators.mvue(x, pattern, 0).t(), x.dtype)
    out = torch.empty(blob_shape(columns, rows, x.dtype), dtype=x.dtype, device=x.device)
    write_estimate(x, out, pattern, estimators.seed(x.device))
    return out


def blob_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """The shape of a compressed weight: whole tiles of places, in whole rows."""
    tile = 32 * 16 // BITS[dtype]  # columns
    meta = -(-rows // 64) * -(-columns // tile) * (8 * tile)
    return rows, -(-(rows * columns // 2 * dtype.itemsize + meta) // (rows * dtype.itemsize))


def write(weight: Tensor, out: Tensor) -> None:
    """Compress a weight into ``out``, by our kernel."""
    from nmrun.fast.gpu.kernels import triton_compression
    from nmrun.kernels.triton_launches import on

    rows, columns = weight.shape
    transposed = not weight.is_contiguous()
    source = weight.t() if transposed else weight
    source = source.contiguous() if transposed else source
    constants = _constants(weight, out)
    whole = torch.int16 if constants["BITS"] == 16 else torch.int8
    values, meta, grid = _parts(out, rows, columns)
    with on(out):
        triton_compression.pack_one[grid](
            source if constants["CAST"] is not None else source.view(whole), values, meta, rows,
            columns // 4, **constants,
        )  # fmt: skip


def fits(weight: Tensor, out: Tensor) -> bool:
    """Whether a :class:`CompressionBatch` can take a weight."""
    stored = weight.is_contiguous() or weight.t().is_contiguous()
    aligned = weight.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    rows, columns = weight.shape
    known = weight.dtype in (torch.float32, out.dtype) and _applies(rows, columns, out.dtype)
    return stored and aligned and known and works(weight.device, out.dtype)


def _applies(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether a kernel of this kind was compared with the library: one of 8 bits has whole tiles
    only where 16 divides rows and groups."""
    return dtype.itemsize == 2 or _is_even(rows, columns)


def _is_even(rows: int, columns: int) -> bool:
    """Whether 16 divides rows and groups."""
    return rows % 16 == 0 and columns % 64 == 0


def fits_copy(weight: Tensor, copy: Tensor) -> bool:
    """Whether a :class:`CompressionBatch` can also copy a weight of 16 bits or 32, which it has read
    anyhow."""
    alike = copy.stride() == weight.stride() and copy.dtype.itemsize == 2
    return alike and copy.data_ptr() % 16 == 0


class CompressionBatch:
    """Compresses weights by our kernel, in as few launches as there are kinds of them, of dtype and
    order in memory."""

    def __init__(self) -> None:
        from nmrun.kernels.triton_launches import Launches

        self._launches = Launches(_member)

    def write(self, batch: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        """Compress weights, each into its ``out`` of :func:`write`, and copy it into a third tensor, in
        the dtype of ``out``, where there is one."""
        from nmrun.fast.gpu.kernels import triton_compression
        from nmrun.kernels.triton_launches import on

        kinds = [(weight, out, copy is not None) for weight, out, copy in batch]
        for members, table, constants in self._launches.of(kinds):
            rows = table.rows([batch[i] for i in members])
            with on(rows):
                triton_compression.pack_many[(table.programs,)](
                    rows, table.owner, **constants, FIELDS=rows.shape[1]
                )


def _member(weight: Tensor, out: Tensor, copies: bool) -> LaunchMember:
    import triton.language as tl

    from nmrun.kernels.triton_launches import LaunchMember

    (rows, columns), constants = weight.shape, _constants(weight, out)
    tiles = -(-rows // constants["ROWS"]) * -(-columns // 4 // constants["GROUPS"])
    short = constants["BITS"] == 8
    whole = tl.int8 if short else tl.int16
    constants |= {
        "EVEN": _is_even(rows, columns),
        "WEIGHT": whole if constants["CAST"] is None else tl.float32,
        "PAIR": tl.int16 if short else tl.int32,
        "COPY": (whole if constants["CAST"] is None else constants["CAST"]) if copies else None,
    }
    return LaunchMember((tiles, rows, columns // 4), tiles, constants)


def _constants(weight: Tensor, out: Tensor) -> dict[str, Any]:
    """The constants of the kernels for a weight."""
    from nmrun.fast.gpu.kernels import triton_compression
    from nmrun.kernels.triton_launches import DTYPES

    bits = BITS[out.dtype]
    return {
        "TRANSPOSED": not weight.is_contiguous(),
        "CAST": DTYPES[out.dtype] if weight.dtype == torch.float32 else None,
        "BITS": bits,
        "ROWS": triton_compression.ROWS,
        "GROUPS": triton_compression.GROUPS[bits],
    }


def write_estimate(x: Tensor, out: Tensor, pattern: Pattern, seed: Tensor) -> None:
    """As :func:`estimated`, into ``out``; ``seed``: an integer on the device."""
    from nmrun.fast.gpu.kernels import triton_compression
    from nmrun.kernels.triton_launches import DTYPES, on

    columns, rows = x.shape
    values, meta, grid = _parts(out, rows, columns)
    with on(out):
        triton_compression.pack_estimate[grid](
            x, values, meta, seed, rows, columns // 4, N=pattern.n, CAST=DTYPES[out.dtype],
            ROWS=triton_compression.ROWS, GROUPS=triton_compression.GROUPS[16], enable_fp_fusion=False,
        )  # fmt: skip


def _parts(out: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(values in pairs, places in words, the grid of tiles) of a compressed weight."""
    import triton

    from nmrun.fast.gpu.kernels import triton_compression

    bits, flat, count = BITS[out.dtype], out.view(-1), rows * columns // 2
    values = flat[:count].view(torch.int32 if bits == 16 else torch.int16)
    meta = flat[count:].view(torch.int8)
    meta = meta[: meta.numel() // 2 * 2].view(torch.int16)
    across = triton.cdiv(columns // 4, triton_compression.GROUPS[bits])
    return values, meta, (triton.cdiv(rows, triton_compression.ROWS), across)


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels have the library's bits on this device: compared once, on small weights."""
    return device.type == "cuda" and agrees(
        "Our compression of 2:4 weights",
        device,
        lambda: all(_has_the_librarys_bits(shape, device, dtype) for shape in SHAPES[BITS[dtype]]),
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
    weight = torch.where(order < 2, values, 0).view(shape).to(dtype)
    whole = torch.int16 if dtype.itemsize == 2 else torch.int8
    turned = weight.view(whole).t().contiguous().to(device).t().view(dtype)
    weight = weight.to(device)
    expected = torch._cslt_compress(weight)
    sources = [weight, turned]
    if whole == torch.int16:
        sources += [weight.float(), turned.float()]
    if expected.shape != blob_shape(rows, columns, dtype):
        return False
    alone, together, beside = ([torch.zeros_like(expected) for _ in sources] for _ in range(3))
    copies = [torch.zeros_like(source, dtype=dtype) for source in sources]
    for source, got in zip(sources, alone, strict=True):
        write(source, got)
    CompressionBatch().write(
        [(source, got, None) for source, got in zip(sources, together, strict=True)]
    )
    CompressionBatch().write(list(zip(sources, beside, copies, strict=True)))
    every = [(got, expected) for got in alone + together + beside] + [
        (copy, weight) for copy in copies
    ]
    return all(torch.equal(got.view(whole), right.view(whole)) for got, right in every)
