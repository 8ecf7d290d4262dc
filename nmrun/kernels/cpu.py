"""The compiled CPU kernels: ``nm_project.c`` and ``nm_adam.c`` built for one N:M by the system's C
compiler, called through ctypes.

Building takes about 0.2 s, with the step of Adam 1.5 s, and happens once a pattern and machine; the
result is kept in ``~/.cache/nmrun/kernels`` (or under ``XDG_CACHE_HOME``). Without a compiler
everything still works, through the torch reference, and gives the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from nmrun.kernels.layout import as_stored, filled, stored_alike
from nmrun.patterns import Pattern

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
# weights; below this the reference takes 0.1 ms a step and a first build 3,000 steps to pay back
SMALLEST = 1 << 12
CHUNK = 1 << 16  # weights a thread should at least get
LARGEST_M = (
    256  # the working set of a column block must stay in the first-level cache and the code small
)


def project(
    weight: Tensor,
    out: Tensor,
    pattern: Pattern,
    dim: int,
    soft: bool = False,
    scale: float = 1.0,
    factor: float = 0.0,
) -> bool:
    """Write the N:M projection of ``weight`` into ``out`` and return True, or return False where
    this kernel does not apply.

    Hard threshold by default, ``scale * soft threshold`` with ``soft``; of a hard one, pruned
    weights are kept ``factor`` times. Applies to float32 CPU tensors of at least ``SMALLEST``
    elements, contiguous or both with channels last, for M up to ``LARGEST_M``. Runs on as many
    threads as torch does.
    """
    if not takes(pattern, weight, out) or (kernel := load(pattern, factor != 0)) is None:
        return False
    dim, (weight, out) = as_stored(dim, weight, out)
    inner = weight[0].numel() if dim == 0 else weight.shape[dim + 1 :].numel()
    whole = filled(weight, pattern, dim)
    result = out if whole is weight else torch.empty_like(whole)
    source, target = whole.data_ptr(), result.data_ptr()
    in_parts(
        whole.numel() // pattern.m,
        whole.numel(),
        lambda begin, end: kernel.nm_project(
            source, target, begin, end, inner, soft, scale, factor
        ),
    )
    if result is not out:
        out.copy_(result.narrow(dim, 0, out.shape[dim]))
    return True


def project_rows(weight: Tensor, out: Tensor, pattern: Pattern, order: Tensor) -> bool:
    """Write the projection of ``weight`` along dimension 0, as if its rows stood in ``order``
    (int64), into ``out`` and return True, or return False where this kernel does not apply: as
    :func:`project`, to whole groups."""
    fits = (
        takes(pattern, weight, out)
        and len(order) == len(weight)
        and len(weight) % pattern.m == 0
        and order.is_contiguous()
    )
    if not fits or (kernel := load(pattern)) is None:
        return False
    _, (weight, out) = as_stored(0, weight, out)
    addresses, length = [t.data_ptr() for t in (weight, out, order)], weight[0].numel()

    def part(begin: int, end: int) -> None:
        kernel.nm_project_rows(*addresses, begin, end, length)

    in_parts(len(weight) // pattern.m, weight.numel(), part)
    return True


def takes(pattern: Pattern, *tensors: Tensor) -> bool:
    """Whether these kernels are for tensors of one shape: float32, on the CPU, enough weights,
    stored alike; and for M.
    """
    large = tensors[0].numel() >= SMALLEST and pattern.m <= LARGEST_M
    return (
        large
        and all(t.is_cpu and t.dtype == torch.float32 for t in tensors)
        and stored_alike(*tensors)
    )


def in_parts(rows: int, weights: int, work: Callable[[int, int], object]) -> None:
    """``work(begin, end)`` for parts of ``rows``, on as many threads as torch has and ``weights``
    are worth.
    """
    threads = max(1, min(torch.get_num_threads(), weights // CHUNK, rows))
    step = -(-rows // threads)
    parts = [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
    # ctypes lets go of the interpreter lock during a call
    jobs = [_pool(os.getpid()).submit(work, *part) for part in parts[1:]]
    work(*parts[0])
    for job in jobs:
        job.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # one a process: threads do not survive a fork
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="nm_project")


@cache
def load(pattern: Pattern, fades: bool = False, adam: bool = False) -> ctypes.CDLL | None:
    """The library for this pattern, with or without a factor for pruned weights, with the step of
    Adam or without, built if needed; None where no C compiler works."""
    compiler = find_compiler()
    if compiler is None:
        return None
    names = ("nm_project", "nm_adam") if adam else ("nm_project",)
    source = "".join(
        resources.files("nmrun.kernels").joinpath(f"{name}.c").read_text() for name in names
    )
    flags = (*FLAGS, f"-DN={pattern.n}", f"-DM={pattern.m}", f"-DFADES={int(fades)}")
    key = hashlib.sha256("\0".join([source, *flags, compiler, _processor()]).encode()).hexdigest()[
        :16
    ]
    try:
        library = cache_folder() / f"{names[-1]}-{pattern.slug}-{key}.so"
        if not library.exists():
            _build(compiler, source, flags, library)
        kernel = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, size, flag, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    kernel.nm_project.argtypes, kernel.nm_project.restype = (
        [pointer] * 2 + [size] * 3 + [flag] + [number] * 2,
        None,
    )
    kernel.nm_project_rows.argtypes, kernel.nm_project_rows.restype = (
        [pointer] * 3 + [size] * 3,
        None,
    )
    if adam:
        kernel.nm_adam.argtypes, kernel.nm_adam.restype = (
            [pointer] * 6 + [size] * 3 + [pointer] + [flag] * 3,
            None,
        )
    return kernel


def find_compiler() -> str | None:
    """The C compiler: ``$CC``, else the first of cc, gcc, clang on the path, else None."""
    return next(
        (
            found
            for name in (os.environ.get("CC"), "cc", "gcc", "clang")
            if name and (found := shutil.which(name))
        ),
        None,
    )


def _build(compiler: str, source: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, built = Path(folder, "nm.c"), Path(folder, "nm.so")
        code.write_text(source)
        command = [compiler, *flags, str(code), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(built, library)  # another process may be building the same file


def cache_folder() -> Path:
    """Where what was built or measured on this machine is kept between runs; a folder of this
    process alone if nothing can be.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "nmrun" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # Path.home() raises the latter for a user without a home
        pass
    return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nmrun-kernels-")  # removed at exit


def _processor() -> str:
    """What ``-march=native`` depends on: a cache shared between machines must not hand one the
    other's code.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.platform() + platform.processor()
