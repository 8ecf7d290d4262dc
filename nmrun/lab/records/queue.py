"""What a cluster's queue says of the jobs of sweeps: Slurm's, by its commands."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time

PAUSE = 10.0  # seconds between two questions, since many ask a queue
_asked: tuple[float, frozenset[str] | None] = (-PAUSE, None)


def ids(anew: bool = False) -> frozenset[str] | None:
    """The ids of this user's jobs in the queue, waiting or running, as of the last ``PAUSE``
    seconds; of an array ``22_0``. None where Slurm does not answer."""
    global _asked
    if anew or time.monotonic() - _asked[0] >= PAUSE:
        text = _answer("squeue", "--me", "--array", "--noheader", "--format=%i")
        _asked = time.monotonic(), None if text is None else frozenset(text.split())
    return _asked[1]


def state(job: str) -> str:
    """What became of a job, such as ``CANCELLED`` or ``NODE_FAIL``, which Slurm knows for minutes."""
    text = _answer("scontrol", "--oneliner", "show", "job", job) or ""
    found = re.search(r"JobState=(\S+)", text)
    return found[1] if found else "gone"


def _answer(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    return None
