"""Weights of a finished run are taken by others as the run left them, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import config, result_of, rewrite
from verbs import verb

from nmrun.lab.config.identity import run_folder
from nmrun.lab.sweeps import jobs
from nmrun.lab.train import runner

NETWORK = ("model=mlp", "model.hidden=[16,16]", "trainer.limit_batches=1", "trainer.epochs=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run at 2:4, and beside it one with another seed."""
    root = tmp_path_factory.mktemp("finished")
    for seed in (0, 1):
        cfg = config(root / "out", "recipe=sr_ste", "sparsity='2:4'", *NETWORK, f"seed={seed}")
        assert runner.run(cfg, run_folder(cfg))["status"] == "finished"
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "out", tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("*/*/*/*/s0-*")
    return folder


def commands(folder: Path, to: Path) -> dict[str, list[str]]:
    network = [*NETWORK, "trainer.device=cpu", "trainer.threads=1", f"output_dir={to}"]
    return {
        "init": [f"init={folder}", "recipe=dense", *network],
        "init of the best": [f"init={folder}/best.safetensors", "recipe=dense", *network],
        "distill": [f"trainer.distill={folder}", "recipe=dense", *network],
        "masks": [
            *("recipe=maskllm", "recipe.dense=0.0", "optimizer=adamw"),
            *("sparsity=2:4", f"recipe.masks={folder}", *network),
        ],
        "prune": [
            "prune",
            str(folder),
            "method=magnitude",
            "samples=16",
            f"output_dir={to}",
            "sparsity=1:4",
        ],
        "ratios": ["ratios", str(folder)],
        "export": ["export", str(folder), "--out", str(to)],
    }


KINDS = tuple(commands(Path(), Path()))


def changed(path: Path) -> None:
    """The last weight, -30 times; of the same size."""
    data = bytearray(path.read_bytes())
    data[-2:] = bytes([data[-2] ^ 0x7F, data[-1] ^ 0x80])
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_are_taken_nowhere(kind, run, tmp_path, capsys):
    name = "best.safetensors" if "best" in kind else "model.safetensors"
    changed(run / name)
    assert verb(*commands(run, tmp_path / "to")[kind]) in (1, 2)
    err = capsys.readouterr().err
    assert f"{run / name}: it was changed: its SHA-256 is another" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "to").rglob("result.json")) or kind == "masks"


def test_a_link_to_another_run_is_not_this_one(run, tmp_path, capsys):
    root = tmp_path / "out"
    (other,) = root.glob("*/*/*/*/s1-*")
    shutil.rmtree(run)
    run.symlink_to(other.name)
    cfg = config(root, "recipe=sr_ste", "sparsity='2:4'", *NETWORK, "seed=0")
    ended = jobs.one(cfg)
    assert ended["status"] == "failed"
    assert f"it is of another run, whose id is {result_of(other)['id']}" in ended["error"]
    assert verb(*commands(run, tmp_path / "to")["init"]) == 2


def test_another_runs_files_in_this_folder(run, tmp_path, capsys):
    root = tmp_path / "out"
    words = ["recipe=ste", "sparsity='2:4'", *NETWORK]
    cfg = config(root, *words, "seed=0")
    folder = run_folder(cfg)
    shutil.copytree(run, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    ended = runner.run(cfg, folder)
    assert ended["status"] == "failed"
    assert "result.json: it is of another run, whose id is" in ended["error"]
    assert capsys.readouterr().err.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert runner.run(config(root, *words, "seed=0", "force=true"), folder)["status"] == "finished"


@pytest.mark.parametrize("change", [{"hidden": [2**47, 16]}, {"name": "os.system"}])
@pytest.mark.parametrize("words", ["export RUN --out TO --format onnx", "prune RUN output_dir=TO"])
def test_a_network_that_cannot_be_built_is_one_line(change, words, run, tmp_path, capsys):
    config = result_of(run)["config"]
    rewrite(run, config=config | {"model": config["model"] | change})
    assert verb(*words.replace("RUN", str(run)).replace("TO", str(tmp_path / "to")).split()) in (
        1,
        2,
    )
    err = capsys.readouterr().err
    assert err.startswith("nmrun: model")
    assert err.count("\n") == 1
