"""Every kind of damage to every file of a run: what comes out is right, or it is said aloud."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import config, cut_off, result_of, rows
from verbs import verb

from nmrun.errors import ConfigError, RunError
from nmrun.lab.config.identity import run_folder
from nmrun.lab.config.schema import Config
from nmrun.lab.runs.run_folder import RESULT, SEALED
from nmrun.lab.train import runner


class Planted:
    """A pickle that writes a file where it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


def flipped(part: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = int(part * len(data))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return flip


def middle(content: bytes) -> Callable[[bytes], bytes]:
    def put(data: bytes) -> bytes:
        at = len(data) // 2
        return data[:at] + content + data[at + len(content) :]

    return put


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "first byte gone": lambda data: data[1:],
    "last bytes gone": lambda data: data[:-3],
    "cut in half": lambda data: data[: len(data) // 2],
    "second half alone": lambda data: data[len(data) // 2 :],
    "halves swapped": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "twice": lambda data: data + data,
    "zeros behind": lambda data: data + bytes(512),
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "zeros in the middle": middle(bytes(48)),
    "not UTF-8": middle(b"\xff\xfe\xfd"),
    "text in the middle": middle(b"was something else"),
    "a bit, early": flipped(0.1),
    "a bit, in the middle": flipped(0.5),
    "a bit, late": flipped(0.9),
    "text": lambda data: b"nothing of nmrun\n",
    "an empty object": lambda data: b"{}\n",
    "a pickle": lambda data: pickle.dumps(Planted()),
}
KINDS = [*CONTENTS, "missing", "a folder", "a dangling link", "a link to itself"]
INTERRUPTED = ("checkpoint.pt", "checkpoint.pt checkpoint.previous.pt", "metrics.jsonl")
FINISHED = (RESULT, *SEALED)


def some(files: tuple[str, ...], each: int) -> list[Any]:
    """All pairs of a file and a damage. By default all damages of the first, and of the others one
    in so many, other ones of each.
    """
    return [
        pytest.param(file, kind, marks=() if i == 0 or (i + j) % each == 0 else pytest.mark.minutes)
        for i, file in enumerate(files)
        for j, kind in enumerate(KINDS)
    ]


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind in CONTENTS:
        changed = CONTENTS[kind](data)
        assert changed != data
        path.write_bytes(changed)
        return
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a dangling link":
        path.symlink_to("nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path.name)


def tiny(root: Path) -> Config:
    """Four steps, a checkpoint and a row after each."""
    network = (
        "model=mlp",
        "model.hidden=[16,16]",
        "trainer.limit_batches=1",
        "trainer.log_every=1",
        "trainer.evaluate=both",
    )
    return config(root / "out", "recipe=sr_ste", "sparsity='2:4'", *network)


def outcome(folder: Path) -> Any:
    result = result_of(folder)
    weights = [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "best")]
    return weights, rows(folder), result["metrics"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it a finished run."""
    root = tmp_path_factory.mktemp("whole")
    assert runner.run(tiny(root), run_folder(tiny(root)))["status"] == "finished"
    return root


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it a run that was killed in its last step."""
    root = tmp_path_factory.mktemp("interrupted")
    cut_off(tiny(root), 3)
    (run_folder(tiny(root)) / "result.json").unlink()
    return root


def copied(source: Path, to: Path) -> tuple[Config, Path]:
    shutil.copytree(source / "out", to / "out")
    return tiny(to), run_folder(tiny(to))


def again(cfg: Config, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The status of the same command, and all that it says."""
    capsys.readouterr()
    try:
        status = runner.run(cfg, folder)["status"]
    except (ConfigError, RunError) as error:
        status = f"refused: {error}"
    return status, "".join([status, *capsys.readouterr()])


@pytest.mark.parametrize(("names", "kind"), some(INTERRUPTED, 3))
def test_of_an_interrupted_run(names, kind, interrupted, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg, folder = copied(interrupted, tmp_path)
    for name in names.split():
        damage(folder / name, kind)
    status, output = again(cfg, folder, capsys)
    right = status == "finished" and outcome(folder) == outcome(run_folder(tiny(whole)))
    assert right or names.split()[0] in output
    # a checkpoint costs steps at most; what lies in a folder of its name is not removed
    assert right or names == "metrics.jsonl" or kind == "a folder"
    assert not (tmp_path / "planted").exists()


# they are known by their hashes, whatever the damage
@pytest.mark.parametrize(("name", "kind"), some(FINISHED, 6))
def test_of_a_finished_run(name, kind, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg, folder = copied(whole, tmp_path)
    size = (folder / name).stat().st_size
    damage(folder / name, kind)
    for words in (("table", "out", "--verify"), ("export", str(folder), "--out", "exported")):
        assert verb(*words) != 0
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("nmrun: ")
        assert name in err or (name == RESULT and "run" in err)
    assert sorted(os.listdir()) == ["out"]
    seen = name == RESULT or not (folder / name).is_file() or (folder / name).stat().st_size != size
    status, output = again(cfg, folder, capsys)
    if seen and status == "finished":
        assert outcome(folder) == outcome(run_folder(tiny(whole)))
        assert verb("table", "out", "--verify") == 0
    elif seen:  # it cannot be made again from what is left
        assert name in output
    else:  # of the same size: whoever uses the file has its hash checked
        assert status == "skipped"
