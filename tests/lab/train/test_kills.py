"""Kill -9 at random moments over a small sweep; ``benchmarks/kills.py`` does it a hundred times
over a larger one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import preloaded
import pytest

from nmrun.lab.train import checkpoint

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import kills  # noqa: E402

pytestmark = pytest.mark.slow

preloaded.context()  # the server that all tests of a process share

SWEEP = ("recipe=step,sr_ste", "sparsity=2:4", "seed=0,1", *kills.SWEEP[3:], "trainer.epochs=12")


def test_a_sweep_killed_again_and_again(tmp_path: Path) -> None:
    fell, wrong = kills.trial(6, SWEEP, tmp_path)
    assert not wrong
    assert sum(fell.values()) == 6
    # at least one fell where it hurts; which ones do, chance decides
    assert fell["the sweep was done before"] < 6
    # and whatever is wrong with what came out is found
    output, alone = tmp_path / "killed", tmp_path / "alone"
    result = next(output.rglob("result.json"))
    folder = result.parent
    (folder / "result.json.partial").touch()
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:-1], lines[-2], lines[-1]]))
    result.write_text(json.dumps({**json.loads(result.read_text()), "events": ["another"]}))
    (jobs := output / ".sweeps" / "one").mkdir()
    (jobs / "jobs.jsonl").write_text(json.dumps({"folder": "f", "status": "finished"}) + "\n")
    (jobs / "jobs.jsonl").write_text((jobs / "jobs.jsonl").read_text() * 2)
    found = kills.differences(output, alone)
    place = folder.relative_to(output)
    assert sorted(line.removeprefix(str(place)) for line in found) == [
        "/metrics.jsonl: other rows",
        "/model.safetensors: other bits",
        "/result.json.partial: left behind or missing",
        "/result.json: another result",
        "f: finished 2 times",
    ]
    assert kills.finished(output).keys() == {path.parent for path in output.rglob("result.json")}


def test_a_kill_between_keeping_the_last_checkpoint_and_saving_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    checkpoint.save_next(tmp_path, {"step": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save", killed)
        checkpoint.save_next(tmp_path, {"step": 2})
    checkpoint.save_next(tmp_path, {"step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.previous.pt",
        "checkpoint.pt",
    ]
    assert checkpoint.load(tmp_path / "checkpoint.pt") == {"step": 2}
    assert checkpoint.load(tmp_path / "checkpoint.previous.pt") == {"step": 1}


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        kills.finish(["recipe=nothing", f"output_dir={tmp_path}"])
