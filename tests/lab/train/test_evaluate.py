"""By which weights a run is evaluated, against a plain copy of the model that holds them."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import mask_of
from runs import config
from safetensors.torch import load_file

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.config.identity import identity
from nmrun.lab.config.schema import refusals
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.signals import Signals
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.train import weights
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.lab.train.runner import run

LONG = ("recipe=sr_ste", "recipe.decay=0.1", "optimizer.lr=0.02", "trainer.evaluate=both")


@pytest.mark.parametrize("mode", ["sparse", "dense", "both"])
def test_metrics_are_of_the_weights_that_were_asked_for(mode, tmp_path):
    asked = config(tmp_path, *LONG[:3], f"trainer.evaluate={mode}")
    parts = build(asked)
    loop = Loop(asked, parts, Console(None), "0123456789")
    assert loop.train(tmp_path, None, Signals())
    twin = copy.deepcopy(parts.model).eval()
    with torch.no_grad():
        of_sparse = parts.task.evaluate(twin, "val")
        for weight in parts.handle.sparse:
            twin.get_parameter(weight.name).copy_(weight.dense)
        of_dense = parts.task.evaluate(twin, "val")
    assert of_sparse["loss"] != of_dense["loss"]
    row = loop.evaluation.row(Signals())
    expected = of_dense if mode == "dense" else of_sparse
    assert {key: row[f"eval/{key}"] for key in expected} == pytest.approx(expected)
    beside = {key.removeprefix("eval/dense/"): v for key, v in row.items() if "dense/" in key}
    assert beside == pytest.approx(of_dense if mode == "both" else {})
    assert bool(loop.evaluation.best) == (
        mode != "dense"
    )  # best.safetensors is N:M, and was not evaluated


@pytest.mark.parametrize("recipe", ["dense", "asp", "sr_ste", "t_sr_ste"])
def test_a_result_has_both(recipe, tmp_path):
    result = run(config(tmp_path, f"recipe={recipe}", *LONG[2:]), tmp_path / recipe)
    assert result["status"] == "finished", result
    final = result["metrics"]["final"]
    plain = {key for key in final if "dense/" not in key}
    assert {key.replace("/", "/dense/") for key in plain} == set(final) - plain
    same = all(final[key] == final[key.replace("/", "/dense/")] for key in plain)
    assert same == (recipe in ("dense", "asp"))  # ASP's pruned weights are 0 themselves


def test_a_result_of_dense_weights_alone(tmp_path):
    both = run(config(tmp_path, *LONG), tmp_path / "both")["metrics"]
    alone = run(config(tmp_path, *LONG, "trainer.evaluate=dense"), tmp_path / "dense")["metrics"]
    assert alone["best"] == {}
    assert both["best"]
    assert alone["final"] == {
        key.replace("dense/", ""): value for key, value in both["final"].items() if "dense/" in key
    }


def test_without_the_test_split(tmp_path, monkeypatch):
    """It is not looked at, with no weights; what is trained is the same."""
    whole = run(config(tmp_path, *LONG), tmp_path / "whole")
    splits: set[str] = set()
    evaluate = Classification.evaluate

    def noted(task, model, split):
        splits.add(split)
        return evaluate(task, model, split)

    monkeypatch.setattr(Classification, "evaluate", noted)
    result = run(config(tmp_path, *LONG, "trainer.test=false"), tmp_path / "without")
    assert splits == {"val"}
    for kind in ("final", "best"):
        assert result["metrics"][kind] == {
            key: value
            for key, value in whole["metrics"][kind].items()
            if not key.startswith("test/")
        }
    assert result["id"] != whole["id"]
    weights, others = (
        load_file(tmp_path / of / "model.safetensors") for of in ("whole", "without")
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_run_keeps_its_dense_weights_and_another_begins_with_them(tmp_path):
    result = run(config(tmp_path, "recipe=ste", "trainer.evaluate=both"), tmp_path / "ste")
    final, dense = (load_file(tmp_path / f"ste/{name}.safetensors") for name in ("model", "dense"))
    assert list(final) == list(dense)
    layers = {layer["name"]: layer["dim"] for layer in result["sparsity"]["layers"]}
    assert layers
    for name, weight in dense.items():
        if name in layers:
            assert weight.count_nonzero() > 1.5 * final[name].count_nonzero(), name
            last = weight.movedim(layers[name], -1)  # N:M is what STE's forward pass makes of it
            weight = torch.where(mask_of(last), last, 0.0).movedim(-1, layers[name])
        assert torch.equal(final[name], weight), name
    begins = config(tmp_path, "recipe=dense", f"init={tmp_path}/ste/dense.safetensors")
    model = weights.network(begins, tasks.build(begins, torch.device("cpu")))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, dense[name])


def test_which_weights_a_run_begins_with_is_part_of_its_id(tmp_path, monkeypatch):
    def id_of(key: str, place: str) -> str:
        return identity(config(tmp_path, "recipe=maskllm", f"{key}={place}"))

    run(config(tmp_path, "recipe=ste", "trainer.evaluate=both"), tmp_path / "ste")
    files, keys = ("", "/model.safetensors", "/best.safetensors", "/dense.safetensors"), {}
    for key in ("init", "trainer.distill", "recipe.masks"):
        ids = keys[key] = [id_of(key, f"{tmp_path}/ste{file}") for file in files]
        assert ids[0] == ids[1], key
        assert len(set(ids)) == 3, key
    monkeypatch.setenv("HOME", str(tmp_path))
    for key, ids in keys.items():
        assert id_of(key, "'~/ste'") == ids[0], key
    (tmp_path / "ste").rename(tmp_path / "moved")
    for key, ids in keys.items():
        assert id_of(key, f"{tmp_path}/moved/dense.safetensors") == ids[3], key


@pytest.mark.parametrize("key", ["init", "trainer.distill", "recipe.masks"])
def test_a_key_takes_a_run_or_a_file_of_its_weights(key, tmp_path, monkeypatch):
    run(config(tmp_path, "recipe=ste"), tmp_path / "ste")
    monkeypatch.setenv("HOME", str(tmp_path))

    def refused(place: str) -> list[str]:
        words = ("recipe=maskllm", "track=local", "trainer.device=cpu", f"{key}={place}")
        return [*refusals(config(tmp_path, *words).plain)]

    for place in ("ste", "ste/best.safetensors", "ste/model.safetensors"):
        assert refused(f"'{tmp_path}/{place}'") == refused(f"'~/{place}'") == []
    for place, why in (
        ("nowhere", "no finished run is there"),
        ("ste/dense.safetensors", "the run has no dense.safetensors"),
        ("ste/other.safetensors", "there is no such file"),
    ):
        (line,) = refused(f"'~/{place}'")
        assert line.startswith(f"{key}=~/{place}: {why}")
    recipe = key == "recipe.masks"  # which reads by safetensors alone
    takes = ".safetensors" if recipe else ".safetensors, .pt, .pth, .bin"
    for name in ("notes.txt", "mine.pt"):
        (tmp_path / name).touch()
        line = f"{key}=~/{name}: a file of weights is {takes}"
        assert refused(f"'~/{name}'") == ([line] if recipe or name == "notes.txt" else [])
    (tmp_path / "ste" / "result.json").unlink()
    for name in ("best", "model"):  # any file is good enough for a recipe
        told = [] if recipe else [f"{key}=~/ste/{name}.safetensors: no finished run is there"]
        assert refused(f"'~/ste/{name}.safetensors'") == told
    with pytest.raises(ConfigError, match=r"a run's weights are model.safetensors, best"):
        RunFolder(tmp_path / "ste").demand(key, "other.safetensors")
