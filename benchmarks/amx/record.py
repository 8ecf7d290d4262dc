"""A plugin of pytest: builds the kernels for AMX in the folder ``$RECORD``, and writes there all calls that
tests make, with what they read and what they leave, for ``replay.c``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from nmrun.fast.cpu.kernels import blocks, int8, matrix
from nmrun.kernels import compiler

FOLDER = Path(os.environ["RECORD"])
RECORDED = (
    "nm_block_bf16",
    "nm_block_bf16_turned",
    "nm_block_bf16_sampled",
    "nm_block_int8",
    "nm_bitmap_bf16",
)
VALUE, READ, WRITTEN = 0, 1, 2  # of an operand, as in replay.c
sizes: dict[int, int] = {0: 0}  # bytes, by address
of_int8 = {8: 4, 9: 32}  # bytes of the operands of nm_block_int8 that are no tensors
lock = threading.Lock()  # threads write into one tensor


def address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    sizes[tensor.data_ptr()] = tensor.nbytes
    return tensor.data_ptr()


class Library:
    """A library whose recorded functions write what they are called with."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)
        return recorded(name, function) if name in RECORDED else function


def recorded(name: str, function: Any) -> Callable[..., int]:
    addresses = [kind is ctypes.c_void_p for kind in function.argtypes]

    def bytes_of(operands: tuple[int, ...]) -> list[bytes | None]:
        length = of_int8 if name == "nm_block_int8" else {}
        return [
            ctypes.string_at(o, length.get(i) or sizes[o]) if is_address and o else None
            for i, (o, is_address) in enumerate(zip(operands, addresses, strict=True))
        ]

    def call(*operands: int) -> int:
        with lock:
            before = bytes_of(operands)
            result: int = function(*operands)
            after = bytes_of(operands)
            record = struct.pack("<32sqq", name.encode(), len(operands), result)
            for operand, old, new in zip(operands, before, after, strict=True):
                if old is None or new is None:
                    record += struct.pack("<qq", VALUE, operand)
                elif old == new:
                    record += struct.pack("<qq", READ, len(old)) + old
                else:
                    record += struct.pack("<qq", WRITTEN, len(old)) + old + new
            with FOLDER.joinpath("calls").open("ab") as file:
                file.write(record)
        return result

    return call


def pytest_configure() -> None:
    FOLDER.joinpath("calls").write_bytes(b"")
    build()
    load = compiler.CFunctions.load
    compiler.CFunctions.load = lambda self: Library(load(self))  # type: ignore
    compiler._region = lambda: None  # type: ignore  # threads of Python call a function of Python
    blocks.address = address  # type: ignore
    matrix.Matrix.addresses = property(lambda self: [*map(address, self.parts)])  # type: ignore


def build() -> None:
    """The kernels as :mod:`nmrun.kernels.compiler` builds them for such a processor, but for programs
    without threads."""
    flags = [flag.replace("native", "sapphirerapids") for flag in compiler.FLAGS]
    flags[flags.index("-shared")] = "-c"
    alone = ("-D_Thread_local=", "-fno-stack-protector", "-fcf-protection=none")
    for name, kernels in (("bf16", blocks.KERNELS), ("int8", int8.KERNELS)):
        place = resources.files(kernels.package)
        source = FOLDER / f"{name}.c"
        source.write_text("".join(place.joinpath(f"{s}.c").read_text() for s in kernels.sources))
        renamed = f"-Dnm_tiles=nm_tiles_{name}"
        files = (str(source), "-o", str(FOLDER / f"{name}.o"))
        subprocess.run(["gcc", *flags, *kernels.flags, *alone, renamed, *files], check=True)
