"""A Triton kernel against its reference, once on every device: what is not right is not used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch


def agrees(kernel: str, device: torch.device, compare: Callable[[], bool], instead: str) -> bool:
    """Whether ``compare`` finds the kernel right. Where it does not, or raises whatever a compiler
    or a driver can say, the log says that ``instead`` is taken. Without Triton, False."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        right, trouble = compare(), "wrong numbers"
    except Exception as error:
        right, trouble = False, f"{type(error).__name__}: {error}"
    if not right:
        logging.getLogger(__name__).warning(
            "%s is not used on %s, %s is (%s)", kernel, device, instead, trouble
        )
    return right
