"""Tensors in memory-mapped temporary files: the system writes their pages to the disk and takes them
out of memory where it needs the room, so a host can hold a model that is larger than its memory.

The files lie in the folder that ``TMPDIR`` names. They have no name from the start, so that nothing
is left of them, whatever ends the process.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nmrun import atomic

LEAST = 1 << 20  # bytes; a smaller tensor stays in memory


def mapped(tensor: Tensor) -> Tensor:
    """A copy in a temporary file of its own; a small one in memory.

    Args:
        tensor: any tensor, on any device.

    Raises:
        OSError: where the disk has no room for it.
    """
    whole = tensor.detach().to("cpu")
    if whole.nbytes < LEAST:
        return whole.clone()
    stored = whole.untyped_storage()
    with tempfile.NamedTemporaryFile() as file:
        with atomic.room_told(Path(file.name)):  # a page without room would end the process
            os.posix_fallocate(file.fileno(), 0, stored.nbytes())
        storage: Any = torch.UntypedStorage.from_file(
            file.name, shared=True, nbytes=stored.nbytes()
        )
    storage.copy_(stored)
    copy = torch.empty(0, dtype=whole.dtype)
    return copy.set_(storage, whole.storage_offset(), whole.size(), whole.stride())


class OnDisk(TorchDispatchMode):
    """While entered, every large CPU tensor that an operation makes is :func:`mapped`.

    Values and random numbers are those of torch, and in memory is one new tensor at a time.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # a view, or a tensor that was written in place, is not new
        new = isinstance(out, Tensor) and func._schema.returns[0].alias_info is None
        return mapped(out) if new and out.device.type == "cpu" and out.nbytes >= LEAST else out
