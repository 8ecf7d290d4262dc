"""The verbs as the command line has them, in this process, and Python in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nmrun.lab import cli


def verb(*words: str) -> int:
    """``nmrun`` with these words; returns the exit status."""
    before, sys.argv = sys.argv, ["nmrun", *words]
    try:
        return cli.main()
    finally:
        sys.argv = before


def python(
    *words: str, cwd: Path | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python`` with these words, in a process of its own."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, timeout=timeout, capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
