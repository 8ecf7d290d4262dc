"""The command line: ``nmrun [overrides]`` trains, ``nmrun -m ...`` sweeps, ``nmrun table`` and the
other verbs work on run folders.

Imports no torch, and Hydra only where something is composed: what a typo, ``--help``, completion or
a finished run needs is done in well under a second.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence

import nmrun
from nmrun import atomic
from nmrun.errors import ConfigError, RunError, leads, refuse
from nmrun.lab import arguments, output
from nmrun.lab.signals import of_interrupt
from nmrun.registry import find, installed

VERBS = {
    "table": "nmrun.lab.render.cli.table",
    "plot": "nmrun.lab.render.cli.plot",
    "report": "nmrun.lab.render.cli.report",
    "export": "nmrun.lab.export.cli.export",
    "sample": "nmrun.lab.export.cli.sample",
    "predict": "nmrun.lab.export.cli.predict",
    "bench": "nmrun.lab.bench.main",
    "prune": "nmrun.lab.pruning.main",
    "tune": "nmrun.lab.tune.main",
    "status": "nmrun.lab.records.status.main",
    "compare": "nmrun.lab.records.settings.main",
    "rerun": "nmrun.lab.api.rerun.main",
    "doctor": "nmrun.lab.bench.doctor.main",
    "help": "nmrun.lab.cli.explain",
}


def main() -> int:
    """The console entry point; returns the exit status (see docs/command-line.md)."""
    # Idle OpenMP threads spin by default; where other processes want the cores too, that slows
    # small models tenfold and more. What `bench infer` measures is for processes of others.
    if sys.argv[1:3] != ["bench", "infer"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  # closed, by <&-
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # closed, by 2>&-
    if not leads() or sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name, for which torch asks
        os.environ["LOGNAME"] = f"uid{os.getuid()}"
    try:
        with output.ends_quietly(), _cache():
            try:
                status = _main(sys.argv[1:])
                sys.stdout.flush()  # which may find the disk full
                return status
            except ConfigError as error:
                return refuse(error.problems)
            except RunError as error:
                return refuse([" ".join(str(error).split())], 1)
            except OSError as error:
                is_full = error.errno in atomic.FULL
                if error.filename is None and not is_full:
                    raise
                line = f"{error.filename or 'output'}: {error.strerror}"
                return refuse([line], 1 if is_full else 2)
    except (KeyboardInterrupt, Exception) as error:
        if not of_interrupt(error):
            raise
        return 128 + signal.SIGINT  # before or after training, which ends in order by itself


@contextlib.contextmanager
def _cache() -> Iterator[None]:
    """Without a home that can be written, give W&B a cache while entered; else it prints twenty
    lines."""
    with contextlib.ExitStack() as stack:
        home = os.environ.get("HOME", "")
        if "XDG_CACHE_HOME" not in os.environ and not os.access(home, os.W_OK):
            with contextlib.suppress(OSError):  # there may be no place at all
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nmrun-cache-"))
                os.environ["XDG_CACHE_HOME"] = folder
                stack.callback(os.environ.pop, "XDG_CACHE_HOME")
        yield


def _main(argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to another") from None
    if "query=" in "".join(argv[1:2]) and argv[0] in ("-sc", "--shell-completion"):
        words = os.environ.get("COMP_LINE", "").split(" ")
        if len(words) > 2 and words[1] in all_verbs():  # what follows it is no override
            return 0
        if len(words) == 2 and "=" not in words[1]:
            print(" ".join(verb for verb in all_verbs() if verb.startswith(words[1])))
    if argv and argv[0] and "=" not in argv[0] and argv[0][0] not in "-~+":
        return _run(argv[0], argv[1:])
    if "--help" in argv or "-h" in argv:
        words = [word for word in argv if word not in ("--help", "-h")]
        place = _help_parser().parse_known_args(words)[0].config_dir
        return explain([] if place is None else ["--config-dir", place])
    if "--version" in argv:  # Hydra's own --version prints Hydra's version
        print(f"nmrun {nmrun.__version__}")
        return 0
    output.waiting("checking the settings")
    from nmrun.lab.config import composition
    from nmrun.lab.sweeps import jobs

    options = composition.options(argv)
    if options.help:  # abbreviated
        return explain([])
    for word in options.overrides:
        if "=" not in word and word in all_verbs():
            others = [each for each in argv if each != word]
            raise ConfigError(f"a verb comes first: {shlex.join(['nmrun', word, *others])}")
    return jobs.main(argv)


def all_verbs() -> dict[str, str]:
    """The dotted path of each verb, those of installed packages too: of papers here, for one."""
    theirs = {
        name: point.value.replace(":", ".") for name, point in installed("nmrun.verbs").items()
    }
    return VERBS | theirs | VERBS


def _run(verb: str, words: Sequence[str]) -> int:
    verbs = VERBS if verb in VERBS else all_verbs()
    if verb not in verbs:
        from nmrun.lab.config import suggestions

        raise ConfigError(suggestions.no_verb(verb, words, verbs))
    return int(find("verb", verb, verbs)(words))


def explain(argv: list[str]) -> int:
    options, verbs = _help_parser().parse_intermixed_args(argv), all_verbs()
    for topic in options.topic or [None]:
        if topic in verbs:
            with contextlib.suppress(SystemExit):
                _run(topic, ["--help"])
            continue
        from nmrun.lab.config import reference

        if topic is None:
            print(reference.overview(options.config_dir))
        else:
            print(reference.about(topic, options.config_dir, verbs))
    return 0


def _help_parser() -> arguments.Parser:
    parser = arguments.Parser(
        prog="nmrun help", description="What a word of the command line means."
    )
    parser.add_argument(
        "topic",
        nargs="*",
        help="a key (trainer.epochs), a group (trainer, recipe), one of its options (recipe=step, step), "
        "an experiment or a verb; "
        "without it, what nmrun --help says",
    )
    parser.add_argument("--config-dir", "-cd", help="a folder of more configs")
    return parser
