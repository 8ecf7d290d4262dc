"""The data set and the model of the page on one's own: its very text, run by its very
command.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/own-data-and-model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for code, config, group, name in zip(
        blocks("python"), blocks("yaml"), ("dataset", "model"), ("tumours", "gated"), strict=True
    ):
        (tmp_path / f"{name}.py").write_text(code)
        place = tmp_path / "mine" / group / f"{name}.yaml"
        place.parent.mkdir(parents=True)
        place.write_text(config)
    return tmp_path


def test_it_trains_and_is_sparse(folder: Path, nmrun_cli) -> None:
    (command,) = blocks("bash")
    done = nmrun_cli(*shlex.split(command)[1:], "track=local")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("outputs/tumours/gated/step/2of8/*/result.json")
    result = json.loads(path.read_text())
    assert result["metrics"]["final"]["test/accuracy"] > 0.9
    assert [(layer["name"], layer["holds"]) for layer in result["sparsity"]["layers"]] == [
        ("value.weight", True),
        ("gate.weight", True),
    ]
    again = nmrun_cli(*shlex.split(command)[1:], "track=local")
    assert "finished already" in again.stdout


@pytest.mark.slow
def test_it_is_tuned_and_each_run_s_command_asks_for_it(folder: Path, nmrun_cli) -> None:
    (command,) = blocks("bash")
    own = ("track=local", "trainer.epochs=1", "seed=0", "--trials", "1")
    done = nmrun_cli("tune", "try", *shlex.split(command)[1:], *own)
    assert done.returncode == 0, done.stderr
    assert "[4/4] step 2:8  seed 0" in done.stdout
    (path,) = folder.glob("outputs/tumours/gated/step/2of8/*/result.json")
    asked = json.loads(path.read_text())["environment"]["command"]
    assert "finished already" in nmrun_cli(*shlex.split(asked)[1:]).stdout


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dataset._target_=tumours.biuld", "dataset._target_=tumours.biuld cannot be imported"),
        (
            "model._target_=nowhere.build",
            "model._target_=nowhere.build cannot be imported: there is no nowhere.py here",
        ),
        ("model._target_=build", "model._target_=build: it takes package.function"),
        ("dataset.name=a/b", "dataset.name=a/b: it names a folder"),
    ],
)
def test_mistakes_get_a_line(folder: Path, nmrun_cli, word: str, said: str) -> None:
    done = nmrun_cli("--config-dir", "mine", "dataset=tumours", "model=gated", word, "track=local")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(folder.rglob("*.json"))
