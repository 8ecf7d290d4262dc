"""Shared by all tests: no tracking to anywhere, few threads, everything written below a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models, and processes side by side
os.environ.pop("WANDB_API_KEY", None)


@pytest.fixture
def nmrun_cli(tmp_path: Path):
    """Run the command line in a process of its own, in an empty folder; returns the completed process."""

    def call(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nmrun.cli", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment},
        )  # fmt: skip

    return call
