"""The verbs as the command line has them, in this process."""

from __future__ import annotations

import sys

from nmrun.lab import cli


def verb(*words: str) -> int:
    """``nmrun`` with these words; returns the exit status."""
    before, sys.argv = sys.argv, ["nmrun", *words]
    try:
        return cli.main()
    finally:
        sys.argv = before
