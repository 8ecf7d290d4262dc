"""Which cuSPARSELt is loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def loaded_cusparselt() -> tuple[tuple[int, ...], str] | None:
    """((major, minor, patch), path), asked of the very library that is mapped: a wheel's metadata
    may say otherwise. None without one.
    """
    try:
        found = re.search(r"/\S*libcusparseLt\S*", Path("/proc/self/maps").read_text())
        if found is None:
            return None
        library = ctypes.CDLL(found[0])
        numbers = []
        # of CUDA's enum libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        for which in range(3):
            number = ctypes.c_int()
            if library.cusparseLtGetProperty(which, ctypes.byref(number)) != 0:
                return None
            numbers.append(number.value)
    except (OSError, AttributeError):
        return None
    return tuple(numbers), found[0]
