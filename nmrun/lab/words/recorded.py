"""The record of a sweep that begins now, for as long as the sweep is at work."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nmrun.errors import leads
from nmrun.lab.runs import locks
from nmrun.lab.words import sweep
from nmrun.lab.words.precheck import Findings


@contextlib.contextmanager
def recorded(looks: list[Findings], command: str, together: list[list[str]]) -> Iterator[Path]:
    """A new record of a sweep, which is alive while the context is entered; that of a plan
    (``dry=true``) goes then.

    Args:
        looks: what was found at the overrides of each sweep.
        command: as it was typed.
        together: the overrides of each sweep, where they are launched together.

    Raises:
        ConfigError: where the folder cannot be made.
    """
    with tempfile.TemporaryDirectory() as nowhere:  # for the ranks that do not lead
        output_dir = looks[0].output_dir
        folder = sweep.new_folder(output_dir) if leads() else Path(nowhere)
        new = [place for place in folder.parents if not place.exists()]
        sweep.make_folder(folder, output_dir)
        try:
            with locks.hold(folder):  # shows that the sweep is alive
                jobs = sum(found.jobs for found in looks)
                sweep.begin(folder, jobs, command, output_dir, together)
                yield folder
        finally:
            if looks[0].dry or not (folder / sweep.HEAD).exists():  # nothing began on a full disk
                shutil.rmtree(folder, ignore_errors=True)
                for place in new:
                    with contextlib.suppress(OSError):  # others are at work there
                        place.rmdir()
