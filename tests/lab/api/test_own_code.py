"""Runs of a class or a function of one's own that was edited: nothing takes them for the same."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs import TINY, result_of, signal_after

import nmrun
from nmrun import recipes
from nmrun.errors import ConfigError
from nmrun.lab.api import runs
from nmrun.lab.config import sources

RECIPE = """from dataclasses import dataclass
from nmrun.recipes.step import STEP

@dataclass
class Step(STEP):
    t_max: float = 0.5
"""
NETWORK = """from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, classes))
"""
WORDS = [word for word in TINY if not word.startswith("model.")]
OWN = [*WORDS, "model=mlp", "recipe._target_=my_step.Step"]


class Sized(recipes.SRSTE):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits come within a second
    for name in ("my_step", "my_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        sources._read.pop(name, None)
    Path("my_step.py").write_text(RECIPE)
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/net.yaml").write_text("name: net\n_target_: my_net.build\n")
    Path("my_net.py").write_text(NETWORK)


def edit(module: str, old: str, new: str) -> None:
    """Change a file, and let the process load it again, as a new one would."""
    file = Path(f"{module}.py")
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    importlib.invalidate_caches()
    importlib.reload(sys.modules[module])


def source_of(run: nmrun.lab.api.runs.Result, group: str = "recipe") -> str:
    source: str = result_of(run.folder)["config"][group]["_source_"]
    return source


@pytest.mark.slow
def test_a_finished_run_is_told_to_be_of_other_code(tmp_path, capsys):
    first = nmrun.run(OWN)
    place = first.folder.relative_to(tmp_path).parts[:5]  # not that of its base
    assert place == ("outputs", "digits", "mlp", "my_step.Step", "2of4")
    edit("my_step", "t_max: float = 0.5", "t_max: float = 0.5  # half of it")
    assert nmrun.run(OWN).status == "skipped"
    assert "my_step.Step changed" not in capsys.readouterr().err
    edit("my_step", "t_max: float = 0.5", "t_max: float = 0.9")
    again = nmrun.run(OWN)
    assert (again.status, again.folder) == ("skipped", first.folder)
    assert "my_step.Step changed" in capsys.readouterr().err

    other = nmrun.run([*OWN, "seed=1"])
    assert source_of(other) != source_of(first)
    with pytest.raises(ConfigError, match=r"differ in recipe\._source_"):
        nmrun.table()
    apart = nmrun.table(rows="recipe,recipe._source_")
    assert set(apart["recipe"]) == {"my_step.Step"}
    assert set(apart["recipe._source_"]) == {source_of(first), source_of(other)}
    with pytest.raises(ConfigError, match=r"differ in recipe\._source_"):
        nmrun.plot()

    trained = nmrun.run([*OWN, "force=true"])
    assert (trained.status, trained.folder) == ("finished", first.folder)
    assert source_of(trained) == source_of(other)
    nmrun.table()
    assert nmrun.run(OWN).status == "skipped"
    assert "my_step.Step changed" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_code_has_both():
    with signal_after(4, 2), pytest.raises(KeyboardInterrupt):
        nmrun.run(OWN)
    (left,) = Path("outputs").glob("**/result.json")
    before = result_of(left.parent)["config"]["recipe"]["_source_"]
    edit("my_step", "t_max: float = 0.5", "t_max: float = 0.9")
    run = nmrun.run(OWN)
    assert run.status == "finished"
    now = sources.source("my_step.Step")
    assert now != before
    assert source_of(run) == f"{before}+{now}"
    log = (run.folder / "run.log").read_text()
    assert re.search(r"my_step\.Step changed", log)


@pytest.mark.slow
def test_a_run_that_begins_with_weights_of_another_network_s_code_is_told():
    words = ["--config-dir", "mine", *WORDS, "model=net"]
    first = nmrun.run([*words, "recipe=dense"])
    begun = [*words, "recipe=ste", f"init={first.folder}"]
    same = nmrun.run([*begun, "seed=1"])
    assert "my_net.build" not in (same.folder / "run.log").read_text()
    edit("my_net", "nn.Flatten(),", "nn.Flatten(), nn.Identity(),")
    edit("my_net", "nn.Identity(), nn.Linear(64", "nn.Linear(64")
    edit("my_net", "return ", "width = 16\n    return ")
    other = nmrun.run(begun)
    assert re.search(r"before my_net\.build changed", (other.folder / "run.log").read_text())
    assert source_of(other, "model") != source_of(first, "model")


def test_a_class_of_a_notebook_that_was_redefined_is_told(monkeypatch, capsys):
    main = sys.modules["__main__"]

    def cell(text: str) -> None:
        exec(text, vars(main))
        monkeypatch.setattr(main, "In", [text], raising=False)

    words = [*WORDS, "model=mlp", "recipe._target_=__main__.Step"]
    cell(RECIPE)
    try:
        assert nmrun.run(words).status == "finished"
        cell(RECIPE.replace("0.5", "0.9"))
        assert nmrun.run(words).status == "skipped"
        assert "__main__.Step changed" in capsys.readouterr().err
    finally:
        del main.Step


# --- a recipe as an object ------------------------------------------------------------------------


def asked(recipe: object) -> list[str]:
    return runs.parse(None, {"recipe": recipe}, multirun=False)[0]


def test_an_object_or_a_class_is_what_its_config_says():
    my_step = importlib.import_module("my_step")
    path = "recipe._target_=my_step.Step"
    assert asked(my_step.Step) == asked(my_step.Step()) == [path]
    assert asked(my_step.Step(t_max=0.25)) == [path, "recipe.t_max=0.25"]
    assert asked(recipes.STEP()) == ["recipe=step"]
    assert asked(recipes.SRSTE(decay=0.5)) == ["recipe=sr_ste", "recipe.decay=0.5"]


def test_an_object_that_no_config_can_say_is_refused_in_a_line():
    my_step = importlib.import_module("my_step")
    old = my_step.Step()
    edit("my_step", "t_max: float = 0.5", "t_max: float = 0.9")

    @dataclass
    class Inside(recipes.SRSTE):
        pass

    new, marked = sys.modules["my_step"].Step(t_max=torch.ones(2)), recipes.SRSTE()
    marked.beside = 3
    for recipe, says in (
        (old, "make the recipe anew after a change"),
        (Inside(), "define it outside of functions"),
        (new, "recipe.t_max: a Tensor: it takes a number"),
        (marked, "beside: no field"),
        (Sized(3), "recipe=Sized cannot be made from its fields: "),
        (int, "not a subclass of nmrun.recipes.base.Recipe"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)) as caught:
            asked(recipe)
        assert len(caught.value.problems) == 1
