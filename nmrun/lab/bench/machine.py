"""On what a benchmark ran: what is needed to compare its numbers with others."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nmrun.fast.kernels.cusparselt_library import loaded_cusparselt

# of nvidia-smi's query
ON_GPU = {
    "power": "power.limit",
    "clock": "clocks.max.sm",
    "driver": "driver_version",
}
Machine = dict[str, Any]


def hardware(device: torch.device | str = "cpu") -> Machine:
    """Where the numbers come from, as plain data."""
    device, cpu = torch.device(device), platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    about: Machine = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if device.type == "cuda":
        library, gpu = loaded_cusparselt(), torch.cuda.get_device_properties(device)
        about |= {
            "gpu": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30),
            "cuda": torch.version.cuda,
            "cusparselt": ".".join(map(str, library[0])) if library else None,
            "triton": _version("triton"),
            **_asked_of_driver(gpu),
        }
    return about


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _asked_of_driver(gpu: Any) -> Machine:
    if not (tool := shutil.which("nvidia-smi")):
        return {}
    words = [
        tool,
        f"--query-gpu={','.join(ON_GPU.values())}",
        "--format=csv,noheader",
        f"--id=GPU-{gpu.uuid}",
    ]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(ON_GPU, (value.strip() for value in said.split(",")), strict=False))


def machine_line(machine: Machine) -> str:
    """One line of it for the reader."""
    if "gpu" in machine:
        more = ", ".join(str(machine[key]) for key in ("power", "clock") if key in machine)
        return f"{machine['gpu']} ({more}), torch {machine['torch']}, CUDA {machine['cuda']}, cuSPARSELt {machine['cusparselt']}"
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}, torch {machine['torch']}"
