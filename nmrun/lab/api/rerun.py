"""``nmrun rerun RUN [key=value ...]``: the command of a run once more, with changes. RUN is a folder,
or a line of a CSV file of runs: ``docs/results/images.csv:17``."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from nmrun.errors import ConfigError, RunError, tell
from nmrun.lab.arguments import Parser
from nmrun.lab.config import command_line
from nmrun.lab.config.composition import config_of
from nmrun.lab.config.identity import OF_COMMAND, identity
from nmrun.lab.keys import options as options_of
from nmrun.lab.records import settings, status
from nmrun.lab.runs.run_folder import CONFIG, RESULT, RunFolder
from nmrun.patterns import RATIO_KEYS
from nmrun.ranges import START, WEIGHTS, value_text

# signs of more than a plain value: a class or function, an interpolation, a package
MARKS = ("target", "dataset.metric", "${", "@")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="nmrun rerun", description="Give a run's command once more, with changes.")
    parser.add_argument(
        "run", metavar="RUN", help="a run folder, or a line of a CSV file of runs: FILE.csv:17"
    )
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="overrides, such as seed=1; without one that matters, force=true repeats a finished run",
    )
    parser.add_argument("--yes", action="store_true", help="run also code that the folder names")
    options = parser.parse_intermixed_args(argv)
    # these two say how the run was begun, not what it is
    changed = {"force", "resume", *map(command_line.key, options.changes)}
    if re.search(r"\.csv(:|$)", options.run):
        place, words = "", _of_line(options.run, changed)
    else:
        place, words = _of_folder(Path(options.run))
    original = [word for word in words if command_line.key(word) not in changed]
    words = [*original, *options.changes]
    print(status.typed((place, shlex.join(["nmrun", *words]))), flush=True)
    if (code := list(filter(_is_code, original))) and not options.yes:
        raise ConfigError(
            f"{', '.join(code)} of {options.run} may run any code; --yes says that you trust it"
        )
    os.chdir(place or ".")
    if words[:1] == ["prune"]:
        from nmrun.lab import pruning

        return pruning.main([*words[1:], "--yes"] if options.yes else words[1:])
    from nmrun.lab.sweeps import jobs

    return jobs.main(words)


def _is_code(word: str) -> bool:
    """Whether any code may run by a word of a folder's command: an option, Hydra's own keys, an
    experiment's file, and what is no plain override."""
    if word.startswith("-") or command_line.is_hydras(word):
        return True
    return command_line.key(word) == "experiment" or any(mark in word for mark in MARKS)


def _of_folder(folder: Path) -> tuple[str, list[str]]:
    """Where a folder's command was given, and its words after ``nmrun``."""
    run = RunFolder(folder)
    if run.problem:
        raise RunError(f"{run.path / RESULT}: {run.problem}")
    settings.of(run)
    if run.is_finished:
        run.checked(CONFIG)  # the command stands above it
    place, command = status.command(run) or ("", "")
    with contextlib.suppress(ValueError):  # for one that no shell could read
        program, *words = shlex.split(command)
        if program == "nmrun":
            return place, words
    raise ConfigError(f"{folder}: its command cannot be given here: {command}")


def _of_line(name: str, changed: Collection[str]) -> list[str]:
    """The overrides that make the run of a line of a CSV file, without those at their default.

    ConfigError where the file has not all settings, and where a run needs the weights of another
    one, but for those of a key in ``changed``. Where another id comes about, a line says so.
    """
    from nmrun.lab.compare.runs import from_csv

    runs = {run["folder"]: run for run in from_csv(name.rpartition(".csv")[0] + ".csv")}
    if (line := runs.get(name)) is None:
        known = f"; the first is {min(runs, key=len)}" if runs else ""
        raise ConfigError(f"{name}: no run is in that line{known}")
    run = {key: value for key, value in line.items() if value == value}  # else it is NaN: empty
    if "trainer.batch_size" not in run:
        raise ConfigError(f"{name}: the file has not all settings of a run; its page has a command")
    chosen = [group for group in options_of.GROUPS if group in run]
    words, of_others = {group: f"{group}={run[group]}" for group in chosen}, False
    for group in dict.fromkeys(("", *chosen, "trainer")):
        for key, field in options_of.keys(group, str(run.get(group))).items():
            full = f"{group}.{key}".lstrip(".")
            if full not in run or full in (*RATIO_KEYS, *OF_COMMAND):
                continue
            text = value_text(run[full])
            if field.check is WEIGHTS and text not in ("null", START):
                of_others = True
                if full not in changed:
                    raise ConfigError(
                        f"{name}: {full}={text} is another run: say where its weights are, "
                        f"as in {full}=FOLDER"
                    )
            elif text != value_text(field.default):
                value = ast.literal_eval(text) if text[:1] in ("[", "{") else run[full]
                words[full] = command_line.word(full, value)
    asked = [*words.values()]
    if of_others or (ours := identity(config_of(asked))) == run.get("id"):
        return asked
    # results of versions before 0.1.0 name the layers that model.exclude=auto found
    by_default = [word for key, word in words.items() if key != "model.exclude"]
    if identity(config_of(by_default)) == run.get("id"):
        return by_default
    tell([f"{name}: its id is {run.get('id')} there and {ours} here"])
    return asked
