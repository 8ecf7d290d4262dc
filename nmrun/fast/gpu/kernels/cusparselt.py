"""Products with a compressed 2:4 weight by cuSPARSELt's C interface, with plans that are kept.

``torch._cslt_sparse_mm`` makes a plan in every call, some 0.4 ms of the host, and takes the
library's default algorithm. On an H100 that is slower than the dense product where another is 1.4 to
1.6 times as fast. The library's own kernel compresses 67 million weights in 2.4 ms (an H100, cuSPARSELt 0.8), ours
in 0.17; where ours has its bits, it is taken.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmrun.kernels.projection import agrees

OLDEST = (0, 6)  # its enumerations are those below
OPAQUE = 11264  # bytes of a structure: 512 since 0.8, 11024 before
ALIGNMENT = 16


def loaded_cusparselt() -> tuple[tuple[int, ...], str] | None:
    """((major, minor, patch), path), asked of the very library that is mapped: a wheel's metadata
    may say otherwise. None without one.
    """
    try:
        match = re.search(r"/\S*libcusparseLt\S*", Path("/proc/self/maps").read_text())
        if match is None:
            return None
        cusparselt = ctypes.CDLL(match[0])
        numbers = []
        # of CUDA's enum libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        for which in range(3):
            number = ctypes.c_int()
            if cusparselt.cusparseLtGetProperty(which, ctypes.byref(number)) != 0:
                return None
            numbers.append(number.value)
    except (OSError, AttributeError):
        return None
    return tuple(numbers), match[0]


@cache
def library() -> ctypes.CDLL:
    """Raises RuntimeError where there is none, or an old one."""
    installation = loaded_cusparselt()
    if installation is None:
        raise RuntimeError("this torch has no cuSPARSELt")
    version, path = installation
    if version < OLDEST:
        raise RuntimeError(
            f"cuSPARSELt {'.'.join(map(str, version))}: {'.'.join(map(str, OLDEST))} or later is needed"
        )
    loaded = ctypes.CDLL(path)
    loaded.cusparseLtGetErrorString.restype = ctypes.c_char_p
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library by its name without ``cusparseLt``. Raises RuntimeError, with the
    library's words, where it returns an error."""
    if status := getattr(library(), f"cusparseLt{name}")(*arguments):
        message = library().cusparseLtGetErrorString(status)
        raise RuntimeError(f"cuSPARSELt's {name}: {message.decode() if message else status}")


class Opaque(ctypes.c_void_p):
    """The address of a structure that only the library reads."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(OPAQUE + ALIGNMENT)
        super().__init__(-(-ctypes.addressof(self.memory) // ALIGNMENT) * ALIGNMENT)


PLANS = 128  # kept by each thread: a layer has one for each number of tokens
# of CUDA's cudaDataType
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
# of cuSPARSELt's header and cuSPARSE's
COLUMN_ORDER, ROW_ORDER = 1, 2
PLAIN, TRANSPOSED = 0, 1
HALF = 0  # sparsity
IN_FLOAT32 = 2
BIAS_POINTER = 8  # of a product
PLACE = 256  # of a bias, until there is one: a plan is made with a bias or without
ALGORITHM, LAST_ALGORITHM = 0, 1  # of an algorithm selection
ONE, ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def multiply(packed: Tensor, x: Tensor, bias: Tensor | None = None, algorithm: int = 0) -> Tensor:
    """Compute ``x W^T + bias``, (tokens, rows), in the dtype of ``x``; stored by columns where ``x``
    is and there is no bias, else by rows.

    Args:
        packed: W, (rows, some), compressed from (rows, columns).
        x: (tokens, columns), stored by rows or by columns, in the dtype of ``packed``; tokens are a
            multiple of 8.
        bias: (rows), in this dtype.
        algorithm: one of :func:`algorithms`; 0 is the library's default.

    Raises:
        RuntimeError: where the library refuses.
    """
    if x.dtype != packed.dtype:  # a plan says one dtype of both, and the library sees none
        raise RuntimeError(f"x is {x.dtype}, and the packed weight {packed.dtype}")
    if not (x.is_contiguous() or x.t().is_contiguous()):
        x = x.contiguous()
    x, bias = _aligned(x), None if bias is None else _aligned(bias)
    plan = _plan(packed, x, bias is not None, algorithm)
    with torch.cuda.device(x.device):
        return plan(packed, x, bias)


def algorithms(packed: Tensor, x: Tensor) -> int:
    """How many algorithms the library has for a :func:`multiply`; some may refuse it, or be wrong."""
    return _plan(packed, x, False, 0).algorithms


def _plan(packed: Tensor, x: Tensor, biased: bool, algorithm: int) -> _Plan:
    tokens, columns = x.shape
    by_columns = not x.is_contiguous()
    return _state.plan(
        x.device, packed.shape[0], columns, tokens, x.dtype, by_columns, biased, algorithm
    )


def _aligned(x: Tensor) -> Tensor:
    """A part of a tensor may begin anywhere; a copy begins where the library wants it."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


class _Plan:
    """One product: sizes, dtypes, with a bias or without, an algorithm. Which bias is set before
    each call: layers of a size share a plan.
    """

    def __init__(
        self, handle: Opaque, rows: int, columns: int, tokens: int, dtype: torch.dtype,
        by_columns: bool, biased: bool, algorithm: int,
    ) -> None:  # fmt: skip
        self.handle, self.shape, self.dtype = handle, (rows, tokens), dtype
        self.turned = by_columns and not biased
        self.structures: list[tuple[str, Opaque]] = []
        weight, x, z, self.product, self.selection, self.plan = (Opaque() for _ in range(6))
        number = ctypes.c_int

        def describe(kind: str, at: Opaque, sizes: tuple[int, ...], order: int, *more: Any) -> None:
            about = ctypes.c_uint32(ALIGNMENT), number(TYPES[dtype]), number(order), *more
            call(f"{kind}DescriptorInit", handle, at, *map(ctypes.c_int64, sizes), *about)
            self.structures.append(("MatDescriptorDestroy", at))

        stored = (columns, tokens) if by_columns else (tokens, columns)
        leading, order = (tokens, ROW_ORDER) if self.turned else (rows, COLUMN_ORDER)
        describe("Structured", weight, (rows, columns, columns), ROW_ORDER, number(HALF))
        describe("Dense", x, (*stored, stored[1]), ROW_ORDER)
        describe("Dense", z, (rows, tokens, leading), order)
        turned = number(PLAIN if by_columns else TRANSPOSED)
        call(
            "MatmulDescriptorInit", handle, self.product,
            number(PLAIN), turned, weight, x, z, z, number(IN_FLOAT32),
        )  # fmt: skip
        if biased:
            self._set_bias(PLACE)
        call("MatmulAlgSelectionInit", handle, self.selection, self.product, number(0))
        if hasattr(library(), "cusparseLtMatmulAlgSelectionDestroy"):  # since 0.8
            self.structures.append(("MatmulAlgSelectionDestroy", self.selection))
        last, index, four = number(), number(algorithm), ctypes.c_size_t(4)
        call(
            *("MatmulAlgGetAttribute", handle, self.selection, number(LAST_ALGORITHM)),
            *(ctypes.byref(last), four),
        )
        self.algorithms = last.value
        if algorithm:
            call(
                *("MatmulAlgSetAttribute", handle, self.selection, number(ALGORITHM)),
                *(ctypes.byref(index), four),
            )
        call("MatmulPlanInit", handle, self.plan, self.product, self.selection)
        self.structures.append(("MatmulPlanDestroy", self.plan))
        needed = ctypes.c_size_t()
        call("MatmulGetWorkspace", handle, self.plan, ctypes.byref(needed))
        self.workspace = needed.value

    def __call__(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        shape = self.shape if self.turned else self.shape[::-1]
        z = torch.empty(shape, dtype=self.dtype, device=x.device)
        # of torch's allocator, which knows of streams and of captured graphs
        space = torch.empty(self.workspace, dtype=torch.int8, device=x.device)
        if bias is not None:
            self._set_bias(bias.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        to = ctypes.c_void_p(z.data_ptr())
        call(
            "Matmul", self.handle, self.plan, ctypes.byref(ONE), ctypes.c_void_p(packed.data_ptr()), ctypes.c_void_p(x.data_ptr()),
            ctypes.byref(ZERO), to, to, ctypes.c_void_p(space.data_ptr()), ctypes.byref(stream), ctypes.c_int(1),
        )  # fmt: skip
        return z.t() if self.turned else z

    def _set_bias(self, address: int) -> None:
        place = ctypes.c_void_p(address)
        call(
            *("MatmulDescSetAttribute", self.handle, self.product, ctypes.c_int(BIAS_POINTER)),
            *(ctypes.byref(place), ctypes.c_size_t(8)),
        )

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for destroy, structure in reversed(self.structures):
                getattr(library(), f"cusparseLt{destroy}")(structure)


class _State(threading.local):
    """What one thread has of the library: a handle serves the thread that made it."""

    def __init__(self) -> None:
        self._handles: dict[torch.device, Opaque] = {}
        self.plan = lru_cache(maxsize=PLANS)(self._plan)

    def _plan(
        self, device: torch.device, rows: int, columns: int, tokens: int, dtype: torch.dtype,
        by_columns: bool, biased: bool, algorithm: int,
    ) -> _Plan:  # fmt: skip
        with torch.cuda.device(device):
            if device not in self._handles:
                self._handles[device] = Opaque()
                call("Init", self._handles[device])
            handle = self._handles[device]
            return _Plan(handle, rows, columns, tokens, dtype, by_columns, biased, algorithm)


_state = _State()


# --- compressed weights ---------------------------------------------------------------------------

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
