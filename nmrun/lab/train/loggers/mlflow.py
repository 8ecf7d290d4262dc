"""MLflow: a run in the experiment ``track.project``, by ``MLFLOW_TRACKING_URI`` or in a file below
the output folder.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from nmrun.lab.train.loggers import Run
from nmrun.lab.words.schema import flatten

ID = "nmrun.id"  # the tag by which a resumed run finds its own
LONGEST = 500  # characters of a parameter


class MLflow:
    """A run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id

    def log(self, row: dict[str, Any]) -> None:
        """Log the numbers of a row at its step and time."""
        from mlflow.entities import Metric

        when = round(1000 * row.get("time", time.time()))
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        metrics = [
            Metric(key, float(value), when, int(row["step"]))
            for key, value in numbers.items()
            if key not in ("step", "time")
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write the summary: numbers as ``final/...`` metrics, all else as tags.

        Args:
            summary: flat.
            exit_code: 0 for a finished run.
        """
        for key, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._client.log_metric(self._id, f"final/{key}", float(value))
            elif value is not None:
                self._client.set_tag(self._id, key, str(value)[:LONGEST])
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def begin(run: Run) -> MLflow:
    """Begin a run, or take up the one of a resumed run, whose rows it has."""
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # which tell of the tables that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    track, output_dir = run.config["track"], Path(run.config["output_dir"]).absolute()
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{output_dir / 'mlflow.db'}"
    client = MlflowClient(place)
    project = track.get("project", "nmrun")
    found = client.get_experiment_by_name(project)
    experiment = found.experiment_id if found else client.create_experiment(project)
    if run.history:
        for old in client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1):
            client.update_run(old.info.run_id, "RUNNING")
            return MLflow(client, old.info.run_id)
    tags = {ID: run.id, **({"sweep": run.sweep} if run.sweep else {})}
    tags |= dict.fromkeys(track["tags"], "")
    begun = client.create_run(experiment, tags=tags, run_name=run.name)
    for key, value in flatten(run.config).items():
        client.log_param(begun.info.run_id, key, str(value)[:LONGEST])
    return MLflow(client, begun.info.run_id)
