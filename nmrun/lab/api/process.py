"""What training sets for the whole process, given back when it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from nmrun.lab.train import checkpoint

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "WANDB_SILENT")


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Leave a process as it was: its random numbers, torch's threads, determinism and CUDA device,
    and environment variables.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    random, threads = checkpoint.random_state(), torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        checkpoint.restore_random_state(random)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if device is not None:
            torch.cuda.set_device(device)
