"""Two processes train what one trains: same recipes, same steps, one run folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
import torch
import two_ranks
from played_gpu import play
from runs import RECIPES, TINY, config, result_of, rows
from safetensors.torch import load_file

import nmrun
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import checkpoint

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    process = preloaded.torchrun(two_ranks.__file__, "train", folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def compare(alone: Path, other: Path, rtol: float, atol: float) -> None:
    """Their final weights are the same up to rounding."""
    expected, weights = (load_file(each / "model.safetensors") for each in (alone, other))
    torch.testing.assert_close(weights, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_the_weights_of_one(recipe, together, tmp_path):
    alone = Path(two_ranks.run(str(tmp_path), recipe))
    other = together / alone.relative_to(tmp_path)
    compare(alone, other, rtol=1e-3, atol=1e-5)
    for one, two in zip(rows(alone), rows(other), strict=True):
        assert one.keys() == two.keys()
        assert one.get("train/loss", 0.0) == pytest.approx(two.get("train/loss", 0.0), rel=1e-4)
    assert result_of(other)["environment"]["ranks"] == 2
    assert sorted(p.name for p in other.iterdir()) == sorted(p.name for p in alone.iterdir())


def test_two_processes_take_the_same_2_4_products(together, tmp_path, monkeypatch):
    play(monkeypatch.setattr, tmp_path)
    alone = Path(two_ranks.run(str(tmp_path), "ste", *two_ranks.ACCELERATED))
    other = together / alone.relative_to(tmp_path)
    for folder in (alone, other):
        assert "N:M products in 2 of 2 sparse layers" in (folder / "run.log").read_text()
    compare(alone, other, rtol=2e-2, atol=2e-3)


def test_a_signal_stops_both_and_one_process_goes_on(tmp_path, nmrun_cli):
    overrides = [
        *TINY,
        "recipe=step",
        "recipe.switch=0.5",
        "trainer.epochs=100",
        f"output_dir={tmp_path}",
    ]
    cfg = config(tmp_path, "recipe=step", "recipe.switch=0.5", "trainer.epochs=100")
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "nmrun", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = run_folder(cfg) / "metrics.jsonl"
    while process.poll() is None and (
        not metrics.exists() or metrics.read_bytes().count(b"\n") < 20
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert output.count("interrupted at step") == 1
    result = result_of(run_folder(cfg))
    assert (result["status"], result["signal"]) == ("interrupted", signal.SIGTERM)
    state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
    assert f"interrupted at step {state['loop']['step']} of 300" in output
    assert len(state["random"]) == 2
    assert not torch.equal(state["random"][0]["torch"], state["random"][1]["torch"])
    alone = nmrun_cli(*overrides)
    assert alone.returncode == 0
    assert f"goes on at step {state['loop']['step']} of 300" in alone.stdout


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_two_processes_are_killed_within_an_epoch(distributed, tmp_path):
    """Their checkpoints are by the first one's clock; the two clocks differ."""
    folders = [tmp_path / name for name in ("alone", "killed")]
    for folder in folders:
        folder.mkdir()
    words = [two_ranks.__file__, "killed"]
    assert preloaded.torchrun(*words, folders[0], distributed, 0).returncode == 0
    assert preloaded.torchrun(*words, folders[1], distributed, 7).returncode == 1
    (rows_of_killed,) = folders[1].rglob("metrics.jsonl")
    assert not (rows_of_killed.parent / "result.json").exists()
    process = preloaded.torchrun(*words, folders[1], distributed, 0)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "goes on at step 6 of 12" in process.stdout
    alone, killed = (next(folder.rglob("model.safetensors")).parent for folder in folders)
    for name in ("model.safetensors", "best.safetensors"):
        assert (alone / name).read_bytes() == (killed / name).read_bytes()
    assert rows(alone) == rows(killed)


def test_a_sweep_in_two_processes(tmp_path):
    swept = ("recipe=dense,ste,sr_ste", "optimizer.lr=1e-3,1e30")
    program = Path(nmrun.__file__).with_name("__main__.py")
    process = preloaded.torchrun(program, "-m", *TINY, *swept, f"output_dir={tmp_path}")
    assert process.returncode == 1
    assert process.stdout.count("sweep of 6: 3 finished, 3 not done") == 1
    assert len(list(tmp_path.rglob("model.safetensors"))) == 3
    assert len(list((tmp_path / ".sweeps").iterdir())) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_signal_ends_the_sweep_of_both(late, tmp_path):
    """It reaches both in a step, or the first one alone and too late for its run."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, signal, sys\n"
        "from nmrun.lab import cli, ranks\n"
        "from nmrun.lab.train import results\n"
        "from nmrun.lab.train.steps import TrainingSteps\n"
        "def signalled(function):\n"
        "    def call(*args, **kwargs):\n"
        "        value = function(*args, **kwargs)\n"
        "        if getattr(args[0], 'step', 5) == 5:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return value\n"
        "    return call\n"
        f"if not {late}:\n"
        "    TrainingSteps.train_step = signalled(TrainingSteps.train_step)\n"
        "elif ranks.leads():\n"
        "    results.finish = signalled(results.finish)\n"
        "sys.exit(cli.main())\n"
    )
    words = ["-m", *TINY, "recipe=ste", "seed=0,1", f"output_dir={tmp_path}"]
    process = preloaded.torchrun(script, *words)
    assert process.returncode == 1  # torchrun's
    assert process.stdout.count("1 not done, 1 not reached") == 1
    assert not re.search("^Traceback", process.stderr, re.MULTILINE)
    assert len(list(tmp_path.rglob("result.json"))) == 1


def test_a_rank_that_fails_alone_ends_the_sweep(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from nmrun.lab import cli, ranks\n"
        "from nmrun.lab.train.steps import TrainingSteps\n"
        "step = TrainingSteps.train_step\n"
        "def broken(loop, *args, **kwargs):\n"
        "    if ranks.rank() == 1 and loop.step == 5:\n"
        "        raise torch.OutOfMemoryError('no space')\n"
        "    step(loop, *args, **kwargs)\n"
        "TrainingSteps.train_step = broken\n"
        "sys.exit(cli.main())\n"
    )
    words = ["-m", *TINY, "recipe=ste", "seed=0,1", f"output_dir={tmp_path}"]
    process = preloaded.torchrun(script, *words)
    assert process.returncode == 1
    assert "step 6: out of memory (no space). Try a larger trainer.accumulate\n" in process.stderr
    (folder,) = (path.parent for path in tmp_path.rglob("checkpoint.pt"))
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("word", ["trainer.distributed=fsdp", "trainer.budget=seconds:1"])
def test_a_plan_in_two_processes(word, tmp_path):
    program = Path(nmrun.__file__).with_name("__main__.py")
    words = [*TINY, "recipe=sr_ste", word, "dry=true", f"output_dir={tmp_path}"]
    process = preloaded.torchrun(program, *words)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("FLOPs of the training") == 1
    assert not list(tmp_path.iterdir())
