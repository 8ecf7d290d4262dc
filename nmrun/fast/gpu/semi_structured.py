"""Products with a 2:4 weight on sparse tensor cores, by cuSPARSELt: each is tested before it is
believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.errors import first_line
from nmrun.fast.gpu.kernels import cusparselt
from nmrun.fast.measurement import fault

Parts = list[Tensor]
ROUND_UP = 16  # tokens: the library takes a multiple of 8


def padded(x: Tensor) -> Tensor:
    """A matrix with rows of zeros up to a multiple of ``ROUND_UP``; itself where there is nothing to
    add, which ``pad`` copies.
    """
    missing = -len(x) % ROUND_UP
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


@dataclass(frozen=True)
class Path:
    """One way to compute ``x W^T``, W (rows, columns) 2:4 along its columns, x (tokens, columns).

    ``pack(W)`` compresses W. ``multiply(x, parts, bias)`` is the product with what was packed, of
    shape (tokens, rows), stored as is fastest. ``rewrite(parts, W)`` compresses another W in the
    place of one. ``algorithms(x, parts)`` is how many ``multiply`` can choose from by its keyword
    ``algorithm``.
    """

    pack: Callable[[Tensor], Parts]
    multiply: Callable[..., Tensor]
    rewrite: Callable[[Parts, Tensor], object] | None = None
    algorithms: Callable[[Tensor, Parts], int] | None = None


# NVIDIA's library: Ampere and later
CUSPARSELT = Path(
    lambda weight: [cusparselt.compressed(weight, weight.dtype)],
    lambda x, parts, bias, algorithm=0: cusparselt.multiply(parts[0], padded(x), bias, algorithm)[
        : len(x)
    ],
    lambda parts, weight: cusparselt.compressed(weight, parts[0].dtype, out=parts[0]),
    lambda x, parts: cusparselt.algorithms(parts[0], padded(x)),
)
PATHS = {"cusparselt": CUSPARSELT}


def named(name: str) -> Path:
    """The path of a name: of ``PATHS``, with an algorithm (``cusparselt:17``) or without."""
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
    count, wrong = named(name).algorithms, ""
    names = [name] if count is None else [f"{name}:{i}" for i in range(count(x, parts))] or [name]
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
        wrong = fault(calls[each], expected)
        if not wrong:
            return each, milliseconds(calls[each], graph=graph)
    raise ValueError(wrong)


def transposable(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """A bfloat16 weight of N(0, 1) numbers that is 2:4 along both dimensions, so that no path has a
    choice what to prune.
    """
    values = torch.randn(
        rows, columns, generator=torch.Generator(device).manual_seed(0), device=device
    )
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).to(device)
    return (values * pairs.repeat(rows // 4, columns // 4) + 0.0).bfloat16()


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
