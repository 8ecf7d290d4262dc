"""``nmrun table --verify`` takes runs as they finished and no others; cells of a table are texts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from nmrun.files import seal


@pytest.fixture
def sealed(write):
    """A run with files, bound to its result."""

    def call(*arguments: object, **other: object) -> Path:
        folder: Path = write(*arguments, **other)
        for name in (*seal.WEIGHTS, "metrics.jsonl"):
            (folder / name).write_bytes(name.encode() * 3)
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(seal.sealed(result, folder), indent=2))
        return folder

    return call


@pytest.mark.parametrize("name", [*seal.FILES[1:], "result.json"])
def test_a_flipped_bit_never_passes(name: str, sealed, table) -> None:
    folder = sealed("ste", "2:4", 0, 0.8746)
    sealed("ste", "2:4", 1, 0.8746)
    assert table("--verify")[0] == 0
    data = bytearray((folder / name).read_bytes())
    data[data.index(b"0.8746") + 2 if name == "result.json" else 7] ^= 1
    (folder / name).write_bytes(data)
    status, out, err = table("--verify")
    assert (status, out) == (1, "")
    assert err.startswith(f"nmrun: {folder / name}: it was changed: its SHA-256 is another; ")
    assert err.count("\n") == 1
    assert table()[0] == 0  # it did not ask


def test_runs_without_hashes_are_counted(sealed, write, table) -> None:
    sealed("ste", "2:4", 2, 0.5)
    write("asp", "2:4", 0, status="failed")
    earlier = [write("ste", "2:4", seed, 0.5) / "model.safetensors" for seed in range(2)]
    for path in earlier:
        path.touch()
    status, out, err = table("--verify")
    assert (status, "50.0 +- 0.0 (3)" in out) == (0, True)
    line = "runs finished by an earlier nmrun, which kept no hashes; not verified: 2"
    assert err == f"nmrun: {line}\n"
    earlier[1].unlink()
    status, out, err = table("--verify")
    assert (status, out) == (1, "")
    assert err.startswith(f"nmrun: {earlier[1]}: it is missing")


@pytest.mark.parametrize("name", ["=cmd|'/c calc'!A1", "+1+1", "-a", "@SUM(A1)", "\tx"])
def test_csv_has_no_formulas(name: str, write, table) -> None:
    write(name, "2:4", 0, 0.5)
    (line,) = csv.DictReader(io.StringIO(table("--format", "csv")[1]))
    assert line["recipe"] == f"'{name}"
    assert float(line["mean"]) == 0.5


def test_csv_leaves_numbers_and_dashes(write, table) -> None:
    write("ste", "2:4", 0, -0.5, optimizer__lr=-1e-3)
    text = table("--format", "csv", "--rows", "optimizer.lr")[1]
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["optimizer.lr"], line["mean"]) == ("-0.001", "-0.5")


def test_markdown_cells_are_texts(write, table) -> None:
    name = "a|b\nc](http://x) <img src=x> \x1b[31m"
    write(name, "2:4", 0, 0.5)
    out = table()[1]
    assert "\x1b" not in out
    (line,) = [line for line in out.splitlines() if "http" in line]
    assert line.startswith("| a\\|b c]\\(http://x) \\<img src=x>  [31m")
    assert line.replace("\\|", "").count("|") == 3
