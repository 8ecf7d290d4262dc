"""What binds a finished run to its files notices every change of them."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from nmrun.files import seal

RESULT = {
    "status": "finished",
    "metrics": {"final": {"test/accuracy": 0.8746, "test/loss": 1e-7}, "best": {"epoch": 3}},
    "config": {"seed": 2**64, "name": "Größe", "none": None, "list": [1, 1.0, True]},
}
CONTENT = {
    "config.yaml": b"seed: 0\n",
    "metrics.jsonl": b'{"step": 1}\n{"step": 2}\n',
    "model.safetensors": bytes(range(256)),
    "run.log": b"not bound",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    text = json.dumps(seal.sealed(RESULT, tmp_path), indent=2)
    (tmp_path / "result.json").write_text(text)
    return tmp_path


def broken(folder: Path, contents: bool = True) -> dict[str, str]:
    return seal.broken(folder, json.loads((folder / "result.json").read_text()), contents)


def test_sizes_and_hashes_are_those_of_the_files(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    bound = {name: data for name, data in CONTENT.items() if name != "run.log"}
    assert result["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in bound.items()
    }
    assert {**RESULT, "files": result["files"], "sha256": result["sha256"]} == result
    assert broken(folder) == {}
    (folder / "run.log").write_bytes(b"more")
    assert broken(folder) == {}


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "model.safetensors"])
def test_a_flipped_bit_of_a_file(name: str, folder: Path) -> None:
    data = CONTENT[name]
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        (folder / name).write_bytes(flipped)
        assert broken(folder) == {name: "it was changed: its SHA-256 is another"}
    assert broken(folder, contents=False) == {}  # a look at the size only
    (folder / name).write_bytes(data + b"x")
    size = f"it was changed: it has {len(data) + 1} bytes and had {len(data)}"
    assert broken(folder, contents=False) == {name: size}
    (folder / name).unlink()
    assert broken(folder, contents=False) == {name: "it is missing"}
    (folder / name).mkdir()
    assert name in broken(folder)


def test_a_flipped_bit_of_the_result(folder: Path) -> None:
    path, chance, read = folder / "result.json", random.Random(0), 0
    data = path.read_bytes()
    whole = json.loads(data)
    for _ in range(400):
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        try:
            result = json.loads(path.read_text())
        except ValueError:
            continue  # no result at all
        if result == whole and repr(result) == repr(whole):
            continue  # a space
        read += 1
        assert list(seal.broken(folder, result)) == ["result.json"]
    assert read > 100


def test_a_result_without_hashes(folder: Path) -> None:
    assert not seal.is_sealed(RESULT)
    assert seal.broken(folder, RESULT, contents=True) == {}
    (folder / "model.safetensors").unlink()
    assert seal.broken(folder, RESULT) == {"model.safetensors": "it is missing"}
