"""``nmrun status`` on folders made by hand, and on a real sweep that fails, runs and is killed
while it is watched.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from runs import at_work, rewrite, write_result
from verbs import python

from nmrun.errors import ConfigError
from nmrun.lab.records import status, sweep

Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A run folder in ``outputs`` of the current folder, as a run leaves it; without a status, as a
    kill leaves it, which was in the middle of a line.
    """
    monkeypatch.chdir(tmp_path)

    def call(
        name: str,
        state: str | None = None,
        command: str | None = "nmrun recipe=ste",
        rows: Sequence[dict[str, Any]] = (),
        output_dir: str = "outputs",
        config: dict[str, Any] | None = None,
        **more: Any,
    ) -> Path:
        folder = Path(output_dir) / "digits" / "small_conv" / "ste" / "2of4" / name
        folder.mkdir(parents=True)
        whole = {"output_dir": output_dir, "seed": 0, **(config or {})}
        head = f"# {command}\n" if command else ""
        (folder / "config.yaml").write_text(head + yaml.safe_dump(whole))
        if state:
            environment = {"command": "nmrun -m all of it"}
            result = {"status": state, "config": whole, "environment": environment, **more}
            write_result(folder, result)
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "metrics.jsonl").write_text(text + '{"step": 99')
        return folder

    return call


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert status.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_every_state(place, capsys):
    place("s0-a", "finished")
    place("s1-b", "finished")
    place(
        "s2-c",
        "failed",
        "nmrun recipe=ste seed=2",
        [{"step": 30}],
        error="step 34: the loss is nan",
    )
    place("s3-d", "interrupted", None, signal=2)
    ratios = "nmrun recipe=ste 'sparsity.overrides={inner.1: 1:8}'"
    killed = place("s4-e", None, ratios, [{"step": 20}])
    running = place("s5-f", "finished", rows=[{"step": 40}])  # once more, with force
    begins = running.with_name("s6-g")
    begins.mkdir()
    running.with_name("s7-h").mkdir()  # nothing ever happened there
    (files := killed / "wandb" / "files").mkdir(parents=True)
    (files / "config.yaml").write_text("a: 1\n")  # no run of its own
    with at_work(running, begins):
        lines = output(capsys).splitlines()
    here = "outputs/digits/small_conv/ste/2of4"
    assert lines[0] == "runs in outputs: 2 finished, 2 running, 1 interrupted, 1 failed, 1 killed"
    assert lines[1] == here
    assert lines[2].split() == ["state", "step", "age", "folder"]
    table = [(line.split()[0], line.split()[-1]) for line in lines[3:10]]
    assert table == [
        *(("running", "s6-g"), ("running", "s5-f"), ("killed", "s4-e"), ("interrupted", "s3-d")),
        *(("failed", "s2-c"), ("finished", "s1-b"), ("finished", "s0-a")),
    ]
    assert lines[10:] == [
        f"killed: {here}/s4-e",
        f"  {ratios}",
        f"interrupted: {here}/s3-d",
        "  nmrun -m all of it",
        f"failed: {here}/s2-c",
        "  step 34: the loss is nan",
        "  nmrun recipe=ste seed=2",
        f"to delete what failed: rm -r {here}/s2-c",
    ]
    counts = "3 finished, 1 interrupted, 1 failed, 1 killed"
    assert output(capsys).startswith(f"runs in outputs: {counts}\n")
    assert f"killed: {killed}" in output(capsys, str(killed)).splitlines()


def test_files_of_others_hide_no_run(place, capsys):
    place("s0-a", "finished")
    Path("outputs/config.yaml").write_text("seed: [0, 1]\n")
    Path("outputs/digits/result.json").write_text('{"status": "ok"}')
    Path("outputs/digits/checkpoint.pt").touch()
    assert output(capsys).splitlines()[0] == "runs in outputs: 1 finished"


def test_a_link_to_a_folder_elsewhere_is_told(place, capsys, tmp_path):
    run = place("s0-a", "finished")
    elsewhere = tmp_path / "disk"
    Path("outputs/digits/small_conv").rename(elsewhere)
    Path("outputs/digits/small_conv").symlink_to(elsewhere)
    place("s1-b", "finished", output_dir="outputs/more")
    Path("outputs/latest").symlink_to(Path("more").absolute())
    assert "outputs/more: 1 finished" in output(capsys, "outputs/more")
    assert capsys.readouterr().err == ""
    assert status.main(["outputs"]) == 0
    told = capsys.readouterr().err
    assert str(elsewhere) in told
    assert "latest" not in told
    assert output(capsys, "outputs/digits/small_conv").count(run.name) == 1


def run_with(
    place: Place, name: str, state: str | None, rows: list[dict[str, Any]], **config: Any
) -> Path:
    """A run folder with the config and the rows of metrics of a real run."""
    recipe = config.get("recipe", {"name": "ste"})
    trainer = {"epochs": 10, "steps": config.get("steps"), "budget": None, "eval_every": 1}
    whole = {
        **{"dataset": {"name": "digits"}, "model": {"name": "mlp"}, "recipe": recipe},
        **{"sparsity": {"n": 2, "m": 4}, "schedule": {"name": "constant"}, "trainer": trainer},
        "optimizer": {"name": "adam", "lr": config.get("lr", 0.001)},
        **{"track": {"name": "local"}, "seed": config.get("seed", 0)},
    }
    return place(name, state, rows=rows, config=whole)


def test_runs_are_listed_with_their_metric_and_how_far_they_are(place, capsys):
    evaluated = {"step": 20, "epoch": 1, "eval/loss": 0.5, "eval/accuracy": 0.75}
    on = {"step": 50, "epoch": 3, "steps_per_second": 2.5}
    done = {"step": 200, "epoch": 10, "eval/loss": 0.1, "eval/accuracy": 0.9375}
    old = run_with(place, "s0-a", "finished", [evaluated, done])
    for file in (old, *old.iterdir()):
        os.utime(file, (time.time() - 3 * 86400 - 60,) * 2)
    run_with(place, "s1-b", "finished", [evaluated, {**evaluated, "eval/accuracy": "no"}], seed=1)
    running = run_with(place, "s2-c", None, [evaluated, on], seed=2, lr=0.1)
    by_steps = run_with(place, "s3-d", None, [on], seed=3, steps=100)
    with at_work(running, by_steps):
        _, above, head, *rows = output(capsys).splitlines()
    assert above == "outputs/digits/small_conv/*/*"
    columns = ["state", "recipe", "ratio", "seed", "epoch", "step", "accuracy", "loss"]
    assert head.split() == [*columns, "age", "folder"]
    cells = {row.split()[3]: row for row in rows}
    assert [row.split()[0] for row in rows] == ["running", "running", "finished", "finished"]
    assert {"ste", "2:4", "3/10", "0.7500", "s2-c"} <= set(cells["2"].split())
    assert "50/100" in cells["3"].split()
    assert cells["0"].split() == ["finished", "ste", "2:4", "0", "0.9375", "3", "d", "s0-a"]


def test_runs_of_two_data_sets_are_a_line_each_of_eighty_columns(place, capsys):
    """Whatever else their configs differ in; other settings are shown where they are asked for."""
    rows = [{"step": 2160, "epoch": 10, "eval/accuracy": 0.9375}]
    run_with(place, "s0-0123456789", "interrupted", rows, recipe={"name": "sr_ste", "decay": 0.1})
    run_with(place, "s1-0123456789", "finished", rows, lr=0.5)
    text = [{"step": 2160, "epoch": 10, "eval/perplexity": 9.25}]
    folder = Path("outputs/shakespeare/gpt_tiny/sdgf_stepwise/2of4/s12-0123456789")
    folder.parent.mkdir(parents=True)
    other = run_with(place, "s2-0123456789", "finished", text, recipe={"name": "sdgf_stepwise"})
    other.rename(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"dataset": {"name": "shakespeare", "stride": 7}, "model": {"name": "gpt_tiny"}}
    config |= {"track": {"name": "wandb", "tags": ["a"]}, "seed": 12}
    rewrite(folder, config=config)
    lines = output(capsys).splitlines()
    assert max(map(len, lines)) <= 80
    assert not {"stride", "tags", "track"} & set(re.split(r"[ .]+", " ".join(lines)))
    (row,) = [line for line in lines if "sdgf_stepwise" in line]
    assert {"12", "9.2500"} <= set(row.split())
    (found,) = Path().glob("outputs/shakespeare/gpt_tiny/*/*/" + row.split()[-1])
    assert found == folder
    asked = output(capsys, "--columns", "optimizer.lr,dataset.stride")
    assert [
        [line.split()[-4], line.split()[-1]] for line in asked.splitlines() if " 0.5 " in line
    ] == [["0.5", "s1-0123456789"]]
    assert "dataset.stride" in asked
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr\?"):
        status.main(["--columns", "optimizer.lrr"])
    with pytest.raises(ConfigError, match="no such key"):
        status.main(["--columns", "track.tags"])


def test_many_runs_are_a_screenful(place, capsys):
    for number in range(30):
        run_with(place, f"s{number}-a", "finished", [], seed=number)
    few = output(capsys).splitlines()
    assert len(few) <= 24
    assert "nmrun status --all outputs" in few[-1]
    assert len(output(capsys, "--all").splitlines()) == 33


@pytest.mark.parametrize("state", [None, "failed"])
def test_the_command_fits_the_folder_it_is_asked_from(state, place, tmp_path, monkeypatch, capsys):
    """Run by a shell that has ``nmrun`` say where it is and with what it was called."""
    home = tmp_path / "it's here"
    home.mkdir()
    monkeypatch.chdir(home)
    command = "nmrun recipe=ste output_dir=deep/out 'track.project=a b'"
    place("s0-a", state, command, output_dir="deep/out")

    def shell():
        (run,) = status.runs(home if (home / "deep").exists() else tmp_path)
        script = f'nmrun() {{ pwd; printf "%s\\n" "$@"; }}; {run.command}'
        return subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=True
        ).stdout.splitlines()

    words = ["recipe=ste", "output_dir=deep/out", "track.project=a b"]
    assert shell() == [str(home), *words]
    monkeypatch.chdir(home / "deep")
    assert shell() == [str(home), *words]
    monkeypatch.chdir("/")
    assert shell() == [str(home), *words]
    (home / "deep").rename(tmp_path / "moved")
    assert shell() == ["/", "recipe=ste", "track.project=a b", f"output_dir={tmp_path}/moved/out"]
    (tmp_path / "moved").rename(tmp_path / "it's moved")
    *_, word = shell()
    assert OverridesParser.create().parse_override(word).value() == f"{tmp_path}/it's moved/out"


def test_sweeps(place, capsys, monkeypatch):
    now = 5_000_000.0
    monkeypatch.setattr(sweep.time, "time", lambda: now)

    def sweep_of(name: str, *statuses: str, seconds: float = 120, ago: float = 60) -> Path:
        folder = Path("outputs/.sweeps") / name
        folder.mkdir(parents=True, exist_ok=True)
        head = {"begun": now - 600, "jobs": 8, "command": f"nmrun -m {name}"}
        (folder / "sweep.json").write_text(json.dumps(head | {"output_dir": "outputs"}))
        common = {"seconds": seconds, "ended": now - ago, "overrides": []}
        lines = [json.dumps({"status": status, **common}) + "\n" for status in statuses]
        (folder / "jobs.jsonl").write_text("".join(lines))
        return folder

    first = sweep_of("1-first", "finished", "finished")
    second = sweep_of("2-second", "skipped", "finished", "failed")
    sweep_of("3-third", "finished")
    cut = "sweep 3-third, cut off: 1 of 8 jobs done (1 finished); 9 min"
    none = [cut, "  nmrun -m 3-third", "runs in outputs: none yet"]
    assert output(capsys).splitlines() == none
    assert output(capsys, "--columns", "optimizer.lr").splitlines() == none
    monkeypatch.chdir("outputs")
    assert output(capsys, ".").splitlines()[:2] == [cut, "  cd .. && nmrun -m 3-third"]
    monkeypatch.chdir("..")
    with at_work(first, second):
        lines = output(capsys).splitlines()
    counts = "3 of 8 jobs done (1 finished, 1 skipped, 1 failed)"
    assert lines == [
        "sweep 1-first, running: 2 of 8 jobs done (2 finished); 10 min so far, 12 min left",
        f"sweep 2-second, running: {counts}; 10 min so far, 10 min left",
        "runs in outputs: none yet",
    ]
    sweep_of("3-third", *["finished"] * 8, seconds=1, ago=540)
    whole = "sweep 3-third, ended: 8 of 8 jobs done (8 finished); 1 min\n"
    assert output(capsys).startswith(whole)
    sweep_of("3-third")
    assert output(capsys).startswith("sweep 3-third, cut off: 0 of 8 jobs done\n"), (
        "no time is known"
    )


def test_names_of_folders_send_a_terminal_no_commands(place, capsys):
    place("s0-\x1b[31ma")
    place("s0-\x1b[31mb", "failed", error="x")
    assert "killed" in (text := output(capsys))
    assert "\x1b" not in text


def test_a_run_folder_that_stands_alone(place, capsys):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place("s0-a").joinpath("config.yaml").rename(Path(folder) / "config.yaml")
        assert output(capsys, folder).splitlines()[-2:] == [
            f"killed: {folder}",
            "  nmrun recipe=ste",
        ]


@pytest.mark.slow
def test_a_sweep_is_watched_killed_and_repeated(tmp_path, nmrun_cli):
    swept = "recipe=ste optimizer.lr=1e25,1e-3 seed=0,3 zip=optimizer.lr,seed"
    words = f"-m {swept} trainer.limit_batches=1 trainer.epochs=3000 track=local"
    command = [sys.executable, "-m", "nmrun", *words.split()]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("outputs/digits/*/*/*/s3-*/checkpoint.pt")):
            assert process.poll() is None
            time.sleep(0.05)
        watched = nmrun_cli("status").stdout.splitlines()
        process.kill()
    assert "running: 1 of 2 jobs done (1 failed); " in watched[0]
    assert watched[0].endswith(" left")
    assert watched[1] == "runs in outputs: 1 running, 1 failed"
    light = "import sys; from nmrun.lab import cli; status = cli.main(); print('torch' in sys.modules); sys.exit(status)"
    done = python("-c", light, "status", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[-1]) == (0, "", "False")
    assert "cut off: 1 of 2 jobs done (1 failed)" in lines[0]
    assert lines[1:3] == [f"  nmrun {words}", "runs in outputs: 1 failed, 1 killed"]
    after = {line.partition(":")[0]: lines[number + 1] for number, line in enumerate(lines[:-1])}
    assert "loss is nan" in after["failed"]
    repeat = shlex.split(after["killed"])
    assert repeat[0] == "nmrun"
    again = nmrun_cli(*repeat[1:], "dry=true")
    assert again.returncode == 0
    (killed,) = tmp_path.glob("outputs/digits/*/*/*/s3-*")
    assert str(killed.relative_to(tmp_path)) in "\n".join(lines)


def test_a_command_that_cannot_be_read_is_told_as_it_stands(place, capsys):
    """In a folder that was moved."""
    place("s0", command="nmrun recipe=ste output_dir='out")
    Path("outputs").rename("moved")
    assert "  nmrun recipe=ste output_dir='out" in output(capsys, "moved").splitlines()
