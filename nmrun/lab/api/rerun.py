"""``nmrun rerun RUN [key=value ...]``: the command of a run once more, with changes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError, raise_all, refused
from nmrun.lab.consent import confirmed
from nmrun.lab.folders import settings, status
from nmrun.lab.runs.run_folder import CONFIG, RESULT, RunFolder
from nmrun.lab.verbs import Parser
from nmrun.lab.words import command_line

# signs of more than a plain value: a class or function, an interpolation, a package
MARKS = ("target", "dataset.metric", "${", "@")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="nmrun rerun", description="Give a run's command once more, with changes.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="overrides, such as seed=1; without one that matters, force=true repeats a finished run",
    )
    parser.add_argument(
        "--yes", action="store_true", help="run also code that the folder names, without a question"
    )
    options = parser.parse_intermixed_args(argv)
    overrides, problems = command_line.parsed(options.changes)
    problems += [
        f"{override.input_line}: several values make a sweep, and this is one run"
        for override in overrides
        if override.is_sweep_override()
    ]
    raise_all(problems)
    options.run = settings.only_run(options.run)
    run = RunFolder(options.run)
    if run.problem:
        raise RunError(f"{run.path / RESULT}: {run.problem}")
    settings.read(options.run)
    if run.is_finished:
        run.checked(CONFIG)  # the command stands above it
    known = status.command(run)
    if known is None:
        raise ConfigError(f"{options.run}: its command is not known")
    place, command = known
    words = _words(command, options.run)
    # these two say how the run was begun, not what it is
    changed = {"force", "resume", *map(command_line.key, options.changes)}
    original = [word for word in words if command_line.key(word) not in changed]
    words = [*original, *options.changes]
    print(status.typed((place, shlex.join(["nmrun", *words]))), flush=True)
    if (code := _code(original, options.run)) and not options.yes:
        question = f"{', '.join(code)} of {options.run} may run any code. Run it?"
        if not confirmed("rerun", question):
            print("nothing done")
            return 0
    os.chdir(place or ".")
    if words[:1] == ["prune"]:
        from nmrun.lab.pruning import prune

        return prune.main([*words[1:], "--yes"] if options.yes else words[1:])
    from nmrun.lab.sweeps import jobs

    return jobs.main(words)


def _words(command: str, run: Path) -> list[str]:
    """The words after ``nmrun``."""
    with refused(f"{run}: its command cannot be read: {command}: ", ValueError):
        words = shlex.split(command)
    if words[:1] != ["nmrun"]:
        raise ConfigError(f"{run}: its command cannot be given here: {command}")
    return words[1:]


def _code(words: Sequence[str], run: Path) -> list[str]:
    """Those words of a folder's command by which any code may run: options, an experiment's file,
    and what is no plain override. ConfigError for keys of Hydra, which no run needs."""
    for word in filter(command_line.is_hydras, words):
        raise ConfigError(
            f"{run}: its command has {word}, and Hydra's keys can run any code; type it yourself"
        )
    return [
        word
        for word in words
        if word.startswith("-")
        or command_line.key(word) == "experiment"
        or any(mark in word for mark in MARKS)
    ]
