"""The two ways a run can end badly. Neither shows a traceback: the message is for the person who
typed the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


class ConfigError(ValueError):
    """A mistake in what was asked for: exit status 2. A ValueError, for users of the library.
    Carries all problems found, one line each.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RunError(Exception):
    """Work that started and could not go on (a run whose loss is not finite, say): exit status 1."""


def leads() -> bool:
    """Whether this process speaks, of those that torchrun starts for one run; see nmrun.ranks."""
    return os.environ.get("RANK", "0") == "0"


def refuse(problems: Iterable[str], status: int = 2) -> int:
    """Say what is wrong, a line for each problem; returns the exit status."""
    tell(problems)
    return status


def tell(lines: Iterable[str]) -> None:
    """Print lines beside the results, for the person who typed the command."""
    for line in lines if leads() else []:
        print(f"nmrun: {line}", file=sys.stderr)
