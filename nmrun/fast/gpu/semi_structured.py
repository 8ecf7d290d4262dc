"""Products with a 2:4 weight on sparse tensor cores, by cuSPARSELt: each is tested before it is
believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.errors import first_line
from nmrun.fast.gpu.kernels import compression, cusparselt
from nmrun.fast.measurement import ERRORS, fault
from nmrun.patterns import Pattern
from nmrun.products import simulation
from nmrun.sparsity import estimators

Parts = list[Tensor]
# tokens: a dense operand of 16-bit numbers has to have a multiple of 8, and fp8 of 16
ROUND_UP = 16


def padded(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """A matrix with zeros up to a multiple of rows (dim 0) or columns (1); itself where there is
    nothing to add, which ``pad`` copies.
    """
    missing = -x.shape[dim] % multiple
    return functional.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing)) if missing else x


@dataclass(frozen=True)
class Path:
    """One way to compute ``x W^T``, W (rows, columns) 2:4 along its columns, x (tokens, columns).

    ``pack(W, V)`` compresses W, and V^T where a second weight V (rows, columns), 2:4 along its
    rows, is given: that of the input gradient ``dz V``. ``multiply(x, parts, bias)`` is the product
    with what was packed, of shape (tokens, rows), stored as is fastest. ``fp8``: operands are rounded as
    :func:`nmrun.products.simulation.linear` does with ``fp8``, those of ``x W^T`` to e4m3fn and
    those of ``dz V`` to e5m2. ``rewrite(parts, W)`` compresses another W in the place of one.
    ``algorithms(x, parts)`` is how many ``multiply`` can choose from by its keyword ``algorithm``.
    ``estimate(x, pattern)`` packs E^T, E the unbiased estimate of ``x`` along its rows.
    """

    pack: Callable[[Tensor, Tensor | None], tuple[Parts, Parts]]
    multiply: Callable[..., Tensor]
    fp8: bool = False
    rewrite: Callable[[Parts, Tensor], None] | None = None
    algorithms: Callable[[Tensor, Parts], int] | None = None
    estimate: Callable[[Tensor, Pattern], Parts] | None = None

    def pack_estimate(self, x: Tensor, pattern: Pattern) -> Parts:
        """What :attr:`estimate` does, in one pass or in two."""
        if self.estimate is not None:
            return self.estimate(x, pattern)
        return self.pack(estimators.mvue(x, pattern, 0).t(), None)[0]


def cusparselt_pack(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    """As ``Path.pack``, in bfloat16 or float16."""
    parts = [compression.compressed(weight, weight.dtype)]
    return parts, [] if other is None else [compression.compressed(other.t(), other.dtype)]


def cusparselt_rewrite(parts: Parts, weight: Tensor) -> None:
    """As ``Path.rewrite``; the weight is stored by rows or by columns."""
    compression.compressed(weight, parts[0].dtype, out=parts[0])


def cusparselt_multiply(x: Tensor, parts: Parts, bias: Tensor | None, algorithm: int = 0) -> Tensor:
    z = cusparselt.multiply(parts[0], padded(x, ROUND_UP), bias, algorithm=algorithm)
    return z[: len(x)]


def cusparselt_algorithms(x: Tensor, parts: Parts) -> int:
    return cusparselt.algorithms(parts[0], padded(x, ROUND_UP))


def cusparselt_pack_fp8(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    """As :func:`cusparselt_pack`, with W rounded to e4m3fn and V^T to e5m2; each with its scale."""
    values, scale = simulation.quantize(weight, simulation.FORWARD_FP8)
    parts_t: Parts = []
    # torch compresses e4m3 alone of the two; numbers of e5m2 are numbers of bfloat16 as well
    if other is not None:
        values_t, scale_t = simulation.quantize(other.t(), simulation.BACKWARD_FP8, torch.bfloat16)
        parts_t = [compression.compressed(values_t, torch.bfloat16), scale_t]
    return [compression.compressed(values, simulation.FORWARD_FP8), scale], parts_t


def cusparselt_rewrite_fp8(parts: Parts, weight: Tensor) -> None:
    """As :func:`cusparselt_rewrite`, of what :func:`cusparselt_pack_fp8` returned."""
    values, scale = _quantized(weight, parts)
    compression.compressed(values, parts[0].dtype, out=parts[0])
    parts[1].copy_(scale)


def _quantized(x: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """(x rounded as these parts were, in their dtype, its scale)."""
    forward = parts[0].dtype == simulation.FORWARD_FP8
    kind = simulation.FORWARD_FP8 if forward else simulation.BACKWARD_FP8
    return simulation.quantize(x, kind, parts[0].dtype)


def cusparselt_multiply_fp8(
    x: Tensor, parts: Parts, bias: Tensor | None, algorithm: int = 0
) -> Tensor:
    # of FP8 the library multiplies what is stored by rows alone
    values, scale = _quantized(padded(x, ROUND_UP).contiguous(), parts)
    # the library takes no scales that lie on the device; before them float16 would overflow
    out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    z = cusparselt.multiply(parts[0], values, out=out, algorithm=algorithm)
    return unscaled(z[: len(x)], parts[1], scale, bias, x.dtype)


def cusparselt_algorithms_fp8(x: Tensor, parts: Parts) -> int:
    out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    values, _ = _quantized(padded(x, ROUND_UP).contiguous(), parts)
    return cusparselt.algorithms(parts[0], values, out)


def unscaled(
    z: Tensor, scale: Tensor, scale_x: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``z / scale / scale_x + bias``, computed in float32 and rounded once."""
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    # with a dimension it makes the product float32
    factor = (scale.reciprocal() * scale_x.reciprocal()).view(1)
    return (
        torch.mul(z, factor, out=out)
        if bias is None
        else torch.addcmul(bias.float(), z, factor, out=out)
    )


# NVIDIA's library: Ampere and later
CUSPARSELT = Path(
    cusparselt_pack,
    cusparselt_multiply,
    rewrite=cusparselt_rewrite,
    algorithms=cusparselt_algorithms,
    estimate=lambda x, pattern: [compression.estimated(x, pattern)],
)
CUSPARSELT_FP8 = Path(  # Ada, Hopper and later
    cusparselt_pack_fp8,
    cusparselt_multiply_fp8,
    fp8=True,
    rewrite=cusparselt_rewrite_fp8,
    algorithms=cusparselt_algorithms_fp8,
)
PATHS = {"cusparselt": CUSPARSELT, "cusparselt_fp8": CUSPARSELT_FP8}
# The reference, on any device: the zeros are multiplied too.
MASKED = Path(
    lambda w, v: ([w.clone()], [] if v is None else [v.t().contiguous()]),
    lambda x, parts, bias: functional.linear(x, parts[0], bias),
)


def candidates(fp8: bool) -> dict[str, Path]:
    """The paths for operands rounded to FP8, or those for others."""
    return {name: path for name, path in PATHS.items() if path.fp8 == fp8}


def named(name: str) -> Path:
    """The path of a name: of ``PATHS``, with an algorithm (``cusparselt:17``) or without, or
    ``masked``.
    """
    if name == "masked":
        return MASKED
    kind, _, number = name.partition(":")
    path = PATHS[kind]
    if not number:
        return path
    return replace(path, multiply=partial(path.multiply, algorithm=int(number)))


def fastest(
    name: str, x: Tensor, parts: Parts, bias: Tensor | None, expected: Tensor, graph: bool = False
) -> tuple[str, float]:
    """The fastest right algorithm of a path of ``PATHS`` for a ``multiply`` of these operands: its name,
    for :func:`named`, and its milliseconds, as :func:`milliseconds` has them; ``expected`` is the
    product in float32.

    Raises ValueError, which says what is wrong, where none is right.
    """
    times: dict[str, float] = {}
    names, wrong = _with_algorithms(name, x, parts), ""
    calls = {each: partial(named(each).multiply, x, parts, bias) for each in names}
    if len(names) > 1:
        for each, call in calls.items():
            try:
                times[each] = milliseconds(call, 5, graph)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                wrong = first_line(error)
        names = sorted(times, key=lambda each: times[each])
        if graph:  # each has kept memory of its own
            torch.cuda.empty_cache()
    for each in names:
        wrong = fault(calls[each], expected, fp8=named(each).fp8)
        if not wrong:
            return each, milliseconds(calls[each], graph=graph)
    raise ValueError(wrong)


def _with_algorithms(name: str, x: Tensor, parts: Parts) -> Sequence[str]:
    count = named(name).algorithms
    return [name] if count is None else [f"{name}:{i}" for i in range(count(x, parts))] or [name]


def transposable(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """A bfloat16 weight of N(0, 1) numbers that is 2:4 along both dimensions, so that no path has a
    choice what to prune.
    """
    values = torch.randn(
        rows, columns, generator=torch.Generator(device).manual_seed(0), device=device
    )
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).to(device)
    return (values * pairs.repeat(rows // 4, columns // 4) + 0.0).bfloat16()


def verdict(path: Path, device: torch.device | str = "cuda") -> str:
    """``"right"``, or what is wrong with a path, by one product in bfloat16."""
    weight = transposable(256, 512, device)
    x = torch.randn(384, 512, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    try:
        parts, _ = path.pack(weight, weight)
        expected = simulation.linear(x.float(), weight.float(), fp8=path.fp8)
        problem = fault(lambda: path.multiply(x, parts, None), expected, path.fp8)
    except ERRORS as error:
        return first_line(error)
    return (
        f"{problem}: not to be used here"
        if problem.startswith(("WRONG", "results"))
        else problem or "right"
    )


def milliseconds(call: Callable[[], object], repeats: int = 20, graph: bool = False) -> float:
    """The median time of ``call`` on the current GPU, after three calls to warm up; as a CUDA ``graph``
    without the time that the host takes to call it."""
    for _ in range(3):
        call()
    if graph:
        call = captured(call)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """What ``call`` does on the GPU, to be repeated without the host; it has been called before."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    # torch.cuda.graph collects garbage and empties the cache first, which takes longer than all else
    with torch.cuda.stream(stream):
        graph.capture_begin(pool)
        try:
            call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken, too
                _end_capture(graph, pool)
            raise
        _end_capture(graph, pool)
    current.wait_stream(stream)
    return graph.replay


def _end_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # of a broken one torch 2.11 leaves the memory as if it went on, and every later
        # empty_cache() and graph fails; where the graph is at fault, it has ended
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise
