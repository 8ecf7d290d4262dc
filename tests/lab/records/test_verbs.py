"""Runs side by side, and done again."""

from __future__ import annotations

import json
import shutil

import pytest
from runs import result_of
from verbs import verb


def test_runs_side_by_side(write, capsys):
    one = write("ste", "2:4", 0, 0.5, optimizer__lr=0.1)
    other = write("step", "1:8", 0, 0.625, recipe__switch=0.25)
    assert verb("compare", str(one), str(other)) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in out if line}
    assert out[:2] == [f"[1] {one}", f"[2] {other}"]
    assert rows["recipe"] == ["ste", "step"]
    assert rows["sparsity"] == ["2:4", "1:8"]
    assert rows["optimizer.lr"] == ["0.1", "0.001"]
    assert rows["recipe.switch"] == ["-", "0.25"]
    assert rows["test/accuracy"] == ["0.5", "0.625", "+0.125"]
    assert "seed" not in rows
    assert verb("compare", str(one), str(one), "--all") == 0
    assert "seed" in capsys.readouterr().out


def test_settings_are_told_apart_to_the_last_digit_and_lists_are_found(write, capsys, tmp_path):
    """What one verb shows of a setting another one takes."""
    shown = ["0.00012345678", "0.00012345679"]
    folders = [
        str(write("ste", "2:4", 0, 0.5, optimizer__lr=float(lr), model__hidden=[32, 64], root=lr))
        for lr in shown
    ]
    assert verb("compare", *folders) == 0
    assert ["optimizer.lr", *shown] in [x.split() for x in capsys.readouterr().out.splitlines()]
    words = ("--filter", f"optimizer.lr={shown[0]}", "model.hidden=[32,64]")
    assert verb("table", str(tmp_path), *words) == 0
    assert "ste" in capsys.readouterr().out


def test_a_run_without_a_result_is_compared_by_its_config(write, capsys):
    one, other = write("ste", "2:4", 0, 0.5), write("ste", "2:4", 1)
    result = result_of(other)
    (other / "config.yaml").write_text(json.dumps(result["config"]))  # JSON is YAML
    (other / "result.json").unlink()
    assert verb("compare", str(one), str(other)) == 0
    out = capsys.readouterr().out
    assert ["seed", "0", "1"] in [line.split() for line in out.splitlines()]
    assert "no result" in out


@pytest.mark.slow
def test_the_command_of_a_run_once_more(tmp_path, nmrun_cli):
    first = nmrun_cli("recipe=ste", "debug=fast", "output_dir=out", "optimizer.lr=0.01")
    assert first.returncode == 0, first.stderr
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    again = nmrun_cli("rerun", str(folder), "optimizer.lr=0.02", "dry=true")
    assert again.returncode == 0, again.stderr
    line = "nmrun recipe=ste debug=fast output_dir=out optimizer.lr=0.02 dry=true"
    assert again.stdout.startswith(f"{line}\n")
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "out", moved)
    place = moved / folder.relative_to(tmp_path / "out")
    same = nmrun_cli("rerun", str(place))
    assert "finished already" in same.stdout


def test_help_stands_anywhere(capsys):
    for what in ("table", "bench train"):
        with pytest.raises(SystemExit) as stop:
            verb(*what.split(), "--help")
        assert stop.value.code == 0
        assert f"usage: nmrun {what} [" in capsys.readouterr().out
    for words in (("--help",), ("--hel",), ("recipe=sr_ste", "-h")):
        assert verb(*words) == 0
        assert "== Groups and their options ==" in capsys.readouterr().out
