"""``nmrun.run`` and ``nmrun.sweep`` beside the command line, the files, and the process around."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from runs import TINY, result_of
from safetensors.torch import load_file
from verbs import python, verb

import nmrun
from nmrun.errors import ConfigError, RunError
from nmrun.lab.api import runs
from nmrun.lab.config import command_line
from nmrun.lab.records import sweep

SHORT = [*TINY, "trainer.epochs=2"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def process() -> dict[str, Any]:
    """What a notebook would notice, were it changed."""
    return {
        "folder": os.getcwd(),
        # scikit-learn sets KMP_... when it is imported
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("KMP_")},
        "arguments": list(sys.argv),
        "streams": (sys.stdout, sys.stderr),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": (list(logging.root.handlers), logging.root.level),
        "hydra": GlobalHydra.instance().hydra,
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numpy": np.random.get_state()[1].tolist(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "cached": (torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()),
        "outside": torch.autocast_decrement_nesting(),
        "usual": (torch.get_default_dtype(), torch.empty(0).device),
    }


def folder_of(process: subprocess.CompletedProcess[str]) -> Path:
    assert process.returncode == 0, process.stderr
    return Path(process.stdout.splitlines()[-1].strip())


@pytest.mark.slow
def test_a_run_is_that_of_the_command_line(nmrun_cli, tmp_path):
    ours = nmrun.run([*SHORT, "recipe=step"], seed=1)
    assert ours.status == "finished"
    theirs = tmp_path / folder_of(nmrun_cli(*SHORT, "recipe=step", "seed=1", "output_dir=again"))
    assert ours.folder == tmp_path / "outputs" / theirs.relative_to(tmp_path / "again")
    a, b = (load_file(folder / "model.safetensors") for folder in (ours.folder, theirs))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    result = result_of(ours.folder)
    assert ours.config == result["config"]
    best = {f"best/{name}": value for name, value in result["metrics"]["best"].items()}
    assert ours.metrics == {**result["metrics"]["final"], **best}
    # the command that is noted asks for this very run
    again = nmrun_cli(*shlex.split(result["environment"]["command"])[1:])
    assert again.stdout.startswith("finished already")
    assert str(ours.folder.relative_to(tmp_path)) in again.stdout


def test_a_finished_run_is_skipped(capsys):
    first = nmrun.run(SHORT)
    accuracy = f"{first.metrics['test/accuracy']:.4g}"
    for text in ("finished", "digits", "small_conv", "step", "2:4", accuracy):
        assert text in repr(first)
    before = (first.folder / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    second = nmrun.run(SHORT)
    assert capsys.readouterr().out.startswith("finished already: ")
    assert (second.status, second.folder) == ("skipped", first.folder)
    assert (second.metrics, second.config) == (first.metrics, first.config)
    assert (first.folder / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interrupted_run_goes_on(monkeypatch, tmp_path):
    """SIGINT while it trains: what is done is saved, and the same call ends with the same bits."""
    from nmrun.lab.train.steps import TrainingSteps

    whole = nmrun.run(SHORT, output_dir="whole")
    step, sent = TrainingSteps.train_step, list[None]()

    def interrupted(self, *where, **how):
        if self.step == 3 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return step(self, *where, **how)

    monkeypatch.setattr(TrainingSteps, "train_step", interrupted)
    before = process()
    with pytest.raises(KeyboardInterrupt):
        nmrun.run(SHORT)
    assert process() == before
    (left,) = tmp_path.glob("outputs/**/result.json")
    assert json.loads(left.read_text())["status"] == "interrupted"
    run = nmrun.run(SHORT)
    assert run.status == "finished"
    assert "goes on at step" in (run.folder / "run.log").read_text()
    a, b = (load_file(one.folder / "model.safetensors") for one in (run, whole))
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
def test_runs_in_threads_are_those_alone():
    def run(seed: int, place: str) -> bytes:
        words = [*SHORT, "recipe=sr_ste", f"output_dir={place}"]
        return (nmrun.run(words, seed=seed).folder / "model.safetensors").read_bytes()

    alone = [run(seed, "alone") for seed in (2, 3)]
    assert alone[0] != alone[1]
    before = process()
    for number in range(5):
        with ThreadPoolExecutor(2) as pool:
            pair = [pool.submit(run, seed, f"pair{number}") for seed in (2, 3)]
            assert [one.result() for one in pair] == alone
    assert process() == before


@contextlib.contextmanager
def of_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("entered", "words"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "recipe=step"),
        # whose own autocast has to see the weights of each step
        (lambda: torch.autocast("cpu", torch.bfloat16), "recipe=dense trainer.precision=bf16"),
        (lambda: torch.autocast("cpu", enabled=False), "recipe=dense trainer.precision=bf16"),
        (torch.no_grad, "recipe=step"),
        (torch.inference_mode, "recipe=step"),
        (of_float64, "recipe=step"),
        (lambda: torch.device("meta"), "recipe=step"),
    ],
)
def test_a_run_is_the_same_whatever_torch_is_told_around_it(entered, words):
    def run(place: str) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        folder = nmrun.run([*SHORT, *words.split(), f"output_dir={place}"]).folder
        result = result_of(folder)
        return (folder / "model.safetensors").read_bytes(), result["metrics"], result["flops"]

    alone = run("alone")
    with entered():
        before = process()
        inside = run("inside")
        assert process() == before
    assert inside == alone


def test_a_run_inside_a_run_does_not_wait_for_it():
    done = []

    def nested() -> None:
        with runs.unchanged():
            done.append(nmrun.run([*SHORT, "dry=true"]).status)

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(120)
    assert done == ["planned"]


def test_history_is_the_file():
    run = nmrun.run(SHORT)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    history = run.history()
    assert len(history) == len(lines)
    for row, line in zip(history.to_dict("records"), lines, strict=True):
        assert {key: value for key, value in row.items() if value == value} == json.loads(line)
    assert history["step"].dtype == "int64"
    (run.folder / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="is missing"):
        run.history()


@pytest.mark.parametrize("recipe", ["sr_ste", "dense"])
def test_the_model_has_the_saved_weights(recipe):
    run = nmrun.run([*SHORT, f"recipe={recipe}"])
    before = process()
    model = run.model()
    assert process() == before
    assert not model.training
    state, saved = model.state_dict(), load_file(run.folder / "model.safetensors")
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    groups = state["inner.0.weight"].movedim(1, -1).unflatten(-1, (-1, 4))
    assert bool(((groups != 0).sum(-1) <= 2).all()) == (recipe != "dense")
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_network_that_ends_dense_is_a_dense_model(tmp_path, capsys):
    run = nmrun.run([*SHORT, "recipe=t_sr_ste", "recipe.interval=2", "recipe.dense_end=0.5"])
    state, saved = run.model().state_dict(), load_file(run.folder / "model.safetensors")
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert bool((state["inner.0.weight"] != 0).all())
    assert verb("export", str(run.folder), "--out", str(tmp_path / "to")) == 2
    assert "is a dense run" in capsys.readouterr().err


def test_weights_that_were_changed_are_refused():
    from safetensors.torch import save_file

    run = nmrun.run([*SHORT, "recipe=sr_ste"])
    state = load_file(run.folder / "model.safetensors")
    save_file(
        {**state, "inner.0.weight": state["inner.0.weight"] + 1.0}, run.folder / "model.safetensors"
    )
    with pytest.raises(RunError, match=r"model\.safetensors: [^\n]*$"):
        run.model()
    (run.folder / "result.json").unlink()
    with pytest.raises(RunError, match=r"no finished run[^\n]*$"):
        run.model()


@pytest.mark.slow
@pytest.mark.parametrize("initialised", [False, True])
def test_the_process_stays_as_it_was(initialised):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    if initialised:
        initialize_config_module("nmrun.conf", version_base="1.3").__enter__()
    try:
        before = process()
        assert (before["hydra"] is not None) == initialised
        nmrun.run(SHORT, seed=5)  # with trainer.threads=1
        assert process() == before
        nmrun.sweep([*SHORT, "seed=6,7"])
        assert process() == before
        with pytest.raises(ConfigError):
            nmrun.run("recipe=stpe")
        assert process() == before
    finally:
        GlobalHydra.instance().clear()
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_garbage_of_the_caller_is_not_kept():
    code = """
import gc, weakref
import nmrun
class Mine: pass
mine = Mine()
mine.cycle, gone = mine, weakref.ref(mine)
nmrun.run("dry=true")
del mine
gc.collect()
assert gone() is None"""
    assert python("-c", code).returncode == 0


def test_cuda_begins_with_a_run_that_uses_it(monkeypatch):
    begun, seeds = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: begun.append("states") or [])
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(7)
    with runs.unchanged():
        assert not begun
    seeds.clear()
    with runs.unchanged():
        begun.append("a run")
        torch.manual_seed(8)
    assert begun == ["a run"]
    assert seeds == [8, 7]  # as it would begin without the run


@pytest.mark.slow
def test_mistakes_get_a_line(nmrun_cli):
    """The command's own lines, for what the command refuses too."""
    words = "recipe=stpe trainer.epochs=-1 trainer.epoch=1 sparsity=5:4"
    with pytest.raises(ConfigError) as raised:
        nmrun.run(words)
    theirs = nmrun_cli(*words.split()).stderr.splitlines()
    assert theirs == [f"nmrun: {line}" for line in raised.value.problems]
    assert len(theirs) == 4
    for call, line in {
        "--help": "--help: not for Python",
        "-m seed=0,1": "--multirun: not for Python; nmrun.sweep does several runs",
        "seed=0,1": "seed=0,1: several values make a sweep; add -m",
        "seed='1": "seed='1: No closing quotation",
    }.items():
        with pytest.raises(ConfigError) as raised:
            nmrun.run(call)
        assert str(raised.value) == line
    assert not Path("outputs").exists()


@pytest.mark.parametrize("place", ["launcher=joblib", "--config-dir mine debug=aside"])
def test_a_sweep_of_the_library_has_no_launcher(place):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs joblib's launcher")
    Path("mine/debug").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [override /hydra/launcher: joblib]\n"
    Path("mine/debug/aside.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^launcher=joblib: Hydra's launchers are for"):
        nmrun.sweep(f"{place} seed=0,1 dry=true")
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_a_failed_run_is_an_error():
    with pytest.raises(RunError, match=r"^step 2: the loss is [^\n]*outputs/\S+$"):
        nmrun.run([*SHORT, "recipe=ste", "optimizer=sgd"], optimizer={"lr": 1e30})


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("seed", 3, 3),
        ("seed", np.int64(3), 3),
        ("optimizer.lr", 1e-5, 1e-5),
        ("trainer.clip", None, None),
        ("sparsity.pad", True, True),
        ("sparsity", "2:8", "2:8"),
        ("trainer.budget", "0.5", 0.5),  # as typed
        ("output_dir", "a, b=(c)", "a, b=(c)"),
        ("output_dir", Path("a:b"), "a:b"),
        ("output_dir", "it's", "it's"),
        ("output_dir", Path("/home/josé/runs"), "/home/josé/runs"),
        ("model.exclude", ("stem", r"head\.\d+"), ["stem", r"head\.\d+"]),
        ("model.hidden", [64, 32], [64, 32]),
        ("sparsity.overrides", {"inner.1": "1:8"}, {"inner.1": "1:8"}),
        ("model.options", {"patch_size": 4}, {"patch_size": 4}),
        ("model.options", {}, {}),
    ],
)
def test_settings_are_read_as_they_were_given(key, value, read):
    (word,) = runs.words_of({key: value})
    (override,), problems = command_line.parsed([word])
    assert problems == []
    assert override.key_or_group == key
    assert command_line.values(override, []) == [read]
    group, _, leaf = key.partition(".")
    if leaf:
        assert runs.words_of({group: {leaf: value}}) == [word]


@pytest.mark.slow
def test_a_sweep_is_that_of_the_command_line(nmrun_cli, tmp_path):
    swept = ["recipe=step,dense", "sparsity=2:4,1:4", "seed=0,1"]
    frame = nmrun.sweep([*SHORT, *swept])
    assert set(frame["status"]) == {"finished"}
    places = [str(Path(folder)) for folder in frame["folder"]]
    assert len(places) == len(set(places)) == 6  # dense has no ratio
    process = nmrun_cli("-m", *SHORT, *swept)
    assert process.stdout.splitlines()[-2].startswith("sweep of 6: 6 skipped")
    assert {
        str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("result.json")
    } == set(places)
    assert sorted(zip(frame["recipe"], frame["sparsity"], frame["seed"], strict=True)) == [
        (recipe, ratio, seed)
        for recipe, ratio in (("dense", "dense"), ("step", "1:4"), ("step", "2:4"))
        for seed in (0, 1)
    ]
    records = [path.parent for path in tmp_path.glob("outputs/.sweeps/*/sweep.json")]
    assert len(records) == 2
    ours = sweep.read(min(records, key=lambda record: sweep.read(record).begun or 0.0))
    assert ours.jobs == len(ours.ends) == 6
    assert ours.counts() == {"finished": 6}


def test_a_sweep_goes_on_behind_a_failure(capsys):
    frame = nmrun.sweep([*SHORT, "recipe=ste", "optimizer=sgd", "optimizer.lr=1e30,1e-3"])
    assert frame["status"].tolist() == ["failed", "finished"]
    assert frame["optimizer.lr"].tolist() == [1e30, 1e-3]
    assert "sweep of 2: 1 finished, 1 not done" in capsys.readouterr().out


def test_a_plan_trains_nothing():
    run = nmrun.run(SHORT, dry=True)
    assert (run.status, run.metrics) == ("planned", {})
    assert not Path("outputs").exists()
    with pytest.raises(RunError):
        run.history()


def test_a_planned_sweep_has_no_rows(capsys):
    assert nmrun.sweep([*SHORT, "recipe=ste", "seed=0,1", "dry=true"]).empty
    assert "sweep of 2: 2 planned" in capsys.readouterr().out
    assert not Path("outputs").exists()


def test_importing_is_cheap():
    code = (
        "import sys, nmrun; names = dir(nmrun); "
        "assert {'run', 'sweep', 'runs', 'table', 'plot', 'Result'} <= set(names); "
        "assert not {'torch', 'pandas', 'hydra', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
