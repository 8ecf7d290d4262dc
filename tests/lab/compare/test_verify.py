"""``nmrun table --verify`` takes runs as they finished and no others; cells of a table are texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import result_of, rewrite
from verbs import verb

from nmrun.errors import RunError
from nmrun.lab.api.runs import Result
from nmrun.lab.runs.run_folder import SEALED, WEIGHTS


@pytest.fixture
def sealed(write):
    """A run with files, bound to its result."""

    def call(*arguments: object, **other: object) -> Path:
        folder: Path = write(*arguments, **other)
        for name in (*WEIGHTS, "metrics.jsonl"):
            (folder / name).write_bytes(name.encode() * 3)
        rewrite(folder)
        return folder

    return call


@pytest.mark.parametrize("name", [*SEALED[1:], "result.json"])
def test_a_flipped_bit_never_passes(name, sealed, table):
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
    status, out, err = table()  # it did not ask: what counts is there are the results
    assert status == 0
    left_out = f"nmrun: left out: {folder / name}: it was changed: its SHA-256 is another\n"
    assert err == (left_out if name == "result.json" else "")
    assert ("over 1 seed" if name == "result.json" else "over 2 seeds") in out


def test_a_run_in_the_folder_of_another_is_left_out(sealed, table):
    other = sealed("ste", "2:4", 0, 0.8)
    sealed("ste", "2:4", 1, 0.9)
    other.rename(other.with_name("s0-0123456789"))
    status, out, err = table()
    assert (status, "90.0" in out) == (0, True)
    assert "it is of another run, whose id is" in err


def test_changed_rows_are_not_drawn(sealed, tmp_path, capsys):
    folder = sealed("ste", "2:4", 0, 0.8)
    rows = [{"step": step, "eval/accuracy": 0.1 * step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rewrite(folder, metric="accuracy")
    words = ("plot", str(tmp_path), "--kind", "curves", "--out", str(tmp_path / "a.svg"))
    assert verb(*words) == 0
    assert capsys.readouterr().err == ""
    data = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(data.replace("0.1", "0.9"))
    assert verb(*words) == 2
    assert f"{folder / 'metrics.jsonl'}: it was changed" in capsys.readouterr().err
    finished = Result("finished", {}, {}, folder)
    with pytest.raises(RunError, match=r"metrics\.jsonl: it was changed"):
        finished.history()


@pytest.mark.parametrize("keys", [("files", "sha256"), ("files",), ("sha256",)])
def test_a_result_that_lost_its_hashes_never_counts(keys, sealed, table, tmp_path, capsys):
    folder = sealed("ste", "2:4", 0, 0.5)
    sealed("ste", "2:4", 1, 0.9)
    result = {key: value for key, value in result_of(folder).items() if key not in keys}
    result["metrics"]["final"]["test/accuracy"] = 0.1
    (folder / "result.json").write_text(json.dumps(result))
    status, out, err = table()
    assert (status, "90.0" in out) == (0, True)
    assert err.startswith(f"nmrun: left out: {folder / 'result.json'}: it was changed")
    assert err.count("\n") == 1
    looks = {
        ("table", str(tmp_path), "--verify"): 1,
        ("rerun", str(folder), "--yes"): 1,
        ("compare", str(folder), str(folder)): 1,
        ("export", str(folder), "--out", str(tmp_path / "to")): 1,
        ("", f"init={folder}", "debug=fast", f"output_dir={tmp_path / 'to'}"): 2,
        ("status", str(tmp_path)): 0,
        ("report", str(tmp_path), "--out", str(tmp_path / "report.html")): 0,
    }
    for words, expected in looks.items():
        status = verb(*filter(None, words))
        out, err = capsys.readouterr()
        assert (status, "result.json: it was changed" in out + err) == (expected, True), words


def test_markdown_cells_are_texts(write, table):
    name = "a|b\nc](http://x) <img src=x> \x1b[31m"
    write(name, "2:4", 0, 0.5)
    out = table()[1]
    assert "\x1b" not in out
    (line,) = [line for line in out.splitlines() if "http" in line]
    assert line.startswith("| a\\|b c]\\(http://x) \\<img src=x>  [31m")
    assert line.replace("\\|", "").count("|") == 3


def test_names_of_folders_send_a_terminal_no_commands(sealed, table, capsys):
    folder = sealed("ste", "2:4", 0, 0.5)
    odd = folder.rename(folder.with_name("\x1b]0;x"))
    status, out, err = table("--runs", "--format", "json")
    assert (status, "\x1b" in out + err, "]0;x" in out) == (0, False, True)
    (odd / "result.json").write_text("{")
    assert verb("table", str(odd), "--verify") == 1
    out, err = capsys.readouterr()
    assert ("\x1b" in out + err, "it is damaged" in err) == (False, True)
