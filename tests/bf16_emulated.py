"""Products of bfloat16 on a processor without the instruction: its definition in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nmrun.fast.cpu.kernels import bf16, blocks

HAS_INSTRUCTION = not bf16.KERNELS.obstacle()


@contextmanager
def emulation() -> Iterator[None]:
    """``vdpbf16ps`` written out as two fused operations, with AVX-512 alone."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bf16, blocks):
            flags = (*module.KERNELS.flags, "-DEMULATED")
            patch.setattr(module, "KERNELS", replace(module.KERNELS, flags=flags))
        if bf16.KERNELS.obstacle():
            pytest.skip("neither bfloat16 products nor AVX-512 to emulate them")
        yield
