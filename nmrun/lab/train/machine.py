"""What a run computes on and how exactly, and what its result says of machine, code and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.locks import free_gpu
from nmrun.lab.train.checkpoint import seed_everything


def prepare(config: Config) -> tuple[torch.device, str]:
    """Seed everything, and choose device and precision.

    Returns:
        The device, and ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: for a device that is not there.
    """
    trainer = config.trainer
    if trainer.threads is not None:
        torch.set_num_threads(trainer.threads)
    # The same bits again, where torch has a way to: always on a CPU (with the same number of
    # threads), mostly on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms does the same and imports the compiler
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over new tensors
    seed_everything(config.seed)
    device = device_of(trainer.device)
    return device, _precision(trainer.precision, device)


def device_of(asked: str) -> torch.device:
    """Choose the device, which is torch's current one from then on.

    Args:
        asked: ``auto``, ``cpu``, ``cuda`` or ``free``.
    """
    if asked in ("cuda", "free") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.device={asked}: torch sees no CUDA device here; auto takes what there is"
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number = free_gpu(torch.cuda.device_count()) if asked == "free" else ranks.local_rank()
    # clocks, and libraries that take the current device for the right one
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _precision(asked: str, device: torch.device) -> str:
    if asked != "auto":
        return asked
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


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
