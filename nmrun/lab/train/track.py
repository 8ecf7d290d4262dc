"""Where the numbers go: ``metrics.jsonl`` always, and the loggers of ``track`` (W&B, TensorBoard, MLflow).

Loggers never stop or delay a run. They work in a thread of their own, and an error of theirs is a
line of text."""

from __future__ import annotations

import contextlib
import json
import logging
import netrc
import os
import shlex
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlparse

from nmrun import atomic
from nmrun.errors import first_line
from nmrun.lab.keys.config import flatten
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import FINAL, METRICS
from nmrun.patterns import written

Rows = list[dict[str, Any]]


class Tracker:
    """One run's metrics, in ``metrics.jsonl`` and in the loggers; a resumed run goes on where its
    checkpoint was.

    Rows of steps after ``step``, where training begins, are dropped: they will be logged again.
    ``mark`` stands for the rows that the file should have (None: not known), then for those that it
    has: their number, and a checksum of them all. ``problem`` says where rows are lost."""

    def __init__(
        self, run: TrackedRun, step: int, say: Callable[[str], None], mark: list[int] | None = None
    ) -> None:
        self._path, self._say, self.mark = run.folder / METRICS, say, [0, 0]
        rows = documents.read_lines(self._path)[0] if step else []
        history = [row for row in rows if type(row.get("step")) is int and row["step"] <= step]
        atomic.write(self._path, "".join(map(self._line, history)))
        self.problem = ""
        if mark not in (None, self.mark):
            self.problem = f"{METRICS}: not the {mark[0]} rows that were logged; it was changed"
        self._file = self._path.open("a")
        self._loggers: dict[str, Logger] = {}  # by name; the thread's own
        self._to_say: list[str] = []  # what the thread leaves to the next log() or finish()
        track = run.config["track"]
        asked = (track["name"], *track["also"])
        self._names = dict.fromkeys(name for name in asked if name in LOGGERS)
        # importing and starting a logger takes a second; training need not wait for it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loggers")
        for name in self._names:
            self._thread.submit(self._begin, name, run, history)

    def log(self, row: dict[str, Any]) -> None:
        """Write one row, with the ``time`` in seconds since 1970. Numbers that are not finite
        become null, which every JSON reader knows."""
        row = {**documents.strict(row), "time": round(time.time(), 3)}
        with atomic.disk_errors(self._path):
            self._file.write(self._line(row))
            self._file.flush()
        self._tell(lambda logger: logger.log(row))

    def _line(self, row: dict[str, Any]) -> str:
        line = f"{json.dumps(row)}\n"
        self.mark = [self.mark[0] + 1, zlib.crc32(line.encode(), self.mark[1])]
        return line

    def sync(self) -> None:
        """Put the rows on disk; called before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        with contextlib.suppress(OSError):  # rows lost to a full disk have been reported already
            self._file.close()
        self._tell(lambda logger: logger.finish(summary, exit_code))
        self._thread.shutdown()
        self._speak()

    # --- loggers ------------------------------------------------------------------------------

    def _tell(self, action: Callable[[Logger], Any]) -> None:
        """Let the thread, which begins with its first task, call ``action`` for each logger that has
        begun."""
        if self._names:  # else there is no thread, at which each row would knock
            self._thread.submit(self._do, action)
        self._speak()

    def _speak(self) -> None:
        while self._to_say:
            self._say(self._to_say.pop(0))

    def _begin(self, name: str, run: TrackedRun, history: Rows) -> None:
        with self._off_by_errors(name):
            self._loggers[name] = LOGGERS[name](run, history, self._to_say.append)

    def _do(self, action: Callable[[Logger], Any]) -> None:
        for name, logger in list(self._loggers.items()):
            with self._off_by_errors(name):
                action(logger)

    @contextlib.contextmanager
    def _off_by_errors(self, name: str) -> Iterator[None]:
        """A missing, broken or unreachable logger costs one line, not the run."""
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            title, line = LOGGERS[name].title, first_line(error)
            self._to_say.append(
                f"{title} is off for this run ({type(error).__name__}: {line}); metrics.jsonl has everything"
            )


MLFLOW_ID = "nmrun.id"  # the tag by which a resumed run finds its own
MLFLOW_LONGEST = 500  # characters of a parameter
INIT_TIMEOUT = 10.0  # seconds that an online W&B may take to answer
# seconds that it may take to upload the rest at the end; what is left stays on disk for wandb sync
FINISH_TIMEOUT = 60.0
# likewise of each request to MLflow, whose own defaults wait for minutes
MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


class Logger(Protocol):
    title: ClassVar[str]

    def __init__(self, run: TrackedRun, history: Rows, say: Callable[[str], None]) -> None:
        """``history`` has the rows that a resumed run had logged before."""

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of ``metrics.jsonl``."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """The run has ended; ``summary`` is flat: metrics by name, status, seconds."""


@dataclass(frozen=True)
class TrackedRun:
    """What a logger needs to know of a run."""

    folder: Path
    config: dict[str, Any]
    id: str
    sweep: str | None

    @property
    def ratio(self) -> str:
        return written(self.config["sparsity"])

    @property
    def name(self) -> str:
        """A name by which people tell runs apart: ``step 2:8 digits small_conv s0``."""
        names = (self.config[group]["name"] for group in ("dataset", "model"))
        what = "dense" if self.ratio == "dense" else f"{self.config['recipe']['name']} {self.ratio}"
        return f"{what} {' '.join(names)} s{self.config['seed']}"

    @property
    def tags(self) -> list[str]:
        names = (self.config[group]["name"] for group in ("recipe", "dataset", "model"))
        return list(dict.fromkeys([*names, self.ratio, *self.config["track"]["tags"]]))


# --- Weights & Biases: offline until somebody asks, never with a prompt -----------------------------


class WandBLogger(Logger):
    """A run of W&B with the run's id. At the end ``say`` tells who has a login how to upload an
    offline run; ``track.weights`` are sent then, if the run has finished."""

    title = "W&B"

    def __init__(self, run: TrackedRun, history: Rows, say: Callable[[str], None]) -> None:
        self._about, self._say, track = run, say, run.config["track"]
        has_key = logged_in()
        mode: Any = os.environ.get("WANDB_MODE") or track["mode"]
        if mode == "online" and not has_key:
            say("W&B: not logged in (wandb login), tracking offline")
        online = mode == "online" and has_key
        if mode != "disabled":  # of others, such as run, W&B would ask for a key
            mode = "online" if online else "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._upload_later = mode == "offline" and has_key
        # An offline run cannot be taken up again: replace it by one with the whole history.
        for old in (run.folder / "wandb").glob("*run-*") if mode == "offline" else ():
            shutil.rmtree(old, ignore_errors=True)
        self._run = wandb.init(
            mode=mode,
            # without resume, a run of the same id is replaced: that is force=true
            resume="allow" if online and history else None,
            entity=track["entity"],
            notes=track["notes"],
            group=track["group"] or os.environ.get("WANDB_RUN_GROUP") or run.sweep,
            **_wandb_names(run),
            dir=str(run.folder),
            config=run.config,
            settings=_wandb_settings(wandb, track),
            reinit="finish_previous",
        )
        for loss in ("train/loss", "eval/loss"):
            self._run.define_metric(loss, summary="min,last")
        for row in history if not online else ():
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(row, step=row["step"])

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._run.summary.update(summary)
        if self._about.config["track"]["weights"] and exit_code == 0:
            import wandb

            artifact = wandb.Artifact(f"model-{self._run.id}", "model")
            artifact.add_file(str(self._about.folder / FINAL), policy="immutable")
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=exit_code)
        if self._upload_later:
            place = os.path.relpath(Path(self._run.dir).parent)
            self._say(
                f"W&B: offline; wandb sync {shlex.quote(place)} uploads it; "
                "track.mode=online uploads runs as they train"
            )


def _wandb_names(run: TrackedRun) -> dict[str, Any]:
    """Project, tags, id and name: by the config, else by W&B's variables of the environment. Those
    that name one run are not for the runs of a sweep."""
    track, variables = run.config["track"], os.environ
    given = [] if track["tags"] else variables.get("WANDB_TAGS", "").split(",")
    tags = [*run.tags, *filter(None, map(str.strip, given))]
    own = {} if run.sweep else variables
    return {
        "project": track["project"] or variables.get("WANDB_PROJECT") or "nmrun",
        "tags": list(dict.fromkeys(tags)),
        "id": own.get("WANDB_RUN_ID") or run.id,
        "name": own.get("WANDB_NAME") or run.name,
    }


def _wandb_settings(wandb: Any, track: dict[str, Any]) -> Any:
    """Send what is logged here. Git's state, console and machine statistics are sent only if asked
    for, source code never."""
    settings: dict[str, Any] = {
        "silent": True,
        "console": "wrap" if track["console"] else "off",
        "init_timeout": INIT_TIMEOUT,
        "finish_timeout": FINISH_TIMEOUT,
        "disable_code": True,
        "disable_git": not track["git"],
        "x_disable_stats": not track["system"],
        "x_disable_meta": not (track["system"] or track["git"]),
        "x_disable_machine_info": not track["system"],
        "x_save_requirements": False,
    }
    fields = wandb.Settings.model_fields  # these differ between versions
    return wandb.Settings(**{key: value for key, value in settings.items() if key in fields})


def logged_in() -> bool:
    """Whether there is a key, in the environment or in netrc. It uses no network and asks nobody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# --- TensorBoard: event files in the run's folder --------------------------------------------------


class TensorBoardLogger(Logger):
    """Event files, begun anew with the whole history of a resumed run."""

    title = "TensorBoard"

    def __init__(self, run: TrackedRun, history: Rows, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder))
        for row in history:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        for key, value in _figures(row).items():
            self._writer.add_scalar(key, value, row["step"], row.get("time"))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._writer.close()


# --- MLflow: the experiment ``track.project``, by MLFLOW_TRACKING_URI or in a file of output_dir ---


class MLflowLogger(Logger):
    """A run of MLflow; a resumed run takes up its own, which has its rows."""

    title = "MLflow"

    def __init__(self, run: TrackedRun, history: Rows, say: Callable[[str], None]) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for variable, value in MLFLOW_WAITS.items():
            os.environ.setdefault(variable, value)
        for name in ("mlflow", "alembic"):  # they list the tables that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        track, output_dir = run.config["track"], Path(run.config["output_dir"]).absolute()
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{output_dir / 'mlflow.db'}"
        client: Any = MlflowClient(place)
        self._client = client
        project = track.get("project") or "nmrun"
        if client.get_experiment_by_name(project) is None:
            with contextlib.suppress(MlflowException):  # a job beside this one may have made it
                client.create_experiment(project)
        experiment = client.get_experiment_by_name(project).experiment_id
        if history:
            mine = f"tags.`{MLFLOW_ID}` = '{run.id}'"
            for old in client.search_runs([experiment], mine, max_results=1):
                self._id = old.info.run_id
                client.update_run(self._id, "RUNNING")
                return
        tags = {MLFLOW_ID: run.id, **({"sweep": run.sweep} if run.sweep else {})}
        tags |= dict.fromkeys(track["tags"], "")
        self._id = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        for key, value in flatten(run.config).items():
            client.log_param(self._id, key, str(value)[:MLFLOW_LONGEST])

    def log(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        when, step = round(1000 * row.get("time", time.time())), int(row["step"])
        figures = _figures(row).items()
        metrics = [Metric(key, float(value), when, step) for key, value in figures]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        for key, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._client.log_metric(self._id, f"final/{key}", float(value))
            elif value is not None:
                self._client.set_tag(self._id, key, str(value)[:MLFLOW_LONGEST])
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def _figures(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row, without its step and time."""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if key not in ("step", "time")}


LOGGERS: dict[str, type[Logger]] = {
    "wandb": WandBLogger,
    "tensorboard": TensorBoardLogger,
    "mlflow": MLflowLogger,
}
