"""``nmrun rerun RUN [key=value ...]``: the command of a run once more, with changes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError
from nmrun.lab.report import settings, status
from nmrun.lab.runs.run_folder import RESULT, RunFolder
from nmrun.lab.verbs import Parser
from nmrun.lab.words import zipped


def main(argv: Sequence[str]) -> int:
    """Print the command and do it; returns its exit status."""
    parser = Parser(prog="nmrun rerun", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides, such as seed=1; without one that matters, force=true repeats a finished run",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_intermixed_args(argv)
    there = RunFolder(options.run)
    if there.problem:
        raise RunError(f"{there.path / RESULT}: {there.problem}")
    settings.of(options.run)
    command = status.command(there)
    if command is None:
        raise ConfigError(f"{options.run}: its command is not known")
    words = shlex.split(command)
    if words[0] == "cd":  # a folder, && and the command
        os.chdir(words[1])
        words = words[3:]
    changed = {zipped.key(word) for word in options.changes}
    kept = [word for word in words[1:] if zipped.key(word) not in changed]
    words = [*kept, *options.changes]
    print(shlex.join(["nmrun", *words]), flush=True)
    if words[:1] == ["prune"]:
        from nmrun.lab.train import pruning

        return pruning.main(words[1:])
    from nmrun.lab.train import jobs

    return jobs.main(words)
