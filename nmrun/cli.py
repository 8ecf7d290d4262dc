"""The command line: ``nmrun [overrides]`` trains, ``nmrun -m ...`` sweeps, ``nmrun table`` and the
other verbs work on run folders.

Imports no torch, and Hydra only where something is composed: what a typo, ``--help``, completion or
a finished run needs is done in well under a second.
"""

from __future__ import annotations

import getpass
import os
import signal
import sys

import nmrun
from nmrun import verbs
from nmrun.errors import ConfigError, RunError, leads, refuse
from nmrun.registry import did_you_mean, find

VERBS = {
    "table": "nmrun.report.cli.table",
    "plot": "nmrun.report.cli.plot",
    "report": "nmrun.report.cli.report",
    "export": "nmrun.export.cli.main",
    "bench": "nmrun.bench.main",
    "search": "nmrun.train.ratio_search.main",
    "prepare": "nmrun.data.cli.prepare",
    "status": "nmrun.report.status.main",
    "doctor": "nmrun.bench.doctor.main",
}


def main() -> int:
    """The console entry point; returns the exit status (see docs/command-line.md)."""
    # Idle OpenMP threads spin by default; where other processes want the cores too, that slows
    # small models tenfold and more.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # closed, by 2>&-
    if not leads() or sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name, for which torch asks
        os.environ["LOGNAME"] = f"uid{os.getuid()}"
    try:
        with verbs.ends_quietly():
            try:
                return _main(sys.argv[1:])
            except ConfigError as error:
                return refuse(error.problems)
            except RunError as error:
                return refuse([" ".join(str(error).split())], 1)
    except KeyboardInterrupt:  # before or after training, which ends in order by itself
        return 128 + signal.SIGINT


def _main(argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to another") from None
    if argv and argv[0] in VERBS:
        return int(find("verb", argv[0], VERBS)(argv[1:]))
    if argv and "=" not in argv[0] and argv[0][:1] not in "-~+":
        hint = did_you_mean(argv[0], VERBS)
        known = f"{', '.join(VERBS)}; a run takes group=option and key=value"
        raise ConfigError(f"{argv[0]}: no such verb{hint} (there are {known})")
    if argv == ["--version"]:
        print(f"nmrun {nmrun.__version__}")
        return 0
    if argv in (["--help"], ["-h"]):  # with other words beside it, Hydra says it
        from nmrun.config import help

        print(help.text())
        return 0
    from nmrun.train import jobs

    return jobs.main(argv)


if __name__ == "__main__":
    sys.exit(main())
