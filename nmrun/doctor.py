"""``nmrun doctor``: what this machine offers, in a few lines."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Print versions, devices, compiler, data folder and W&B mode; returns the exit status, 1 if something needed is missing."""
    argparse.ArgumentParser(prog="nmrun doctor", description="What this machine offers to nmrun.").parse_args(argv)
    import torch

    import nmrun
    from nmrun.kernels.cpu import find_compiler, load
    from nmrun.patterns import Pattern
    from nmrun.track import logged_in

    compiler = find_compiler()
    built = load(Pattern(2, 4)) is not None
    projection = f"compiled with {compiler}" if built else "plain torch (no working C compiler): slower, same results"
    gpu = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none"
    data = Path(os.environ.get("NMRUN_DATA", "~/.cache/nmrun")).expanduser()
    wandb = os.environ.get("WANDB_MODE") or ("online, logged in" if logged_in() else "offline, not logged in")
    fairseq = "installed" if importlib.util.find_spec("fairseq") else "not installed (pip install 'nmrun[translation]')"
    writable = os.access(".", os.W_OK)
    for name, value in {
        "nmrun": nmrun.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "GPU": gpu,
        "CPU projection": projection,
        "data folder": f"{data}" + ("" if data.exists() else " (does not exist yet)"),
        "W&B": wandb,
        "fairseq": fairseq,
        "this folder": "writable" if writable else "not writable: give output_dir=...",
    }.items():
        print(f"{name:<15} {value}")
    return 0 if writable else 1
