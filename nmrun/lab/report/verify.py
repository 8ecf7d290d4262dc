"""``nmrun table --verify``: whether the runs of a table are as they finished."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError, RunError
from nmrun.lab.runs.run_folder import REMEDY, RunFolder

if TYPE_CHECKING:
    import pandas as pd


def verify(runs: pd.DataFrame) -> None:
    """Compare the files of the finished runs with the hashes in their results.

    Runs that were finished before there were hashes pass, and are counted in a line on standard
    error.

    Raises:
        ConfigError: for runs in W&B, which have no files here.
        RunError: for files that are missing or were changed, all of them.
    """
    wrong, unsealed = [], 0
    for folder in map(Path, runs["folder"][runs["status"] == "finished"]):
        if not folder.is_dir():
            raise ConfigError(f"--verify: {folder} is no folder here, so there is nothing to check")
        there = RunFolder(folder)  # read anew
        broken = there.broken(contents=True)
        wrong += [f"{folder / name}: {problem}" for name, problem in broken.items()]
        unsealed += there.is_finished and not there.is_sealed
    if wrong:
        raise RunError(f"{'; '.join(wrong)}; {REMEDY}")
    if unsealed:
        told = "finished by an earlier nmrun, which kept no hashes; not verified"
        print(f"nmrun: runs {told}: {unsealed}", file=sys.stderr)
