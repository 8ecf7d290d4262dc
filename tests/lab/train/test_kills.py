"""Kill -9 at random moments over a small sweep; ``benchmarks/kills.py`` does it a hundred times
over a larger one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from lazily import needs
from runs import result_of

from nmrun.lab.train import checkpoint

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import kills  # noqa: E402

pytestmark = pytest.mark.slow

preloaded.context()  # the server that all tests of a process share

SWEEP = ("recipe=step,sr_ste", "sparsity=2:4", "seed=0,1", *kills.SWEEP[3:], "trainer.epochs=12")


def test_a_sweep_killed_again_and_again(tmp_path):
    fell, wrong = kills.trial(6, SWEEP, tmp_path)
    assert not wrong
    assert 0 < sum(fell.values()) <= 6
    # and whatever is wrong with what came out is found
    output, alone = tmp_path / "killed", tmp_path / "alone"
    result = next(output.rglob("result.json"))
    folder = result.parent
    (folder / "result.json.partial").touch()
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:-1], lines[-2], lines[-1]]))
    result.write_text(
        json.dumps({**json.loads(result.read_text()), "events": [{"sentence": "another"}]})
    )
    (jobs := output / ".sweeps" / "one").mkdir()
    (jobs / "jobs.jsonl").write_text(json.dumps({"folder": "f", "status": "finished"}) + "\n")
    (jobs / "jobs.jsonl").write_text((jobs / "jobs.jsonl").read_text() * 2)
    differences = kills.differences(output, alone)
    place = folder.relative_to(output)
    assert sorted(line.removeprefix(str(place)) for line in differences) == [
        "/metrics.jsonl: other rows",
        "/model.safetensors: other bits",
        "/result.json.partial: left behind or missing",
        "/result.json: another result",
        "f: finished 2 times",
    ]
    assert kills.finished(output).keys() == {path.parent for path in output.rglob("result.json")}


def test_a_command_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 2"):
        kills.finish(["recipe=nothing", f"output_dir={tmp_path}"])


@contextlib.contextmanager
def sweep_in_session(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """``nmrun -m``, with long runs and a row a step, in a session of its own, which ends with the
    context; it writes ``log``."""
    runs = ("track=local", "trainer.epochs=500", "trainer.log_every=1", "trainer.threads=1")
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "nmrun", "-m", *words, *runs],
            cwd=folder, stdout=log, stderr=log, start_new_session=True,
        ) as sweep,
    ):  # fmt: skip
        try:
            yield sweep
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(sweep.pid, signal.SIGKILL)
    assert "Traceback" not in (folder / "log").read_text()


def statuses(place: Path) -> list[str]:
    return [result_of(path.parent)["status"] for path in place.rglob("result.json")]


@needs("launchers", "hydra_plugins")
@pytest.mark.parametrize("ends", ["Ctrl-C", "SIGTERM", "SIGKILL", "a worker's SIGKILL"])
def test_workers_of_a_sweep_end_with_it(tmp_path, ends):
    """Each saves its run, none takes another job, and the sweep's process ends after them."""
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "recipe=ste", "seed=0,1,2,3")
    with sweep_in_session(tmp_path, *words) as sweep:
        until(lambda: len(rows_of(tmp_path)) == 2 and min(rows_of(tmp_path).values()) > 40)
        if ends == "Ctrl-C":
            os.killpg(sweep.pid, signal.SIGINT)
        elif ends == "a worker's SIGKILL":
            (jobs,) = tmp_path.rglob("jobs.jsonl")
            os.kill(json.loads(jobs.read_text().splitlines()[0])["process"], signal.SIGKILL)
        else:
            sweep.send_signal(signal.SIGTERM if ends == "SIGTERM" else signal.SIGKILL)
        status = sweep.wait(60)
        if ends == "SIGKILL":  # nobody is left to wait for them
            until(lambda: len(list(tmp_path.rglob("result.json"))) == 2)
        until(lambda: not group_is_alive(sweep.pid))
    codes = {"SIGTERM": 143, "SIGKILL": -9, "a worker's SIGKILL": 1}
    assert status == codes.get(ends, 130)
    assert len(list(tmp_path.rglob("config.yaml"))) == 2, "a worker took another job"
    if ends == "a worker's SIGKILL":
        output = (tmp_path / "log").read_text()
        assert "a worker was killed" in output
        assert "[1/4] seed=0: killed" in output or "[1/4] recipe=ste seed=0: killed" in output
        return
    assert statuses(tmp_path) == ["interrupted"] * 2
    for run in {path.parent for path in tmp_path.rglob("result.json")}:
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        state = checkpoint.load(run / "checkpoint.pt")
        # the row of an evaluation that was put off comes later
        assert state["loop"]["step"] - last in (0, 1), "what was trained is not all saved"


@needs("launchers", "hydra_plugins")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_sweep_without_workers(number, tmp_path):
    """joblib runs the jobs of n_jobs=1, or of -1 on one core, in the sweep's own process."""
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "recipe=ste", "seed=0,1")
    with sweep_in_session(tmp_path, *words) as sweep:
        until(lambda: max([0, *rows_of(tmp_path).values()]) > 40)
        sweep.send_signal(number)
        assert sweep.wait(20) == 128 + number
    assert statuses(tmp_path) == ["interrupted"]


@needs("launchers", "hydra_plugins")
def test_a_job_of_submitit_that_is_killed(tmp_path):
    with sweep_in_session(tmp_path, "hydra/launcher=submitit_local", "seed=0,1") as sweep:
        until(lambda: len(rows_of(tmp_path)) == 2)
        first = min(tmp_path.rglob(".lock"), key=lambda lock: "s0-" not in str(lock))
        os.kill(int(first.read_text().split()[1]), signal.SIGKILL)
        assert sweep.wait(60) == 1
    assert "nmrun status" in (tmp_path / "log").read_text()


@needs("ray", "ray", "hydra_plugins.hydra_ray_launcher")
def test_control_c_of_a_sweep_by_ray(tmp_path):
    """Each job saves its run, and the same command goes on with them."""
    words = ("launcher=ray", "+launcher.ray.init.num_cpus=2", "seed=0,1")
    with sweep_in_session(tmp_path, *words) as sweep:
        until(lambda: len(rows_of(tmp_path)) == 2 and min(rows_of(tmp_path).values()) > 10)
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(60) == 130
    assert statuses(tmp_path) == ["interrupted"] * 2


@needs("launchers", "hydra_plugins")
def test_control_c_while_workers_start(tmp_path):
    """They end without a traceback, and no run begins."""
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1")
    with sweep_in_session(tmp_path, *words) as sweep:
        until(lambda: sum(map(imports_torch, workers_of(sweep.pid))) == 2)
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(60) == 130
        until(lambda: not group_is_alive(sweep.pid))
    assert not list(tmp_path.rglob("config.yaml"))


def workers_of(group: int) -> list[Path]:
    """The processes of a group that are joblib's workers, also while they start."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
            if int(fields[2]) == group and b"popen_loky_posix" in command:
                processes.append(process)
    return processes


def imports_torch(process: Path) -> bool:
    """Whether a process has at least begun to, which it does before a run begins."""
    with contextlib.suppress(OSError):
        return "libtorch" in (process / "maps").read_text()
    return False


def rows_of(place: Path) -> dict[Path, int]:
    return {path: path.read_text().count("\n") for path in place.rglob("metrics.jsonl")}


def group_is_alive(group: int) -> bool:
    """Whether any process of a group is there that is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def until(there: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
