"""``nmrun rerun RUN [key=value ...]``: the command of a run once more, with changes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError
from nmrun.lab.report import settings, status
from nmrun.lab.runs.run_folder import RESULT, RunFolder
from nmrun.lab.verbs import Parser
from nmrun.lab.words import zipped

# words of a command that import code of the user's own
CODE = re.compile(r"_target_=|^--config-dir|^-cd")


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
    parser.add_argument(
        "--yes", action="store_true", help="run also code that the folder names, without a question"
    )
    options = parser.parse_intermixed_args(argv)
    there = RunFolder(options.run)
    if there.problem:
        raise RunError(f"{there.path / RESULT}: {there.problem}")
    settings.of(options.run)
    command = status.command(there)
    if command is None:
        raise ConfigError(f"{options.run}: its command is not known")
    words, place = shlex.split(command), None
    if words[0] == "cd":  # a folder, && and the command
        place, words = words[1], words[3:]
    refuse_code(words, options.run)
    changed = {zipped.key(word) for word in options.changes}
    kept = [word for word in words[1:] if zipped.key(word) not in changed]
    words = [*kept, *options.changes]
    elsewhere = place is not None and Path(place).resolve() != Path.cwd()
    print(
        (f"cd {shlex.quote(str(place))} && " if elsewhere else "") + shlex.join(["nmrun", *words]),
        flush=True,
    )
    if any(CODE.search(word) for word in words) and not options.yes:
        ask()
    if elsewhere:
        os.chdir(str(place))
    if words[:1] == ["prune"]:
        from nmrun.lab.train import pruning

        return pruning.main(words[1:])
    from nmrun.lab.train import jobs

    return jobs.main(words)


def refuse_code(words: Sequence[str], run: Path) -> None:
    """Raise ConfigError for a setting of Hydra that can run any code, but for its launchers."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key.startswith("hydra") and not key.startswith(("hydra/launcher", "hydra.launcher.")):
            raise ConfigError(
                f"{run}: its command has {word}, which can run any code; type it yourself"
            )


def ask() -> None:
    """Ask whether to run code that the folder names; raise ConfigError without a yes."""
    said = "the folder's command names code that it imports"
    if not sys.stdin.isatty():
        raise ConfigError(f"{said}: add --yes if the folder is yours, or from whom you trust")
    if input(f"{said}. Run it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("not run")
