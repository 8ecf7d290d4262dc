"""With which code, on which versions and on what a result was made."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nmrun import ranks

PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "hydra-core", "wandb")


def describe(device: torch.device) -> dict[str, Any]:
    """Plain data: ``commit`` and ``dirty`` (null outside a checkout), versions, ``device``,
    ``threads`` and ``ranks``, ``command``.
    """
    commit, dirty = _checkout()
    return {
        "commit": commit,
        "dirty": dirty,
        "nmrun": _version("nmrun"),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({_processor()})",
        "threads": torch.get_num_threads(),
        "ranks": ranks.world(),
        "command": shlex.join(["nmrun", *sys.argv[1:]]),
    }


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """The commit of the code, and whether files under version control differ from it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None, None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "--no-optional-locks", "-C", str(root), *words],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(changes)


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
