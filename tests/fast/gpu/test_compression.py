"""2:4 weights in cuSPARSELt's compressed form, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compression_interpreted import as_stored, pairs
from torch import Tensor

from nmrun.fast.gpu.kernels import cusparselt


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    file = Path(__file__).parents[2] / "compression_interpreted.py"
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "[100%]" in process.stdout


def test_without_our_kernel_the_library_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def compress(weight: Tensor) -> Tensor:
        assert weight.is_contiguous()
        assert not bool((weight.float().signbit() & (weight == 0)).any())
        asked.append(weight)
        return weight[:, ::2].contiguous()

    monkeypatch.setattr(torch, "_cslt_compress", compress, raising=False)
    weight = torch.where(pairs(32, 64) == 0, -0.0, 1.5)
    blob = cusparselt.compressed(weight, torch.bfloat16)
    assert blob.dtype == torch.bfloat16
    again = cusparselt.compressed(as_stored(2 * weight, True), torch.bfloat16, out=blob)
    assert again is blob
    assert torch.equal(blob, 2 * weight.bfloat16()[:, ::2])
    assert len(asked) == 2
    half = torch.where(pairs(32, 64) == 0, 0.0, 1.5).half()
    blob = cusparselt.compressed(half, torch.bfloat16)
    assert torch.equal(blob, half.bfloat16()[:, ::2])  # numbers, not their bits
