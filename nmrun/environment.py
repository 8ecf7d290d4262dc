"""Where and with what a result was made."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nmrun

LIBRARIES = ("torch", "torchvision", "hydra-core", "omegaconf", "numpy", "scikit-learn")


def describe(device: torch.device) -> dict[str, Any]:
    """Commit of the code (None outside a checkout) and whether it was changed, versions, device, command line."""
    versions = {name: metadata.version(name) for name in LIBRARIES}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "nmrun": nmrun.__version__,
        "python": platform.python_version(),
        **versions,
        "device": name,
        "threads": torch.get_num_threads(),
        "command": " ".join(["nmrun", *sys.argv[1:]]),
    }


def _git(*arguments: str) -> str | None:
    folder = Path(nmrun.__file__).parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
