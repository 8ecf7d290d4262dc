"""What binds a finished run to its files notices every change of them, and every reader asks."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import result_of

from nmrun.errors import RunError
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import RunFolder, sealed

RESULT: dict[str, Any] = {
    "status": "finished",
    "id": "0123456789",
    "metrics": {"final": {"test/accuracy": 0.8746, "test/loss": 1e-7}, "best": {"epoch": 3}},
    "config": {
        **{group: {"name": group} for group in ("dataset", "model", "recipe", "optimizer")},
        **{"schedule": {"name": "constant"}, "sparsity": {"n": 2, "m": 4}},
        "trainer": {"note": "Größe", "none": None, "list": [1, 1.0, True]},
        "seed": 2**64,
    },
}
CONTENT = {
    "config.yaml": b"seed: 0\n",
    "metrics.jsonl": b'{"step": 1}\n{"step": 2}\n',
    "model.safetensors": bytes(range(256)),
    "run.log": b"not bound",
}
CHANGED = "it was changed: its SHA-256 is another"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "s0-0123456789"
    place.mkdir()
    for name, content in CONTENT.items():
        (place / name).write_bytes(content)
    (place / "result.json").write_text(json.dumps(sealed(RESULT, place), indent=2))
    return place


def broken(folder: Path, contents: bool = True) -> dict[str, str]:
    return RunFolder(folder).broken(contents)


def test_sizes_and_hashes_are_those_of_the_files(folder):
    result = result_of(folder)
    bound = {name: data for name, data in CONTENT.items() if name != "run.log"}
    assert result["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in bound.items()
    }
    assert {**RESULT, "files": result["files"], "sha256": result["sha256"]} == result
    assert broken(folder) == {}
    assert RunFolder(folder).result == result
    assert RunFolder(folder).rows() == [{"step": 1}, {"step": 2}]
    (folder / "run.log").write_bytes(b"more")
    assert broken(folder) == {}


def test_only_a_finished_run_is_bound(folder):
    """One that failed may go on, so its files change still."""
    failed = {**RESULT, "status": "failed", "error": "RunError: step 3"}
    assert RunFolder(folder).write_result(failed) == failed
    (folder / "metrics.jsonl").write_bytes(b"")
    assert (RunFolder(folder).result, RunFolder(folder).problem) == (failed, "")
    (folder / "metrics.jsonl").write_bytes(CONTENT["metrics.jsonl"])
    RunFolder(folder).write_result(RESULT)
    assert result_of(folder)["files"].keys() == CONTENT.keys() - {"run.log"}
    (folder / "metrics.jsonl").write_bytes(b"")
    assert broken(folder).keys() == {"metrics.jsonl"}


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "model.safetensors"])
def test_a_flipped_bit_of_a_file(name, folder):
    data = CONTENT[name]
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        (folder / name).write_bytes(flipped)
        assert broken(folder) == {name: CHANGED}
        with pytest.raises(RunError, match=f"{name}: {CHANGED}"):
            RunFolder(folder).checked(name)
    assert broken(folder, contents=False) == {}  # a look at the size only
    (folder / name).write_bytes(data + b"x")
    size = f"it was changed: it has {len(data) + 1} bytes and had {len(data)}"
    assert broken(folder, contents=False) == {name: size}
    (folder / name).unlink()
    assert broken(folder, contents=False) == {name: "it is missing"}
    (folder / name).mkdir()
    assert name in broken(folder)


def test_a_flipped_bit_of_the_result(folder):
    path, chance, read = folder / "result.json", random.Random(0), 0
    data = path.read_bytes()
    whole = json.loads(data)
    for _ in range(400):
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        try:
            result = json.loads(path.read_text())
        except ValueError:
            result = None
        if result == whole and repr(result) == repr(whole):
            continue  # a space
        read += result is not None
        assert list(broken(folder)) == ["result.json"]
        assert RunFolder(folder).result == {}
    assert read > 100


def test_a_metric_that_was_not_finite_is_told_as_none(folder, capsys):
    result = {**RESULT, "metrics": {"final": {"test/accuracy": 0.5, "test/f1": None}, "best": {}}}
    (folder / "result.json").write_text(json.dumps(sealed(result, folder)))
    RunFolder(folder).say_finished()
    assert "finished already: test/accuracy 0.5  test/f1 -\n" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["\n", "\n\n", "\u2028", "\n# "])
def test_a_command_of_several_lines(end, tmp_path):
    config, command = {"seed": 0, "output_dir": "out"}, f"nmrun 'track.notes=\"a{end}b: x\"' seed=0"
    RunFolder(tmp_path).begin(config, command, anew=True)
    run = RunFolder(tmp_path)
    assert (run.begun, run.command) == (config, command)


@pytest.mark.parametrize(
    "value",
    [
        *("!!bool x", "!!timestamp x", "!!int ''", "2026-99-99", "{"),
        *("{2024-01-01: 5}", "{!!binary eA==: 5}", f"0x{'f' * 5000}"),
    ],
)
def test_a_config_that_is_no_yaml_is_none(value, tmp_path):
    (tmp_path / "config.yaml").write_text(f"seed: {value}\n")
    assert RunFolder(tmp_path).begun == {}


def test_a_run_answers_under_its_own_id_alone(folder, monkeypatch):
    for name in ("best", "s1-0123456789"):
        link = folder.with_name(name)
        link.symlink_to(folder)
        assert RunFolder(link).finished() is not None
    folder.with_name("s0-aaaaaaaaaa").symlink_to(folder)
    other = RunFolder(folder.with_name("s0-aaaaaaaaaa"))
    assert (other.result, other.is_of_another) == ({}, True)
    assert other.broken() == {"result.json": "it is of another run, whose id is 0123456789"}
    moved = folder.rename(folder.with_name("s2-bbbbbbbbbb"))
    (link := folder.with_name("another")).symlink_to(moved)
    monkeypatch.chdir(moved)
    for place in (moved, link, "."):
        assert RunFolder(place).is_of_another
    renamed = moved.rename(moved.with_name("my best run"))  # a name that says nothing
    assert RunFolder(renamed).finished() is not None


def test_weights_that_came_later_are_not_the_runs(folder):
    (folder / "best.safetensors").write_bytes(CONTENT["model.safetensors"])
    with pytest.raises(RunError, match=r"best\.safetensors: it is not of this run"):
        RunFolder(folder).checked("best.safetensors")


def resealed(folder: Path, **changes: Any) -> None:
    result = {**RESULT, "files": {}, **changes}
    text = json.dumps(result, sort_keys=True, separators=(",", ":"))
    result["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "result.json").write_text(json.dumps(result))


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def laughs(folder: Path) -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (folder / "config.yaml").write_text("\n".join(lines))
    (folder / "result.json").unlink()


def replaced(folder: Path, name: str, by: Callable[[Path], object]) -> None:
    (folder / name).unlink()
    by(folder / name)


def device(place: Path) -> None:
    place.symlink_to("/dev/zero")


def weights_of_a_device(folder: Path) -> None:
    replaced(folder, "model.safetensors", device)
    resealed(folder, files={"model.safetensors": {"bytes": 0, "sha256": ""}})


def pipe_as_config(folder: Path) -> None:
    (folder / "result.json").unlink()
    replaced(folder, "config.yaml", os.mkfifo)


def alias_of_itself(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "config.yaml").write_text("sparsity: &a {n: *a}")


# what somebody else may have put there, where no reader waits, or stumbles: a text for the result,
# values in it, and others
Odd = str | dict[str, Any] | Callable[[Path], None]
ODD: dict[str, Odd] = {
    "a list": "[]",
    "a number": "1" * 10_000,
    "no status": "{}",
    "nested a little": deep(100),
    "nested": deep(100_000),
    "a list of a device": {"files": {"/dev/zero": {"bytes": 0, "sha256": ""}}},
    "a list for a status": {"status": ["finished"]},
    "a list for the command": {"environment": {"command": []}},
    "a text for a metric": {"metrics": {"final": {"a": "x"}, "best": {}}},
    "no metrics": {"metrics": {}},
    "a place with a zero": {"config": RESULT["config"] | {"output_dir": "a\0b"}},
    "a dictionary for a seed": {"config": RESULT["config"] | {"seed": {}}},
    "a list for a name": {"config": RESULT["config"] | {"model": {"name": []}}},
    "half a character": {"status": "failed", "error": "\ud800"},
    "a pipe": lambda folder: replaced(folder, "result.json", os.mkfifo),
    "a pipe as config": pipe_as_config,
    "a device": lambda folder: replaced(folder, "result.json", device),
    "weights of a device": weights_of_a_device,
    "aliases": laughs,
    "an alias of itself": alias_of_itself,
}


def put(odd: Odd, folder: Path) -> None:
    if isinstance(odd, str):
        (folder / "result.json").write_text(odd)
    elif isinstance(odd, dict):
        resealed(folder, **odd)
    else:
        odd(folder)


LOOKS, WORKS = (
    ("status", "table", "compare", "rerun"),
    ("report", "export", "ratios", "prune", ""),
)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("verbs", [LOOKS, pytest.param(WORKS, marks=pytest.mark.slow)])
def test_odd_files(kind, verbs, folder, tmp_path, capsys, monkeypatch):
    from verbs import verb

    monkeypatch.setattr(documents, "MOST_VALUES", 10_000)  # a copy of a million takes seconds
    put(ODD[kind], folder)
    place = tmp_path / "out" / "digits" / "mlp" / "ste" / "2of4" / folder.name
    place.parent.mkdir(parents=True)
    folder.rename(place)
    there, beside = str(place), str(tmp_path / "beside")
    for words in (
        ("status", str(tmp_path)),
        ("table", str(tmp_path)),
        ("table", str(tmp_path), "--verify"),
        ("report", str(tmp_path), "--out", str(tmp_path / "report.html")),
        ("compare", there, there),
        ("rerun", there, "--yes"),
        ("export", there, "--out", beside),
        ("ratios", there),
        ("prune", there),
        ("", "init=" + there, "debug=fast", f"output_dir={beside}"),
    ):
        if words[0] not in verbs:
            continue
        status = verb(*filter(None, words))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in out + err
        assert status in (0, 1, 2)
        assert status or words[0] in ("status", "table", "report", "compare"), words
        (out + err).encode()


def test_a_file_of_any_size_is_looked_at(folder):
    """Of holes, which take no place on a disk."""
    for name in ("result.json", "config.yaml"):
        os.truncate(folder / name, 2**31)
    assert "64 MB" in RunFolder(folder).problem
    assert RunFolder(folder).begun == {}
    (folder / "result.json").unlink()
    rows = folder / "metrics.jsonl"
    os.truncate(rows, 2**31)
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*64 MB"):
        RunFolder(folder).rows()
    with rows.open("a") as file:
        file.write('\n{"step": 7}\n{"st')
    assert next(documents.newest_first(rows)) == {"step": 7}
