"""``launcher=slurm``: what it asks submitit for, and sweeps on a real cluster of one node."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from lazily import needs
from runs import handled
from slurm import cluster

from nmrun.errors import ConfigError
from nmrun.lab.config import command_line, composition
from nmrun.lab.records import status, sweep
from nmrun.lab.sweeps import jobs
from nmrun.lab.train import checkpoint

WORDS = ("recipe=sr_ste", "track=local", "model.channels=[8,8,8]", "trainer.batch_size=16")


# --- without a cluster ----------------------------------------------------------------------------


@needs("launchers", "hydra_plugins.hydra_submitit_launcher")
def test_a_job_at_its_limit_is_saved_and_queued_again():
    """By submitit's own defaults a job ends for good after an hour."""
    from hydra import compose

    composition.register()
    with composition.composing():
        words = ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
        asked = compose("nmrun", words, return_hydra_config=True).hydra.launcher
        plain = compose("nmrun", ["hydra/launcher=submitit_slurm"], return_hydra_config=True)
    assert asked._target_ == plain.hydra.launcher._target_
    assert asked.max_num_timeout > 100 > plain.hydra.launcher.max_num_timeout == 0
    assert 60 <= asked.signal_delay_s < 60 * asked.timeout_min
    assert asked.partition == "gpu"
    assert asked.additional_parameters == {"requeue": True}


@needs("launchers", "hydra_plugins.hydra_submitit_launcher")
def test_what_the_page_sets_is_taken(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    page = (Path(__file__).parents[3] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    words = re.findall(r"`'?(\+?launcher\.\w+[^`' ]*=[^`']+)'?`", page.partition("\n## Slurm")[2])
    assert len(words) > 4
    assert jobs.checked(["launcher=slurm", *words, "seed=0,1"], True).launcher == "slurm"


@needs("launchers", "hydra_plugins.hydra_submitit_launcher")
def test_a_preset_of_ones_own_is_a_launcher_for_slurm(tmp_path):
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "hydra" / "launcher" / "ours.yaml").write_text("defaults: [slurm]\nqos: low\n")
    asked = jobs.checked(["launcher=ours", "detach=true", "seed=0,1"], True, str(tmp_path))
    assert (asked.launcher, asked.known.queues, asked.detach) == ("ours", True, True)
    with pytest.raises(ConfigError, match="launcher=slurm"):
        jobs.checked(["launcher=submitit_local", "detach=true", "seed=0,1"], True)


def test_the_command_for_a_job_alone_submits_nothing():
    assert command_line.of_job(["seed=0", "detach=True"], None) == "nmrun seed=0"


@needs("launchers", "hydra_plugins.hydra_submitit_launcher")
def test_a_job_ends_by_sigterm_if_it_is_cancelled(monkeypatch):
    """A preemption begins with SIGTERM too, of a job that goes on and is queued again later."""
    from nmrun.lab.sweeps.slurm import QueueLauncher, SlurmLauncher

    monkeypatch.setattr(SlurmLauncher, "__call__", lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = "JobId=7 JobName=j JobState={} Reason=None"
    with handled(lambda *_: None, signal.SIGTERM):  # as submitit has it
        monkeypatch.setattr(sweep, "_answer", lambda *_: said.format("RUNNING"))
        QueueLauncher()()
        monkeypatch.setattr(sweep, "_answer", lambda *_: said.format("COMPLETING"))
        with pytest.raises(SystemExit) as ended:
            QueueLauncher()()
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The record of a sweep of three jobs, 7_0 to 7_2; and Slurm has those that are named."""

    def record(*there: str) -> Path:
        answer = "\n".join(there)
        monkeypatch.setattr(sweep, "_answer", lambda *command: answer)
        sweep.queue_ids(anew=True)
        folder = tmp_path / "out" / ".sweeps" / "1-sweep"
        if not folder.exists():
            folder.mkdir(parents=True)
            sweep.begin(folder, 3, "nmrun -m seed=0,1,2", "out", [["seed=0,1,2"]])
            for number in (1, 2, 3):
                words, run = [f"seed={number - 1}"], str(tmp_path / f"run{number}")
                sweep.submits(folder, number, words, run, f"7_{number - 1}")
            sweep.add(folder, {"status": "finished", "folder": "run1"}, ["seed=0"], 9.0, 1)
        return folder

    return record


def test_a_sweep_goes_on_while_slurm_has_jobs_of_it(submitted, tmp_path):
    folder = submitted("7_1", "7_2", "8")
    lines, bad = sweep.summary(folder)
    assert "1 finished, 2 in Slurm" in lines
    assert "scancel 7 " in lines
    assert not bad
    assert status.sweeps(tmp_path / "out") == [(folder, True)]
    assert "scancel 7 " in "\n".join(status.sweep_lines(folder, True))
    expected = {str(tmp_path / f"run{number}"): f"7_{number - 1}" for number in (2, 3)}
    assert sweep.in_queue(str(tmp_path / "out")) == expected


def test_jobs_that_left_the_queue_without_a_word_are_missing(submitted, tmp_path):
    folder = submitted("7_2", "8")
    lines, bad = sweep.summary(folder)
    assert "1 finished, 1 in Slurm, 1 not reached" in lines
    assert bad
    submitted("8")
    assert status.sweeps(tmp_path / "out") == [(folder, False)]
    assert sweep.in_queue(str(tmp_path / "out")) == {}


@pytest.mark.parametrize("program", ["/usr/bin/squeue", None])
def test_where_slurm_does_not_answer_its_jobs_are_there(program, submitted, tmp_path, monkeypatch):
    """Else the same command would submit them again. Where there is no Slurm they are not."""
    folder = submitted("7_1", "7_2")
    sweep.add(folder, {"status": "queued", "folder": "run9", "queue": "6"}, ["seed=9"], 0.0, 4)
    monkeypatch.setattr(sweep, "_answer", lambda *command: None)
    monkeypatch.setattr(shutil, "which", lambda name: program)
    sweep.queue_ids(anew=True)
    assert len(sweep.in_queue(str(tmp_path / "out"))) == (2 if program else 0)
    assert sweep.with_ends(folder).ends[-1]["status"] == ("queued" if program else "killed")


# --- on a cluster ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs submitit")
    with cluster(tmp_path_factory.mktemp("slurm")):
        yield


@contextlib.contextmanager
def nmrun(place: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nmrun", "-m", "launcher=slurm", *WORDS, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=place, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def submit(place: Path, *words: str) -> str:
    """What a command says that ends by itself."""
    with nmrun(place, *words) as process:
        return process.communicate(timeout=120)[0]


def until(condition: Callable[[], object], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def slurms(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def in_queue() -> list[str]:
    return slurms("squeue", "--noheader", "--array", "--format=%i")


def train(place: Path, seeds: Sequence[int]) -> bool:
    """Whether the runs of these seeds have logged steps."""
    logs = [log for seed in seeds for log in place.rglob(f"s{seed}-*/metrics.jsonl")]
    return len(logs) == len(seeds) and all(log.stat().st_size for log in logs)


@pytest.mark.slow
def test_a_detached_sweep_is_queued_again_and_ends_with_the_same_bits(slurm, tmp_path):
    words = ("seed=0,1", "trainer.epochs=40", "trainer.log_every=1")
    said = submit(tmp_path, *words, "detach=true")
    assert "2 in Slurm" in said, said
    until(lambda: train(tmp_path, (0, 1)))
    (array,) = {job.partition("_")[0] for job in in_queue()}
    said = submit(tmp_path, *words, "detach=true")
    assert "sweep of 2: 2 running in another process" in said, said
    assert {job.partition("_")[0] for job in in_queue()} == {array}, "they were submitted again"
    slurms("scancel", "--signal=USR2", f"{array}_0")  # as Slurm does before the time is up
    until(lambda: "PENDING" in slurms("squeue", "-h", "-j", f"{array}_0", "-o", "%T"))
    until(lambda: not in_queue())
    (job,) = (log for log in tmp_path.rglob("job1.log"))
    assert "goes on at step" in job.read_text()
    said = submit(tmp_path, *words)
    assert "sweep of 2: 2 skipped" in said, said
    (weights,) = tmp_path.rglob("s0-*/model.safetensors")
    alone = [*(sys.executable, "-m", "nmrun"), *WORDS, "seed=0", *words[1:], "output_dir=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    (other,) = (tmp_path / "alone").rglob("model.safetensors")
    assert weights.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_who_follows_a_sweep_is_told_what_became_of_its_jobs(slurm, tmp_path):
    long = ("trainer.epochs=3000", "trainer.checkpoint_every=3000")
    with nmrun(tmp_path, "seed=0,1,2", *long) as process:
        until(lambda: train(tmp_path, (0, 1)))
        first, *_, last = sorted(in_queue())
        slurms("scancel", first)
        (jobs,) = tmp_path.rglob("jobs.jsonl")
        until(lambda: '"killed"' in jobs.read_text())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    (run,) = tmp_path.rglob("s0-*/")
    last_row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    state = checkpoint.load(run / "checkpoint.pt")
    assert state["loop"]["step"] >= last_row["step"], "it trained on, for nothing"
    array = last.partition("_")[0]
    assert process.returncode == 128 + signal.SIGINT
    assert re.search(rf"seed=0: killed: Slurm says CANCELLED of job {first}", said), said
    assert "1 not done, 2 in Slurm" in said, said
    assert f"scancel {array} " in said, said
    assert last in in_queue(), "Ctrl-C has ended a job"
    slurms("scancel", array)
    until(lambda: not in_queue())


@pytest.mark.slow
def test_a_queue_that_refuses(slurm, tmp_path):
    said = submit(tmp_path, "seed=0,1", "launcher.partition=nope")
    assert "nmrun: 2 jobs not submitted: sbatch: error: invalid partition" in said, said
    assert "Traceback" not in said
