"""The recipe of the page on one's own: its text, its commands, its entry point, and
what it computes.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from errors import one_line
from runs import mistakes, result_of
from safetensors.torch import load_file

import nmrun
import nmrun.lab.sweeps.jobs  # registers the source of ratios
from nmrun import recipes
from nmrun.errors import ConfigError, RunError
from nmrun.lab.config import command_line
from nmrun.lab.config.composition import config_of
from nmrun.recipes.base import Recipe

PAGE = Path(__file__).parents[2] / "docs/own-recipe.md"
QUICK = ("sparsity=2:8", "debug=fast", "output_dir=out")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's file in it, under the name that its commands use."""
    (code,) = blocks("python")
    (tmp_path / "saliency.py").write_text(code)
    return tmp_path


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "saliency", raising=False)
    return importlib.import_module("saliency")


def install(folder: Path) -> dict[str, str]:
    """What installing a package with the page's entry point leaves: its metadata on the path.
    Returns the environment for it.
    """
    (text,) = blocks("toml")
    group = tomllib.loads(text)["project"]["entry-points"]["nmrun.recipes"]
    site = folder / "site"
    metadata = site / "saliency-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: saliency\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[nmrun.recipes]\n" + "".join(f"{k} = {v}\n" for k, v in group.items())
    )
    (folder / "saliency.py").rename(site / "saliency.py")
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), before]))}


@pytest.mark.slow
def test_all_ways_to_name_it_are_the_same_training(folder, nmrun_cli):
    """A class of the current folder, with and without recipe=custom; and the name that an installed
    package registers, which is then that of the class.
    """
    first = nmrun_cli("recipe._target_=saliency.Saliency", "recipe.beta=0.9", *QUICK)
    assert first.returncode == 0, first.stderr
    (run,) = [file.parent for file in folder.rglob("result.json")]
    place = folder / "out" / "digits" / "small_conv"
    assert run.parent == place / "saliency.Saliency" / "2of8"
    result = result_of(run)
    assert (result["status"], result["sparsity"]["pattern"]) == ("finished", "2:8")
    bits = (run / "model.safetensors").read_bytes()
    weights = load_file(run / "model.safetensors")
    assert set(weights) == {
        f"{layer}.{kind}"
        for layer in ("stem", "inner.0", "inner.1", "head")
        for kind in ("weight", "bias")
    }
    for name in ("inner.0.weight", "inner.1.weight"):
        groups = weights[name].movedim(1, -1).reshape(-1, 8)
        assert torch.all((groups != 0).sum(1) == 2)

    second = nmrun_cli(
        "recipe=custom", "recipe._target_=saliency.Saliency", "recipe.beta=0.9", *QUICK
    )
    assert (second.returncode, "finished already" in second.stdout) == (0, True), second.stderr

    path = install(folder)
    third = nmrun_cli("recipe=saliency", "recipe.beta=0.9", *QUICK, **path)
    assert third.returncode == 0, third.stderr
    (named,) = place.glob("saliency/2of8/*")
    assert (named / "model.safetensors").read_bytes() == bits
    fourth = nmrun_cli("recipe._target_=saliency.Saliency", "recipe.beta=0.9", *QUICK, **path)
    assert (fourth.returncode, "finished already" in fourth.stdout) == (0, True), fourth.stderr
    assert named.name in fourth.stdout


@pytest.mark.parametrize(("line", "name"), [("name: slow\n", "slow"), ("", "saliency.Saliency")])
def test_a_yaml_of_its_own_names_it_or_its_class_does(line, name, folder, nmrun_cli):
    (folder / "mine" / "recipe").mkdir(parents=True)
    (text,) = blocks("yaml")
    assert text.startswith("name: slow\n")
    text = line + text.removeprefix("name: slow\n")
    (folder / "mine" / "recipe" / "slow.yaml").write_text(text)
    one = nmrun_cli("--config-dir", "mine", "recipe=slow", *QUICK)
    assert one.returncode == 0, one.stderr
    (path,) = folder.rglob("result.json")
    result = json.loads(path.read_text())
    source = result["config"]["recipe"].pop("_source_")
    assert re.fullmatch("[0-9a-f]{10}", source)
    assert result["config"]["recipe"] == {
        "name": name, "_target_": "saliency.Saliency", "beta": 0.999,
    }  # fmt: skip
    words = ("--config-dir", "mine", "recipe=slow,ste", "dry=true", *QUICK)
    swept = nmrun_cli("-m", *words)
    assert swept.returncode == 0, swept.stderr
    assert "recipe=slow" in swept.stdout
    page = nmrun_cli("help", "recipe=slow", "--config-dir", "mine").stdout
    assert "recipe.beta" in page
    assert "default 0.999" in page


def test_a_registered_name_takes_part_in_sweeps_and_is_told_in_help(folder, nmrun_cli):
    path = install(folder)
    swept = nmrun_cli(
        "-m", "recipe=ste,saliency", "sparsity=2:8", "dry=true", "track=local", **path
    )
    assert swept.returncode == 0, swept.stderr
    assert "sweep of 2: 2 planned" in swept.stdout
    assert "saliency" in nmrun_cli("--help", **path).stdout
    for topic in ("recipe=saliency", "saliency", "recipe.beta"):
        told = nmrun_cli("help", topic, **path)
        assert told.returncode == 0, told.stderr
        assert "at least 0 and below 1; default 0.99\n" in told.stdout
    assert "recipe=saliency: Of every M weights" in nmrun_cli("help", "recipe", **path).stdout
    typo = nmrun_cli("recipe=salincey", **path)
    assert typo.returncode == 2
    assert typo.stderr.startswith(
        "nmrun: recipe=salincey: no such recipe; did you mean saliency? (nmrun help recipe "
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe.bta=0.9",), "saliency.Saliency: bta: no such hyperparameter; did you mean beta?"),
        (("recipe.beta=1.5",), "saliency: beta=1.5: it takes a number at least 0 and below 1"),
        (("recipe._target_=saliency.Salience",), "recipe=saliency.Salience cannot be imported: "),
        (
            ("recipe._target_=salience.Saliency",),
            "recipe._target_=salience.Saliency cannot be impor",
        ),
        (
            ("recipe._target_=saliency.torch",),
            "recipe=saliency.torch is not a subclass of nmrun.rec",
        ),
        (("recipe=saliency.Saliency",), "recipe=saliency.Saliency: alone it is recipe._target_="),
        (
            ("recipe._target_=saliency:Saliency",),
            "recipe._target_=saliency:Saliency: it takes pack",
        ),
        (("recipe._target_=",), "recipe._target_=: it takes package.Class"),
    ],
)
def test_a_mistake_gets_a_line(module, monkeypatch, words, message):
    """In this process: what the command line looks at first, and then what only the built run
    shows.
    """
    from hydra import compose, initialize_config_module

    from nmrun.lab.config import schema
    from nmrun.lab.train import build

    words = command_line.own_recipe(["recipe._target_=saliency.Saliency", "track=local", *words])
    problems = mistakes(words)
    if not problems:
        with (
            initialize_config_module("nmrun.conf", version_base="1.3"),
            pytest.raises(ConfigError) as raised,
        ):
            build.build(schema.check(compose("nmrun", words)))
        problems = raised.value.problems
    (problem,) = problems
    assert problem.startswith(message)
    assert "\n" not in problem


@pytest.mark.parametrize("named", ["dense,sr_ste", "dense,custom"])
def test_beside_named_recipes_a_class_is_refused(named):
    with one_line(ConfigError, rf"recipe\._target_ is one recipe, and recipe={named} several"):
        command_line.own_recipe([f"recipe={named}", "recipe._target_=saliency.Saliency"])


def test_a_preset_of_a_class_takes_its_fields(folder, module):
    (folder / "recipe").mkdir()
    (folder / "recipe" / "first.yaml").write_text("_target_: saliency.Saliency\n")
    (folder / "recipe" / "second.yaml").write_text("defaults: [first]\nbeta: 0.5\n")
    words = command_line.own_recipe(["recipe=second", "recipe.beta=0.9"], str(folder))
    assert mistakes(words, config_dir=str(folder)) == []
    assert config_of(words, str(folder)).plain["recipe"]["beta"] == 0.9


@pytest.mark.parametrize("method", ["begin", "choose"])
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_in_its_code_is_a_failed_run_with_a_traceback(
    error, method, folder, module, monkeypatch
):
    def broken(*_):
        raise error("mine")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(module.Saliency, method, broken)
    with pytest.raises(RunError, match=f"{error.__name__}: mine"):
        nmrun.run(["recipe._target_=saliency.Saliency", "track=local", *QUICK])
    (log,) = folder.rglob("run.log")
    assert "in broken" in log.read_text()


def test_a_field_without_a_value_is_a_mistake(folder, module, monkeypatch):
    lines = ["import dataclasses, saliency", "@dataclasses.dataclass(kw_only=True)"]
    lines += ["class Needs(saliency.Saliency):", "    size: int"]
    (folder / "needing.py").write_text("\n".join(lines))
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"needing\.Needs: .*'size'"):
        nmrun.run(["recipe._target_=needing.Needs", "track=local", *QUICK])
    assert not list(folder.rglob("result.json"))


def test_a_name_of_nmruns_own_is_not_for_others_to_take(monkeypatch):
    from importlib.metadata import EntryPoint

    points = {
        name: EntryPoint(name, "saliency:Saliency", "nmrun.recipes") for name in ("ste", "mine")
    }
    monkeypatch.setattr(recipes.registry, "installed", lambda group: points)
    assert recipes.installed.__wrapped__() == {"mine": "saliency.Saliency"}


# --- what it computes -----------------------------------------------------------------------------


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    sizes = ((6, 8), (6, 4))
    return [tuple(torch.randn(s, generator=random) for s in sizes) for _ in range(count)]


def trained(
    model: torch.nn.Linear, handle: nmrun.Handle, optimizer: torch.optim.Optimizer, some: list
) -> None:
    for x, y in some:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_is_what_a_scalar_loop_gives(module):
    """w and the running mean by hand, with SGD: the mask of each step is of the two largest |w| *
    rms(g) of every four.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4, bias=False)
    w = model.weight.detach().double().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handle = nmrun.sparsify(
        model, optimizer, recipe="saliency.Saliency", pattern="2:4", beta=0.8, exclude=None
    )
    squares, magnitude_differs = torch.zeros_like(w), 0
    for x, y in batches(12):
        mask, largest = torch.zeros_like(w), torch.zeros_like(w)
        for i in range(4):
            for begin in (0, 4):
                group, score = range(begin, begin + 4), w.abs() * (squares.sqrt() + 1e-12)
                by_score = sorted(group, key=lambda j: -score[i, j])
                by_size = sorted(group, key=lambda j: -abs(w[i, j]))
                mask[i, by_score[:2]] = largest[i, by_size[:2]] = 1.0
        magnitude_differs += int((mask != largest).any())
        assert torch.equal(model.weight != 0, mask.bool())
        torch.testing.assert_close(model.weight.detach().double(), w * mask, rtol=1e-4, atol=1e-6)
        trained(model, handle, optimizer, [(x, y)])
        gradient = 2 / 24 * (x.double() @ (w * mask).T - y.double()).T @ x.double()
        squares = 0.8 * squares + 0.2 * gradient**2
        w = w - 0.3 * gradient
    assert magnitude_differs > 3


def test_its_state_is_saved_with_the_model(module):
    """Six steps, or three, all that the page says to save, and three more: the same bits."""

    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        handle = nmrun.sparsify(model, optimizer, "saliency.Saliency", "2:4", exclude=None)
        return model, handle, optimizer

    whole, half, resumed = fresh(), fresh(), fresh()
    trained(*whole, batches(6))
    trained(*half, batches(6)[:3])
    for new, old in zip(resumed[::2], half[::2], strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    trained(*resumed, batches(6)[3:])
    assert torch.equal(whole[0].weight, resumed[0].weight)
    assert not torch.equal(whole[0].weight, half[0].weight)


@dataclasses.dataclass
class Wide(Recipe):
    """Keeps what the dtype of its weights cannot hold."""

    name: ClassVar[str] = "wide"

    def attach(self, weights, optimizer):
        for weight in weights:
            weight["mean"] = torch.full(weight.shape, 1.001, dtype=torch.float32)
            weight["exact"] = torch.full(weight.shape, 1 + 1e-12, dtype=torch.float64)
            weight["age"] = torch.full(weight.shape, 2**24 + 1, dtype=torch.int32)
            weight["usual"] = torch.full_like(weight.dense, 0.5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [0, 2])
def test_its_tensors_are_loaded_in_their_own_dtypes(steps, dtype, kind):
    model = torch.nn.Linear(8, 4).to(dtype)
    optimizer = kind(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, Wide(), "2:4", exclude=None)
    trained(model, handle, optimizer, [(x.to(dtype), y.to(dtype)) for x, y in batches(steps)])
    state = copy.deepcopy(optimizer.state_dict())
    before = {key: value.clone() for key, value in handle.sparse[0].saved().items()}
    optimizer.load_state_dict(state)
    after = handle.sparse[0].saved()
    assert {key: (v.dtype, v.tolist()) for key, v in after.items()} == {
        key: (v.dtype, v.tolist()) for key, v in before.items()
    }
    for cast in (torch.float64, torch.bfloat16):  # what has the weights' dtype follows them
        model = torch.nn.Linear(8, 4).to(cast)
        other = kind(model.parameters(), lr=0.1)
        handle = nmrun.sparsify(model, other, Wide(), "2:4", exclude=None)
        other.load_state_dict(state)
        kinds = {key: value.dtype for key, value in handle.sparse[0].saved().items()}
        assert (kinds["dense"], kinds["usual"], kinds["age"]) == (cast, cast, torch.int32)
