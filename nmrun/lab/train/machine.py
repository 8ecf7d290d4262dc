"""What a run computes on, and how exactly; the same bits again where torch has a way to."""

from __future__ import annotations

import os

import torch

from nmrun import ranks
from nmrun.errors import ConfigError
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.locks import free_gpu
from nmrun.lab.train.checkpoint import seed_everything


def prepare(config: Config) -> tuple[torch.device, str]:
    """Seed everything, and choose device and precision.

    Args:
        config: of the run.

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
