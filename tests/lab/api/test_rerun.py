"""A run folder may come from anybody: what it would have run is shown, and needs consent."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config, result_of
from safetensors.torch import save_file
from verbs import verb

from nmrun.errors import RunError
from nmrun.lab.api.runs import Result
from nmrun.lab.compare.runs import collect, to_csv
from nmrun.lab.config.composition import config_of
from nmrun.lab.config.identity import identity
from nmrun.lab.runs.run_folder import sealed

MODULE = """
from pathlib import Path
Path("imported").touch()
def build(config, device):
    Path("imported").touch()  # it may be imported by a test before
    raise ValueError("built")
"""


@pytest.fixture
def folder(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and beside it a module that says when it is imported."""
    place: Path = write("ste", "2:4", 0, 0.5)
    (tmp_path / "brought.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return place


def seal(folder: Path, command: str, **changes: Any) -> None:
    (folder / "config.yaml").write_text(f"# {command}\nseed: 0\n")
    save_file({"w": torch.zeros(4, 4)}, folder / "model.safetensors")
    result = result_of(folder)
    for key, value in changes.items():
        result[key] = {**result[key], **value}
    (folder / "result.json").write_text(json.dumps(sealed(result, folder)))


@pytest.mark.parametrize(
    "word",
    [
        "+hydra.callbacks.x={_target_: brought.build}",
        "hydra/launcher=joblib",
        "model._target_=brought.build",
        "+model={_target_: brought.build}",
        "model=${oc.create:\"{'_targ\\x65t_': brought.build}\"}",
        "+model@x=mlp",
        "experiment=brought.yaml",
        "--config-dir=.",
    ],
)
def test_code_needs_consent(word, folder, capsys):
    seal(folder, f"nmrun recipe=ste dry=true {shlex.quote(word)}")
    assert verb("rerun", str(folder)) == 2
    out, err = capsys.readouterr()
    assert word in shlex.split(out)
    assert f"{word} of {folder} may run any code" in err
    assert "--yes" in err
    assert not Path("imported").exists()


def test_what_the_user_adds_needs_no_consent_and_replaces_how_the_run_was_begun(folder, capsys):
    seal(folder, "nmrun recipe=ste force=true resume=False dry=true")
    assert verb("rerun", str(folder), "recipe._target_=nowhere.Mine") == 2
    out, err = capsys.readouterr()
    assert out == "nmrun recipe=ste dry=true recipe._target_=nowhere.Mine\n"
    assert "there is no nowhere.py here" in err
    assert verb("rerun", str(folder), "force=true", "recipe._target_=nowhere.Mine") == 2
    assert "force=true" in capsys.readouterr().out


def test_the_folder_that_is_changed_to_is_shown(folder, capsys, monkeypatch):
    command = "nmrun recipe=ste model._target_=brought.build"
    seal(folder, command)
    Path("outputs", "digits").mkdir(exist_ok=True)
    monkeypatch.chdir(Path("outputs", "digits"))
    assert verb("rerun", str(folder)) == 2
    assert capsys.readouterr().out == f"cd ../.. && {command}\n"


@pytest.mark.parametrize(
    "command",
    [
        "cd outputs && nmrun recipe=ste",
        "sh -c id",
        "",
        "nmrun 'recipe=ste",
    ],
)
def test_no_command_of_ours(command, folder, capsys):
    seal(folder, "", environment={"command": command})
    assert verb("rerun", str(folder)) == 2
    assert f"{folder}: its command cannot be given here: {command}" in capsys.readouterr().err


def test_another_command_above_the_config_is_refused(folder, capsys):
    seal(folder, "nmrun recipe=ste seed=0")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("seed=0", "seed=7"))
    assert verb("rerun", str(folder)) == 1
    assert f"{folder / 'config.yaml'}: it was changed" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["export RUN --out new --format onnx", "prune RUN", "ratios RUN"])
@pytest.mark.parametrize("target", ["brought.build", "torch.hub.load", "nmrun.lab.cli.main"])
def test_a_model_of_its_own_needs_consent(words, target, folder, capsys):
    settings = {"name": "own", "_target_": target, "include": "auto", "exclude": None}
    layers = {"pattern": "2:4", "layers": [{"name": "w"}]}
    seal(folder, "nmrun", config={"model": settings}, sparsity=layers)
    assert verb(*words.replace("RUN", str(folder)).split()) == 2
    assert f"the run imports {target}, which may do anything; --yes" in capsys.readouterr().err
    with pytest.raises(RunError, match=target):
        Result("finished", {"model": {"name": "mlp"}}, {}, folder).model()
    assert not Path("imported").exists()


def test_consent_imports(folder, tmp_path, capsys):
    layers = {"pattern": "2:4", "layers": [{"name": "w"}]}
    data = {"name": "own", "_target_": "brought.build"}
    whole = config(tmp_path).plain
    seal(folder, "nmrun", config={**whole, "dataset": data}, sparsity=layers)
    line = ("export", str(folder), "--out", "new", "--format", "onnx")
    assert verb(*line) == 2
    assert not Path("imported").exists()
    assert verb(*line, "--yes") in (1, 2)
    assert "the run imports" not in capsys.readouterr().err.splitlines()[-1]
    assert Path("imported").exists()


# --- a line of a CSV file -------------------------------------------------------------------------

RESULTS = Path(__file__).parents[3] / "docs/results"


def test_a_line_of_a_file_of_runs_is_the_run_again(tmp_path, monkeypatch, capsys):
    """Its settings come from the file alone: the same id, and the same metrics to the last bit."""
    monkeypatch.chdir(tmp_path)
    words = ("dataset=digits", "recipe=asp", "recipe.prune_at=0.25", "sparsity=1:4", "seed=3")
    more = ("optimizer=sgd", "optimizer.lr=0.03", "model.channels=[8,8]")
    short = ("trainer.epochs=1", "trainer.limit_batches=3", "track=local", "trainer.threads=1")
    assert verb(*words, *more, *short) == 0
    Path("runs.csv").write_text(to_csv(collect(["outputs"])))
    (first,) = Path("outputs").rglob("result.json")
    capsys.readouterr()
    assert verb("rerun", "runs.csv:2", "output_dir=again", "track=local") == 0
    (again,) = Path("again").rglob("result.json")
    results = [result_of(path.parent) for path in (first, again)]
    assert results[0]["id"] == results[1]["id"]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert "model.channels=[8,8]" in capsys.readouterr().out


@pytest.mark.parametrize("line", [2, 60, 170, 238])
def test_lines_of_committed_files_have_the_id_of_their_settings(line, monkeypatch, capsys):
    monkeypatch.setattr("nmrun.lab.sweeps.jobs.main", lambda words: asked.extend(words) or 0)
    asked: list[str] = []
    place = RESULTS / "step_long.csv"
    assert verb("rerun", f"{place}:{line}", "track=local") == 0
    assert "its id is" not in capsys.readouterr().err
    with place.open(encoding="utf-8") as file:
        run = list(csv.DictReader(file))[line - 2]
    assert identity(config_of(asked)) == run["id"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("step_long.csv:9999", "no run is in that line"),
        ("step_long.csv:1", "no run is in that line; the first is"),
        ("step_long.csv", "no run is in that line; the first is"),
        ("switch.csv:2", "the file has not all settings of a run"),
        ("images_trials.csv:2", "no file of runs: it has no column"),
        ("nowhere.csv:2", "no file of runs"),
    ],
)
def test_lines_that_make_no_run(line, complaint, capsys):
    assert verb("rerun", f"{RESULTS}/{line}") == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
