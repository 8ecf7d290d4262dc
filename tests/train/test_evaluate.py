"""By which weights a run is evaluated, against a plain copy of the model that holds them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from runs import config

from nmrun.signals import Signals
from nmrun.train.build import build
from nmrun.train.console import Console
from nmrun.train.loop import Loop
from nmrun.train.runner import run

LONG = ("recipe=sr_ste", "recipe.decay=0.1", "optimizer.lr=0.02", "trainer.evaluate=both")


@pytest.mark.parametrize("mode", ["sparse", "dense", "both"])
def test_metrics_are_of_the_weights_that_were_asked_for(mode: str, tmp_path: Path) -> None:
    asked = config(tmp_path, *LONG[:3], f"trainer.evaluate={mode}")
    parts = build(asked)
    loop = Loop(asked, parts, Console(None))
    assert loop.train(tmp_path, None, Signals())
    twin = copy.deepcopy(parts.model).eval()
    with torch.no_grad():
        of_sparse = parts.task.evaluate(twin, "val")
        for weight in parts.handle.sparse:
            twin.get_parameter(weight.name).copy_(weight.dense)
        of_dense = parts.task.evaluate(twin, "val")
    assert of_sparse["loss"] != of_dense["loss"]
    row = loop.evaluation.row(1, Signals())
    wanted = of_dense if mode == "dense" else of_sparse
    assert {key: row[f"eval/{key}"] for key in wanted} == pytest.approx(wanted)
    beside = {key.removeprefix("eval/dense/"): v for key, v in row.items() if "dense/" in key}
    assert beside == pytest.approx(of_dense if mode == "both" else {})
    assert bool(loop.evaluation.best) == (
        mode != "dense"
    )  # best.safetensors is N:M, and was not evaluated


@pytest.mark.parametrize("recipe", ["dense", "asp", "sr_ste", "t_sr_ste"])
def test_a_result_has_both(recipe: str, tmp_path: Path) -> None:
    done = run(config(tmp_path, f"recipe={recipe}", *LONG[2:]), tmp_path / recipe)
    assert done["status"] == "finished", done
    final = done["metrics"]["final"]
    plain = {key for key in final if "dense/" not in key}
    assert {key.replace("/", "/dense/") for key in plain} == set(final) - plain
    same = all(final[key] == final[key.replace("/", "/dense/")] for key in plain)
    assert same == (recipe in ("dense", "asp"))  # ASP's pruned weights are 0 themselves


def test_a_result_of_dense_weights_alone(tmp_path: Path) -> None:
    both = run(config(tmp_path, *LONG), tmp_path / "both")["metrics"]
    alone = run(config(tmp_path, *LONG, "trainer.evaluate=dense"), tmp_path / "dense")["metrics"]
    assert alone["best"] == {}
    assert both["best"]
    assert alone["final"] == {
        key.replace("dense/", ""): value for key, value in both["final"].items() if "dense/" in key
    }
