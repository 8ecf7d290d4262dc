"""The data set and the model of the page on one's own: its very text, run by its very
command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/own-data-and-model.md"
NAMES = ("tumours", "gated")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for code, config, group, name in zip(
        blocks("python")[:2], blocks("yaml")[:2], ("dataset", "model"), NAMES, strict=True
    ):
        (tmp_path / f"{name}.py").write_text(code)
        place = tmp_path / "mine" / group / f"{name}.yaml"
        place.parent.mkdir(parents=True)
        place.write_text(config)
    return tmp_path


@pytest.mark.slow
def test_it_trains_and_is_sparse(folder, nmrun_cli):
    (command,) = blocks("bash")
    process = nmrun_cli(*shlex.split(command)[1:], "track=local")
    assert process.returncode == 0, process.stderr
    (path,) = folder.glob("outputs/tumours/gated/step/2of8/*/result.json")
    result = json.loads(path.read_text())
    assert result["metrics"]["final"]["test/accuracy"] > 0.9
    layers = [(layer["name"], layer["holds"]) for layer in result["sparsity"]["layers"]]
    assert layers == [("value.weight", True), ("gate.weight", True)]
    again = nmrun_cli(*shlex.split(command)[1:], "track=local")
    assert "finished already" in again.stdout


@pytest.mark.slow
def test_it_is_tuned_and_each_run_s_command_asks_for_it(folder, nmrun_cli):
    (command,) = blocks("bash")
    options = ("track=local", "trainer.epochs=1", "seed=0", "--trials", "1")
    process = nmrun_cli("tune", "try", *shlex.split(command)[1:], *options)
    assert process.returncode == 0, process.stderr
    assert "step 2:8  seed 0" in process.stdout
    (path,) = folder.glob("outputs/tumours/gated/step/2of8/*/result.json")
    asked = json.loads(path.read_text())["environment"]["command"]
    assert "finished already" in nmrun_cli(*shlex.split(asked)[1:]).stdout


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("dataset._target_=tumours.biuld", "dataset._target_=tumours.biuld cannot be imported"),
        ("model._target_=nowhere.build", "cannot be imported: there is no nowhere.py here"),
        ("model._target_=build", "model._target_=build: it takes package.function"),
        ("dataset.name=a/b", "dataset.name=a/b: it names a folder"),
        ("model._target_=gated.lost", "returned a NoneType"),
        ("dataset._target_=tumours.lost", "returned a NoneType"),
    ],
)
def test_mistakes_get_a_line(folder, nmrun_cli, word, message):
    for name, takes in (("gated", "shape, classes, width"), ("tumours", "config, device")):
        with (folder / f"{name}.py").open("a") as file:
            file.write(f"\n\ndef lost({takes}):\n    build({takes})\n")
    process = nmrun_cli("--config-dir", "mine", "dataset=tumours", "model=gated", word)
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
    assert not list(folder.rglob("result.json"))


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment in which the page's package is installed: its modules and metadata."""
    package, metadata = tmp_path / "site" / "mypkg", tmp_path / "site" / "mypkg-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    *builders, keys = blocks("python")
    for name, code in zip((*NAMES, "keys"), (*builders, keys), strict=True):
        (package / f"{name}.py").write_text(code.replace('options["split_seed"]', "split_seed"))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mypkg\nVersion: 1.0\n")
    (points,) = blocks("toml")
    groups = tomllib.loads(points)["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in names.items())
        for group, names in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    path = filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.slow
def test_an_installed_package_adds_names(installed, nmrun_cli, tmp_path):
    words = ("dataset=tumours", "model=gated", "recipe=step", "sparsity=2:8", "track=local")
    process = nmrun_cli(*words, **installed)
    assert process.returncode == 0, process.stderr
    (path,) = tmp_path.glob("outputs/tumours/gated/step/2of8/*/result.json")
    result = json.loads(path.read_text())
    assert result["metrics"]["final"]["test/accuracy"] > 0.9
    asked = {k: v for k, v in result["config"]["model"].items() if k != "_source_"}
    assert asked == {"name": "gated", "width": 64, "include": None, "exclude": ["first", "last"]}
    for word, message in (
        ("model.width=0", "model.width=0: it takes a whole number, 1 or more"),
        ("model.depth=3", "model.depth: no such key"),
        ("dataset=tumour", "dataset=tumour: no such dataset; did you mean tumours?"),
        ("model=gpt_reader", "model=gpt_reader is for questions on texts"),
    ):
        wrong = nmrun_cli(*words, word, **installed)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
        assert message in wrong.stderr
    assert "width" in nmrun_cli("help", "model=gated", **installed).stdout
    assert "tumours" in nmrun_cli("--help", **installed).stdout


@pytest.mark.slow
def test_a_package_that_is_broken_breaks_its_own_names_alone(installed, nmrun_cli, tmp_path):
    (tmp_path / "site" / "mypkg" / "keys.py").write_text("import nowhere\n")
    assert nmrun_cli("--cfg", "job", **installed).returncode == 0
    wrong = nmrun_cli("dataset=tumours", **installed)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
    assert "dataset=tumours: mypkg.keys:Tumours cannot be imported" in wrong.stderr
