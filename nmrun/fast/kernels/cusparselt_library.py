"""Which cuSPARSELt is loaded, and calls of its C interface."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

OLDEST = (0, 6)  # its enumerations are those of nmrun.fast.kernels.cusparselt
OPAQUE = 11264  # bytes of a structure: 512 since 0.8, 11024 before
ALIGNMENT = 16


def loaded_cusparselt() -> tuple[tuple[int, ...], str] | None:
    """((major, minor, patch), path), asked of the very library that is mapped: a wheel's metadata
    may say otherwise. None without one.
    """
    try:
        found = re.search(r"/\S*libcusparseLt\S*", Path("/proc/self/maps").read_text())
        if found is None:
            return None
        asked = ctypes.CDLL(found[0])
        numbers = []
        # of CUDA's enum libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        for which in range(3):
            number = ctypes.c_int()
            if asked.cusparseLtGetProperty(which, ctypes.byref(number)) != 0:
                return None
            numbers.append(number.value)
    except (OSError, AttributeError):
        return None
    return tuple(numbers), found[0]


@cache
def library() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: where there is none, or an old one.
    """
    found = loaded_cusparselt()
    if found is None:
        raise RuntimeError("this torch has no cuSPARSELt")
    version, path = found
    if version < OLDEST:
        raise RuntimeError(
            f"cuSPARSELt {'.'.join(map(str, version))}: {'.'.join(map(str, OLDEST))} or later is needed"
        )
    loaded = ctypes.CDLL(path)
    loaded.cusparseLtGetErrorString.restype = ctypes.c_char_p
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Call a function.

    Args:
        name: without ``cusparseLt``.
        arguments: ctypes' values.

    Raises:
        RuntimeError: where it returns an error; with the library's words.
    """
    if status := getattr(library(), f"cusparseLt{name}")(*arguments):
        said = library().cusparseLtGetErrorString(status)
        raise RuntimeError(f"cuSPARSELt's {name}: {said.decode() if said else status}")


class Opaque(ctypes.c_void_p):
    """The address of a structure that only the library reads."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(OPAQUE + ALIGNMENT)
        super().__init__(-(-ctypes.addressof(self.memory) // ALIGNMENT) * ALIGNMENT)
