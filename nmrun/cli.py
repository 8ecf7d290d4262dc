"""The command line: ``nmrun [overrides]`` trains, ``nmrun -m ...`` sweeps, ``nmrun table`` and the other verbs work on run folders.

Imports no torch: what a typo, ``--help``, completion or a finished run needs is done in well under a second.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig

import nmrun
from nmrun import config_source, experiment, precheck, schema
from nmrun.checks import near
from nmrun.errors import ConfigError
from nmrun.identity import run_folder
from nmrun.metric import higher_is_better

VERBS = {
    "table": "nmrun.report.cli:table",
    "plot": "nmrun.report.cli:plot",
    "export": "nmrun.export.cli:main",
    "bench": "nmrun.bench:main",
    "search": "nmrun.sparsity.search:main",
    "prepare": "nmrun.data.prepare:main",
    "doctor": "nmrun.doctor:main",
}
# told to job processes: the sweep's folder, of how many jobs, and how many of them came before this Hydra sweep's
SWEEP, JOBS, BEFORE = "NMRUN_SWEEP", "NMRUN_JOBS", "NMRUN_BEFORE"

config_source.register()
# Hydra would put every job of a sweep together twice, first to see whether it can be; precheck has seen to that.
Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]


def main() -> int:
    """The console entry point; returns the exit status (see the README)."""
    # Idle OpenMP threads spin by default; where other processes want the cores too, that slows small models tenfold and more.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not _leads():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        return _main(sys.argv[1:])
    except ConfigError as error:
        return _refuse(error.problems)
    except KeyboardInterrupt:  # before or after training, which ends in order by itself
        return 128 + signal.SIGINT


def _main(argv: list[str]) -> int:
    if argv and argv[0] in VERBS:
        module, _, function = VERBS[argv[0]].partition(":")
        return int(getattr(importlib.import_module(module), function)(argv[1:]))
    if argv and "=" not in argv[0] and argv[0][:1] not in "-~+":
        raise ConfigError(
            f"{argv[0]}: no such verb{near(argv[0], VERBS)} (there are {', '.join(VERBS)}; a run takes group=option and key=value)"
        )
    if argv == ["--version"]:
        print(f"nmrun {nmrun.__version__}")
        return 0
    asked = precheck.options(argv)
    flags = [word for word in argv if word not in asked.overrides]
    if asked.help or asked.hydra_help or asked.shell_completion:
        _hydra(flags, asked.overrides)
        return 0
    sweeps = [precheck.own_recipe(words) for words in experiment.expand(asked.overrides, asked.multirun)]
    looks = [precheck.look(words, asked.multirun, asked.config_dir) for words in sweeps]
    if problems := list(dict.fromkeys(problem for found in looks for problem in found.problems)):
        raise ConfigError(problems)
    if asked.cfg or asked.info or not asked.multirun:
        _hydra(flags, sweeps[0])
        return 0 if asked.cfg or asked.info else _exit_status(_outcomes[-1])
    with tempfile.TemporaryDirectory() as nowhere:  # for the ranks that do not lead
        name, output_dir = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", looks[0].output_dir
        folder = Path(output_dir, ".sweeps", name).absolute() if _leads() else Path(nowhere)
        _make(folder, output_dir)
        counts = [found.jobs for found in looks]
        jobs = None if None in counts else sum(count or 0 for count in counts)
        os.environ[SWEEP], os.environ[JOBS] = str(folder), str(jobs or "?")
        status = 0
        try:
            for i, words in enumerate(sweeps):
                os.environ[BEFORE] = str(sum(count or 0 for count in counts[:i]))
                _hydra(flags, words)
        except (SystemExit, KeyboardInterrupt) as stop:  # an interrupted job ends the sweep
            status = int(stop.code or 0) if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        return max(status, _summary(folder, jobs)) if _leads() else status


def _hydra(flags: list[str], overrides: list[str]) -> None:
    sys.argv[1:] = [*flags, *overrides]  # Hydra wants its options first
    _job()


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts for one run; see nmrun.distributed


def _refuse(problems: list[str]) -> int:
    for problem in problems if _leads() else []:
        print(f"nmrun: {problem}", file=sys.stderr)
    return 2


# --- one job -----------------------------------------------------------------------------------------------------------------

_outcomes: list[dict[str, Any]] = []


@hydra.main(config_path="pkg://nmrun.conf", config_name="nmrun", version_base="1.3")
def _job(composed: DictConfig) -> float | None:
    job = HydraConfig.get()
    sweep = Path(os.environ[SWEEP]) if job.mode == RunMode.MULTIRUN else None
    overrides = [word.replace("\\:", ":") for word in job.overrides.task]  # Hydra escapes a ratio for itself
    if sweep:
        print(f"[{int(os.environ[BEFORE]) + job.job.num + 1}/{os.environ[JOBS]}] {' '.join(overrides)}", flush=True)
    outcome, values = _outcomes_of(composed, sweep.name if sweep else None)
    _outcomes.append(outcome)
    if sweep and _leads():  # a file, since jobs may run in other processes
        line = {key: outcome.get(key) for key in ("status", "folder", "error", "metrics")} | {"overrides": overrides}
        with (sweep / "jobs.jsonl").open("a") as record:
            record.write(json.dumps(line) + "\n")
        if outcome["status"] == "interrupted":
            raise SystemExit(_exit_status(outcome))
    return sum(values) / len(values) if values else None


def _outcomes_of(composed: DictConfig, sweep: str | None) -> tuple[dict[str, Any], list[float]]:
    """A job is one run, or one for each of ``seeds``: the outcome that matters most, and what a Hydra sweeper minimises, by seed."""
    seeds = composed.get("seeds")
    found = []
    for seed in [composed.seed] if seeds is None else seeds:
        composed.seed = seed
        found.append(_outcome(composed, sweep))
        if found[-1]["status"] == "interrupted":
            break
    finals = [(one.get("metrics", {}).get("final", {}), f"eval/{one.get('metric')}") for one in found]
    values = [
        -float(final[metric]) if higher_is_better(metric) else float(final[metric])
        for final, metric in finals
        if metric in final
    ]
    return max(found, key=_exit_status), values if len(values) == len(found) else []


def _outcome(composed: DictConfig, sweep: str | None) -> dict[str, Any]:
    try:
        config = schema.check(composed)
        folder = run_folder(config)
        if not config.force and not config.dry and (result := _finished(folder)):
            metrics = "  ".join(f"{key} {value:.4g}" for key, value in result["metrics"]["final"].items())
            print(f"finished already: {metrics}\n  {folder} (force=true runs it again)", flush=True)
            return {**result, "status": "skipped", "folder": str(folder)}
        if not config.dry:
            _make(folder, config.output_dir)  # before torch is imported for nothing
        from nmrun import runner

        return runner.run(config, folder, sweep)
    except ConfigError as error:
        _refuse(error.problems)
        return {"status": "refused", "folder": None, "error": "; ".join(error.problems)}


def _make(folder: Path, output_dir: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={output_dir}: {error.strerror}: {error.filename}") from None


def _finished(folder: Path) -> dict[str, Any] | None:
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "finished" else None


def _exit_status(outcome: dict[str, Any]) -> int:
    if outcome["status"] == "interrupted":
        return 128 + int(outcome["signal"])
    return {"finished": 0, "skipped": 0, "planned": 0, "refused": 2}.get(outcome["status"], 1)


def _summary(folder: Path, jobs: int | None) -> int:
    """The closing lines of a sweep; 1 if a job failed or never reported. ``jobs``: how many there should be, if that is known."""
    try:
        done = [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]
    except OSError:
        done = []
    count = {status: sum(d["status"] == status for d in done) for status in ("finished", "skipped", "planned")}
    bad = [d for d in done if d["status"] not in count]
    missing = max((jobs or 0) - len(done), 0)
    parts = [f"{number} {status}" for status, number in count.items() if number]
    parts += [f"{len(bad)} not done"] if bad else []
    parts += [f"{missing} not reached"] if missing else []
    print(f"sweep of {len(done) + missing}: {', '.join(parts) or 'nothing done'}")
    for d in bad:
        print(f"  {d['status']}: {' '.join(d['overrides'])}: {d['error'] or ''}  {d['folder'] or ''}".rstrip(" :"))
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
