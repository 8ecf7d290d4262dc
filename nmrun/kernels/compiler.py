"""C sources built by the system's compiler, kept between runs, called on threads.

What was built is kept in ``~/.cache/nmrun/kernels`` (or under ``XDG_CACHE_HOME``), a folder of its
owner alone. A file is loaded only if this user wrote it and its SHA-256 is the one noted beside it;
any other is built anew. Without a compiler nothing is built, and torch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmrun import atomic

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
SAME_BITS = ("-ffp-contract=off", "-fno-math-errno")  # gcc's own fusing would change bits
CHUNK = 1 << 16  # weights that a thread should at least get
MOST_OPERANDS = 16  # operands, as in nm_parts.c
BEGIN, END = object(), object()
OPERANDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int}
NO_COMPILER = "no C compiler works here (cc, gcc, clang or $CC)"
IMPORTED_IN = os.getpid()  # libgomp's threads do not survive a fork, and it would wait for them


def library(
    name: str, sources: Sequence[str], flags: Sequence[str] = (), package: str = "nmrun.kernels"
) -> ctypes.CDLL | None:
    """The shared library of C sources, built if needed; None where no C compiler works.
    ``sources``: names of files of ``package``, without ``.c``; they become one
    translation unit."""
    compiler = find_compiler()
    if compiler is None:
        return None
    code = "".join(
        resources.files(package).joinpath(f"{source}.c").read_text() for source in sources
    )
    ingredients = [code, *FLAGS, *flags, compiler, _processor()]
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    try:
        path = cache_folder() / f"{name}-{key}.so"
        if not _trusted(path):
            _build(compiler, code, (*FLAGS, *flags), path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class CFunctions:
    """Functions of a shared library that is built when one is needed.

    Args:
        purpose: what they are for, in a message.
        sources, flags, package: see :func:`library`; it is named after the first function.
        functions: their operands, a letter each: ``p`` an address, ``n`` an int64, ``i`` an int.
        needs: the instructions that a processor needs for the first function. Those that are
            missing on other processors may be among the rest.
    """

    purpose: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    package: str
    functions: Mapping[str, str]
    needs: str = ""

    def obstacle(self) -> str:
        """Why they cannot be called on this machine; empty if they can."""
        if self._library is None:
            return NO_COMPILER
        return "" if hasattr(self._library, self._first) else f"this processor has no {self.needs}"

    def load(self) -> ctypes.CDLL:
        """The library. Raises RuntimeError where there is an obstacle."""
        if why := self.obstacle():
            raise RuntimeError(f"{self.purpose}: {why}")
        assert self._library is not None
        return self._library

    @cached_property
    def address(self) -> int:
        """Where the first function lies, for a kernel that calls it. Raises as :meth:`load`."""
        function = getattr(self.load(), self._first)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    @property
    def _first(self) -> str:
        return next(iter(self.functions))

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        built = library(self._first, self.sources, self.flags, self.package)
        if built is not None:
            for name, operands in self.functions.items():
                if hasattr(built, name):
                    getattr(built, name).argtypes = [OPERANDS[letter] for letter in operands]
        return built


def find_compiler() -> str | None:
    """The C compiler: ``$CC``, else the first of cc, gcc, clang on the path, else None."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def in_parts(
    kernel: Callable[..., int], operands: Sequence[Any], rows: int, weights: int, unit: int = 1
) -> None:
    """Call a kernel for parts of its rows, on as many of torch's threads as they are worth.

    Args:
        operands: what it is called with; :data:`BEGIN` and :data:`END` stand for a part's rows.
        weights: the work in all rows, in weights of a pass over memory.
        unit: all parts but the last are multiples of so many rows.

    Raises:
        MemoryError: where it does not return 0.
    """
    if not rows:
        return
    threads = torch.get_num_threads()
    count = max(1, min(threads, weights // CHUNK, -(-rows // unit)))
    step = -(-rows // (count * unit)) * unit
    calls = [
        [begin if o is BEGIN else min(begin + step, rows) if o is END else o for o in operands]
        for begin in range(0, rows, step)
    ]
    if len(calls) > 1 and os.getpid() == IMPORTED_IN and (run := _region()):
        width = len(operands)
        words = (ctypes.c_int64 * MOST_OPERANDS * len(calls))()
        for place, call in zip(words, calls, strict=True):
            place[:width] = [o or 0 for o in call]
        failed = run(threads, ctypes.cast(kernel, ctypes.c_void_p), words, len(calls))  # type: ignore[arg-type]
    else:  # ctypes lets go of the interpreter lock during a call
        jobs = [_pool(os.getpid()).submit(kernel, *call) for call in calls[1:]]
        failed = any([kernel(*call) for call in calls[:1]] + [job.result() for job in jobs])
    if failed:
        raise MemoryError("no memory for the products of a packed weight")


def in_tokens_or_rows(
    kernel: Callable[..., int],
    operands: Sequence[Any],
    tokens: int,
    rows: int,
    work: int,
    panel: int,
    line: int = 1,
    last: Sequence[int] = (),
) -> None:
    """Call a kernel of a product for panels of tokens, or for rows where there are fewer panels than
    threads.

    Args:
        operands: its first ones; then come the tokens and the rows of a part, and the ``last``.
        rows: of the matrix, or tiles of them.
        work: see :func:`in_parts`, of all tokens and rows.
        panel, line: all parts but the last have multiples of so many tokens, or rows.
    """
    if -(-tokens // panel) >= torch.get_num_threads():
        in_parts(kernel, (*operands, BEGIN, END, 0, rows, *last), tokens, work, panel)
    else:
        in_parts(kernel, (*operands, 0, tokens, BEGIN, END, *last), rows, work, line)


def address(tensor: Tensor | None) -> int:
    """Where a tensor's numbers lie, for a kernel; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _region() -> Callable[..., int] | None:
    """``nm_parts.c`` with torch's OpenMP runtime; None without one whose entry is libgomp's."""
    try:
        region = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no such handle
        return None
    parts = CFunctions("threads", ("nm_parts",), (), __package__, {"nm_parts": "pnppn"})
    if parts.obstacle():
        return None
    return partial(parts.load().nm_parts, ctypes.cast(region, ctypes.c_void_p))


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # one a process: threads do not survive a fork
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="nmrun")


def _build(compiler: str, code: str, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, built = Path(folder, "nm.c"), Path(folder, "nm.so")
        source.write_text(code)
        command = [compiler, "-pthread", *flags, str(source), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        # another process may be building the same: where the two files are of different builds,
        # the next to load builds again
        noted = path.with_suffix(".sha256")
        atomic.write(noted, _digest(built), shared=True)
        atomic.write(path, built.read_bytes(), shared=True)
        for file in (noted, path):  # a umask may let others write
            file.chmod(0o600)


def _trusted(path: Path) -> bool:
    """Whether this user wrote the file, nobody else can, and it is whole."""
    try:
        noted = path.with_suffix(".sha256")
        return all(map(_is_own, (path, noted))) and noted.read_text() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _is_own(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows: a profile is its user's
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cache_folder() -> Path:
    """Where what was built or measured on this machine is kept between runs. Where that folder
    cannot be written or is somebody else's: one of this process alone."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "nmrun" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_own(folder):
            folder.chmod(0o700)  # of the user's own; raises for another's
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
    other's code."""
    return _flags() or platform.platform() + platform.processor()


def processor_flags() -> frozenset[str]:
    """What the processor says that it has, such as ``avx512_bf16``; empty where it cannot be asked."""
    return frozenset(_flags().split())


def _flags() -> str:
    facts = cpuinfo()
    return facts.get("flags") or facts.get("Features", "")  # of x86, of Arm


@cache
def cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor, by key; empty where there is no ``/proc/cpuinfo``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    facts = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, _, value in facts}
