"""A run that was cut off and started again ends with the same bits as one left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import nmrun.cli  # noqa: F401  (registers the source of ratios)
from nmrun import runner, schema
from nmrun.identity import run_folder
from nmrun.loop import Loop

RECIPES = ["dense", "asp", "ste", "sr_ste", "step", "s_ste"]


class Cut(BaseException):
    """Stands for a power failure: nothing gets to run after it."""


def config(out: Path, *overrides: str) -> schema.Config:
    words = ["track=local", "trainer.epochs=4", "trainer.limit_batches=5", "trainer.log_every=2", f"output_dir={out}", *overrides]
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        return schema.check(compose("nmrun", words))


def train(cfg: schema.Config) -> Path:
    assert runner.run(cfg, run_folder(cfg))["status"] == "finished"
    return run_folder(cfg)


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "steps_per_second"} for line in lines]


@pytest.mark.parametrize("extra", [(), ("trainer.accumulate=2", "trainer.clip=0.5", "schedule=cosine", "schedule.warmup=0.2")])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cut", [7, 13])  # of 20 steps: before and after STEP's switch and ASP's pruning
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, recipe, cut, extra):
    words = (f"recipe={recipe}", "sparsity=2:8", *extra)
    whole = train(config(tmp_path / "whole", *words))

    cfg = config(tmp_path / "cut", *words)
    step = Loop.train_step

    def until(loop):
        if loop.step == cut:
            raise Cut
        return step(loop)

    monkeypatch.setattr(Loop, "train_step", until)
    with pytest.raises(Cut):
        runner.run(cfg, run_folder(cfg))
    monkeypatch.setattr(Loop, "train_step", step)
    resumed = train(cfg)

    assert f"resumed at step {5 * (cut // 5)} of 20" in (resumed / "run.log").read_text()
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert rows(resumed) == rows(whole)
    first, second = (json.loads((f / "result.json").read_text()) for f in (whole, resumed))
    assert first["metrics"] == second["metrics"]
    assert first["events"] == second["events"]


def test_killed_by_the_system_at_any_moment(tmp_path):
    words = ["recipe=step", "sparsity=2:8", "track=local", "trainer.epochs=6", "trainer.limit_batches=8"]
    whole = train(config(tmp_path / "whole", *words[:2], *words[3:]))
    line = [sys.executable, "-m", "nmrun.cli", *words, "trainer.log_every=2", "output_dir=cut"]
    for pause in (0.02, 0.15, 0.3):
        process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        started, seen = time.time(), len(list(tmp_path.glob("cut/**/metrics.jsonl")))
        while process.poll() is None and time.time() - started < 60 and not seen:
            seen = len(list(tmp_path.glob("cut/**/metrics.jsonl")))
            time.sleep(0.01)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(line, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=120, check=False).returncode == 0
    (resumed,) = list(tmp_path.glob("cut/**/model.safetensors"))
    assert resumed.read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    from nmrun.errors import ConfigError

    cfg = config(tmp_path, "recipe=ste")
    folder = run_folder(cfg)
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="force=true starts the run again"):
        runner.run(cfg, folder)


def test_force_starts_from_the_beginning(tmp_path):
    folder = train(config(tmp_path, "recipe=ste"))
    train(config(tmp_path, "recipe=ste", "force=true"))
    assert "resumed" not in (folder / "run.log").read_text()
