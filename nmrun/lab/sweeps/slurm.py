"""Submitit's launcher for Slurm, with the jobs of the sweep in its record: which job of the queue has
which settings, and what became of each. So a sweep may end before its jobs do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import submitit
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from submitit.core.utils import FailedJobError

from nmrun.errors import RunError, first_line
from nmrun.lab.output import quantity
from nmrun.lab.records import sweep

MOST = 1000  # jobs of an array; Slurm's own limit is 1,001
PAUSE = 1.0  # seconds between two looks at the record


class QueueLauncher(SlurmLauncher):
    """Submits jobs, and waits until each has ended or has left the queue; with ``detach`` it does
    not. ``folders`` has the run folder of each job, by its words. Both are the class's, since Hydra
    makes the launcher.
    """

    detach: ClassVar[bool] = False
    folders: ClassVar[Mapping[tuple[str, ...], str]] = {}

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        folder = Path(os.environ[sweep.SWEEP])
        jobs = list(enumerate(map(list, job_overrides), initial_job_idx))
        for first in range(0, len(jobs), MOST):
            part = jobs[first : first + MOST]
            for (number, words), id in zip(part, self._submit(part), strict=True):
                run = self.folders.get(tuple(words), "")
                sweep.submits(folder, number + 1, words, run, id)
        sweep.queue_ids(anew=True)  # now with these
        if not self.detach:
            _wait(folder)
        return []

    def _submit(self, jobs: Sequence[tuple[int, list[str]]]) -> list[str]:
        """Put jobs into the queue as one array; returns their ids. RunError where it refuses them."""
        given = {key: value for key, value in self.params.items() if value is not None}
        executor = submitit.AutoExecutor(
            folder=given.pop("submitit_folder"),
            cluster="slurm",
            slurm_max_num_timeout=given.pop("max_num_timeout"),
        )
        common = BaseQueueConf.__dataclass_fields__
        executor.update_parameters(
            **{key if key in common else f"slurm_{key}": value for key, value in given.items()}
        )
        arguments = [
            (words, "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state())
            for number, words in jobs
        ]
        try:
            submitted = executor.map_array(self, *zip(*arguments, strict=True))
        except FailedJobError as error:
            some = quantity(len(jobs), "job")
            raise RunError(f"{some} not submitted: {first_line(error)}") from None
        return [job.job_id for job in submitted]

    def __call__(self, *job: Any, **more: Any) -> JobReturn:
        """Run a job, on its node."""
        signal.signal(signal.SIGTERM, _end_if_cancelled)
        returned: JobReturn = super().__call__(*job, **more)
        return returned


def _end_if_cancelled(number: int, frame: FrameType | None) -> None:
    """End a job that Slurm is ending. It sends SIGTERM also as the notice of a preemption, which
    leaves time: of that job it says RUNNING, and submitit queues it again at another signal."""
    if sweep.queue_state(os.environ["SLURM_JOB_ID"]) == "COMPLETING":
        raise SystemExit(128 + number)


def _wait(folder: Path) -> None:
    """Wait for the jobs of a sweep, and note those that have left the queue without a word."""
    asked, gone = time.monotonic(), set[int]()
    while waiting := sweep.read(folder).submitted:
        time.sleep(PAUSE)
        if time.monotonic() - asked < sweep.PAUSE:
            continue
        there, asked = sweep.queue_ids(anew=True), time.monotonic()
        if there is None:
            continue
        lost = {job for job, line in waiting.items() if line["queue"] not in there}
        for job in lost & gone:  # what it wrote at its end came from another host, and had time
            line, id = waiting[job], waiting[job]["queue"]
            log = folder / ".submitit" / id / f"{id}_0_log.err"
            error = f"Slurm says {sweep.queue_state(id)} of job {id}, whose errors are in {log}"
            outcome: dict[str, Any] = {"status": "killed", "folder": line["folder"], "error": error}
            sweep.add(folder, outcome, line["overrides"], 0.0, job)
        gone = lost - gone


def register(detach: bool, folders: Mapping[tuple[str, ...], str]) -> None:
    """Let Hydra launch by this class where it would by submitit's own."""
    QueueLauncher.detach, QueueLauncher.folders = detach, folders
    name = f"{SlurmLauncher.__module__}.{SlurmLauncher.__qualname__}"
    Plugins.instance().class_name_to_class[name] = QueueLauncher
