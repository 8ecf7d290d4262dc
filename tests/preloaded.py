"""The command line and torchrun in processes that are forked from one which has imported torch
already, since that import takes longer than most of what these tests let a command do.

What a command imports itself, and when, is tested where it is started by Python's own start.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmrun.lab import cli

# Python 3.11 starts the server without the path of this process, so this module is none of them.
MODULES = [
    "hydra.main",
    "nmrun.lab.cli",
    "nmrun.lab.tasks.vision.images",
    "nmrun.lab.models.images",
    "nmrun.lab.compare.tables",
    "nmrun.lab.sweeps.jobs",
    "nmrun.lab.train.loop",
    "nmrun.lab.train.runner",
    "nmrun.lab.train.fsdp",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.launcher.api",
]


def context() -> ForkServerContext:
    """Where processes are forked from the one that has imported :data:`MODULES`: there is one
    server, and whoever starts it first says what it imports.
    """
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(MODULES)
    return forkserver


def run(
    words: tuple[str, ...], folder: Path, timeout: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """``nmrun`` with these words; killed after ``timeout`` seconds, which raises TimeoutExpired."""
    return _process(_command, words, folder, timeout, environment)


def started(words: tuple[str, ...], folder: Path) -> BaseProcess:
    """``nmrun`` with these words, at work; what it prints goes nowhere."""
    nowhere = [Path(os.devnull)] * 2
    words_and_place = (_command, words, folder, nowhere, dict(os.environ))
    process = context().Process(target=_begin, args=words_and_place)
    process.start()
    return process


def torchrun(*words: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun --standalone`` with so many processes, a script and its words."""
    work = partial(_torchrun, processes)
    return _process(work, tuple(map(str, words)), Path.cwd(), 600, dict(os.environ))


def _process(
    work: Callable[[tuple[str, ...]], object],
    words: tuple[str, ...],
    folder: Path,
    timeout: float,
    environment: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as outside:
        files = [Path(outside, name) for name in ("stdout", "stderr")]
        process = context().Process(target=_begin, args=(work, words, folder, files, environment))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout)
        streams = [file.read_text() for file in files]
        return subprocess.CompletedProcess(words, process.exitcode, *streams)


def _begin(
    work: Callable[[tuple[str, ...]], object],
    words: tuple[str, ...],
    folder: Path,
    files: list[Path],
    environment: dict[str, str],
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # processes that read data start as anywhere: from this process's own server each would import
    # torch again, and a kill of this process would leave them
    multiprocessing.set_start_method(None, force=True)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    # as of python -m: the current folder, and what the environment names
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        work(words)
    finally:
        atexit._run_exitfuncs()


def _command(words: tuple[str, ...]) -> None:
    sys.argv = ["nmrun", *words]
    sys.exit(cli.main())


def _torchrun(processes: int, words: tuple[str, ...]) -> None:
    alone = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(alone, _script)(*words)
    except ChildFailedError:
        sys.exit(1)


def _script(*words: str) -> None:
    sys.argv = list(words)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()  # as Python does; who has forked it would keep it
        raise
    finally:
        atexit._run_exitfuncs()
