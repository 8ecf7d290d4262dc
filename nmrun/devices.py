"""One run a GPU, whoever starts the runs: a lock file for each GPU of the machine, held as long as the process lives."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_held: dict[int, int] = {}  # GPU: the open lock file; a sweep's next run in the same process keeps it


def free_gpu(count: int, wait: float = 1.0) -> int:
    """The number of a GPU that no other process holds by this function, now this process's own. Looks again every ``wait`` seconds.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs, so locks go by what it lists.
    """
    if _held:
        return next(iter(_held))
    import fcntl

    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible if len(visible) == count else [str(number) for number in range(count)]
    while True:
        for number, name in enumerate(names):
            place = Path(tempfile.gettempdir(), f"nmrun-{os.getuid()}-gpu-{name.replace('/', '-')}.lock")
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            _held[number] = file
            return number
        time.sleep(wait)
