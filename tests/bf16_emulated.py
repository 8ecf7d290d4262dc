"""Products of bfloat16 on a processor without the instruction: its definition in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nmrun.fast.cpu.kernels import bf16

HAS_THEM = not bf16.obstacle()


@contextmanager
def emulation() -> Iterator[None]:
    """``vdpbf16ps`` written out as two fused operations, with AVX-512 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16, "FLAGS", (*bf16.FLAGS, "-DEMULATED"))
        bf16._library.cache_clear()
        try:
            if bf16.obstacle():
                pytest.skip("neither bfloat16 products nor AVX-512 to emulate them")
            yield
        finally:
            bf16._library.cache_clear()
