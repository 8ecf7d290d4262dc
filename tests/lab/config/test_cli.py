"""The command line as a person meets it: real processes."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import terminal
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf.errors import OmegaConfBaseException
from pictures import make_folder
from runs import TINY, result_of
from verbs import python, verb

from nmrun.errors import ConfigError, RunError
from nmrun.lab import cli, output
from nmrun.lab.config import command_line, composition
from nmrun.lab.sweeps import jobs

HEAVY = ("torch", "wandb", "pandas", "sklearn", "fairseq", "matplotlib")
PROBE = f"""
import sys
from nmrun.lab.cli import main
status = 0
try:
    status = main()
except SystemExit as stop:
    status = stop.code or 0
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""


def probe(tmp_path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-c", PROBE, *arguments, cwd=tmp_path, **environment)


@pytest.mark.parametrize(
    ("line", "status", "parts"),
    [
        ("--help", 0, ["step", "2:4", "small_conv", "nmrun -m", "Examples"]),
        ("--cfg job", 0, ["recipe:", "name: sr_ste"]),
        ("-sc query=bash", 0, ["sparsity=2:4", "sparsity=2:8"]),
        ("recipe=stpe optimizer.lr=abc", 2, []),
    ],
)
def test_help_config_completion_and_mistakes_stay_light(tmp_path, line, status, parts):
    process = probe(tmp_path, *line.split(), COMP_LINE="nmrun sparsity=2:", COMP_POINT="17")
    assert process.returncode == status, process.stderr
    assert "HEAVY []" in process.stderr
    assert all(part in process.stdout for part in parts)


@pytest.mark.parametrize(
    ("line", "completed"),
    [("nmrun st", ["status"]), ("nmrun table out", []), ("nmrun help rec", [])],
)
def test_verbs_complete_and_what_follows_them_is_left_to_the_shell(
    line, completed, monkeypatch, capsys
):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert verb("-sc", "query=bash") == 0
    out, err = capsys.readouterr()
    assert (out.split(), err) == (completed, "")


@pytest.mark.slow
@pytest.mark.parametrize("home", ["", "/proc/none"])
def test_a_run_without_a_home_has_the_terminal_to_itself(home, tmp_path):
    """W&B's service logs to the terminal where it has no cache."""
    tracked = RUN.replace("debug=fast", "trainer.epochs=1 trainer.limit_batches=2")
    process = shell(tmp_path, f"unset XDG_CACHE_HOME; export HOME={home}; {tracked}")
    assert (process.returncode, process.stderr) == (0, "")


def test_a_run_its_folder_and_the_second_time(tmp_path, nmrun_cli):
    line = ("recipe=step", "sparsity=2:8", "debug=fast", "output_dir=out")
    first = nmrun_cli(*line)
    assert first.returncode == 0, first.stderr
    (folder,) = [path.parent for path in tmp_path.rglob("result.json")]
    assert folder.parent == tmp_path / "out" / "digits" / "small_conv" / "step" / "2of8"
    assert folder.name.startswith("s0-")
    result = result_of(folder)
    assert result["status"] == "finished"
    assert result["sparsity"]["pattern"] == "2:8"
    assert all(
        layer["holds"] and layer["nonzeros"] == layer["numel"] // 4
        for layer in result["sparsity"]["layers"]
    )
    left_dense = {left["name"] for left in result["sparsity"]["left_dense"]}
    assert left_dense == {"stem.weight", "head.weight"}
    for name in ("config.yaml", "run.log", "metrics.jsonl", "checkpoint.pt", "model.safetensors"):
        assert (folder / name).stat().st_size > 0
    assert "STEP freezes the second moment" in first.stdout
    assert str(folder.relative_to(tmp_path)) in first.stdout

    before = (folder / "model.safetensors").stat().st_mtime_ns
    second = probe(tmp_path, *line)
    assert second.returncode == 0
    assert "finished already" in second.stdout
    assert "HEAVY []" in second.stderr
    assert (folder / "model.safetensors").stat().st_mtime_ns == before

    export = nmrun_cli("export", str(folder), "--out", "model")
    assert export.returncode == 0, export.stderr
    assert "2:8 holds in 2 layers" in export.stdout


@pytest.mark.slow
def test_a_sweep_goes_on_past_a_failure_and_does_only_what_is_missing(tmp_path, nmrun_cli):
    # a learning rate that overflows fails, its neighbours do not
    words = "-m recipe=ste optimizer.lr=1e-3,1e25 seed=0,1 debug=fast output_dir=out"
    line = words.split()
    process = nmrun_cli(*line)
    assert process.returncode == 1
    assert "sweep of 4: 2 finished, 2 not done" in process.stdout
    assert "Try a lower optimizer.lr" in process.stdout + process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    again = nmrun_cli(*line)
    assert "sweep of 4: 2 skipped, 2 not done" in again.stdout
    table = nmrun_cli("table", "out", "--rows", "recipe,optimizer.lr")
    assert table.returncode == 0
    assert "2 failed" in table.stdout
    assert "over 2 seeds" in table.stdout


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("recipe=dense sparsity=2:4", "sparsity=2:4"),
        ("recipe=dense sparsity=1:8 sparsity.pad=true seed=1", "sparsity=1:8 sparsity.pad=true"),
        ("recipe=dense sparsity=dense", None),
    ],
)
def test_a_ratio_beside_the_dense_recipe_is_told(words, left_out, capsys):
    jobs.checked(words.split(), multirun=False)
    expected = f"nmrun: recipe=dense has no ratio: {left_out} changes nothing\n"
    assert capsys.readouterr().err == ("" if left_out is None else expected)


def test_the_dense_run_of_a_sweep_is_one_job_without_a_ratio(capsys):
    words = ["recipe=dense,ste", "sparsity=2:4,1:8,dense", "debug=fast", "output_dir=out"]
    asked = jobs.checked(words, multirun=True)
    assert [command_line.of_job(words) for words, _ in asked.jobs] == [
        "nmrun recipe=dense debug=fast output_dir=out",
        "nmrun recipe=ste sparsity=2:4 debug=fast output_dir=out",
        "nmrun recipe=ste sparsity=1:8 debug=fast output_dir=out",
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    words = "recipe=step sparsity=2:8 trainer.epochs=400 track=local output_dir=out"
    process = subprocess.Popen(
        [sys.executable, "-m", "nmrun", *words.split()], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.time() + 60
    while time.time() < deadline and not list(tmp_path.rglob("checkpoint.pt")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "the same command goes on" in out
    assert "Traceback" not in out
    (result,) = list(tmp_path.rglob("result.json"))
    assert json.loads(result.read_text())["status"] == "interrupted"


@pytest.mark.minutes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_group_stops_a_sweep_in_order(number, tmp_path, nmrun_cli):
    """With processes that read images, as a scheduler sends it."""
    make_folder(tmp_path / "data" / "some")
    words = [
        *("-m", "recipe=ste", "seed=0,1", "dataset=imagenet", "dataset.path=some", "model=small_conv"),
        *("dataset.resolution=8", "dataset.val_size=6", "dataset.workers=2", "output_dir=out"),
        *("trainer.batch_size=5", "trainer.epochs=60", "trainer.log_every=1", "track=local"),
    ]  # fmt: skip
    places = {"NMRUN_DATA": str(tmp_path / "data"), "NMRUN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "nmrun", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, **places},
    )  # fmt: skip
    while not any(len(path.read_text()) > 2000 for path in tmp_path.rglob("metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "failed" not in err
    assert "sweep of 2: 1 not done, 1 not reached" in out
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "interrupted"
    again = nmrun_cli(*words, **places)
    assert again.returncode == 0
    assert "goes on at step" in again.stdout
    assert "sweep of 2: 2 finished" in again.stdout


@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.slow), ["--config-dir=mine"]])
def test_help_lists_the_groups_that_hydra_finds(tmp_path, flags):
    """It is put together without Hydra, which is not even imported."""
    for name in ("recipe/slow", "debug/slow", "hydra/job_logging/mine"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True)
        (tmp_path / "mine" / f"{name}.yaml").write_text("name: ste\n")
    code = "import sys; from nmrun.lab import cli; cli.main(); print([m for m in ('hydra', 'omegaconf') if m in sys.modules], file=sys.stderr)"
    quick = python("-c", code, *flags, "--help", cwd=tmp_path)
    code = (
        "import hydra; from nmrun.lab.sweeps import jobs; "  # which registers the groups of classes
        "app = hydra.main(config_path='pkg://nmrun.conf', config_name='nmrun', version_base='1.3'); "
        "app(lambda config: None)()"
    )
    hydras = python("-c", code, *flags, "--help", cwd=tmp_path)
    assert quick.stderr == "[]\n"
    groups = re.search(r"\(group=option\)\n\n(.+?)\n\n", hydras.stdout, re.DOTALL)
    assert f"== Groups and their options ==\n{groups[1]}\n\n" in quick.stdout
    assert "recipe: asp" in quick.stdout
    assert ("slow" in quick.stdout) == bool(flags)


def test_a_verb_that_raises_gets_one_line(monkeypatch, capsys):
    """Status 2 for a mistake, 1 for work that failed."""
    for error, status in ((ConfigError(["no", "never"]), 2), (RunError("it broke\n  here"), 1)):

        def fails(argv, error=error):
            raise error

        monkeypatch.setattr("nmrun.lab.records.status.main", fails)
        assert verb("status") == status
    assert capsys.readouterr().err == "nmrun: no\nnmrun: never\nnmrun: it broke here\n"


@pytest.mark.parametrize("world", [None, "1", ""])
def test_a_process_alone_speaks_whatever_its_rank(world, monkeypatch, capsys):
    """As in a shell or a container of a job whose scheduler sets RANK."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr(sys, "argv", ["nmrun", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("nmrun ")
    monkeypatch.setattr(sys, "argv", ["nmrun", "tabel"])
    assert cli.main() == 2
    assert "did you mean table?" in capsys.readouterr().err


# --- what the machine lacks -----------------------------------------------------------------------


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("nmrun", f"{sys.executable} -m nmrun")
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment
    )


NAMES = ("USER", "LOGNAME", "LNAME", "USERNAME")
RUN = "nmrun recipe=ste debug=fast output_dir=out"


@pytest.mark.slow
@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_a_run_needs_no_reader(where, tmp_path):
    process = shell(tmp_path, f"{RUN} {where}")
    assert (process.returncode, process.stderr) == (0, "")
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "finished"
    assert "test 0." in (result.parent / "run.log").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["table outputs", "--version"])
def test_output_that_cannot_be_written_is_told(words, unbuffered, tmp_path, write):
    write("ste", "2:4", 0, 0.5)
    process = shell(tmp_path, f"export PYTHONUNBUFFERED={unbuffered}; nmrun {words} > /dev/full")
    line = "nmrun: output: No space left on device\n"
    assert (process.returncode, process.stderr) == (1, line)


def test_a_folder_that_is_gone(tmp_path):
    process = shell(tmp_path, f"mkdir gone && cd gone && rmdir ../gone && {RUN}")
    line = "nmrun: the current folder does not exist any more; change to another\n"
    assert (process.returncode, process.stderr) == (2, line)


@pytest.mark.parametrize(
    "words", ["recipe=ste", pytest.param("-m recipe=ste,asp", marks=pytest.mark.slow)]
)
def test_a_name_that_is_too_long(words, tmp_path):
    process = shell(tmp_path, f"nmrun {words} debug=fast output_dir={'x' * 300}")
    assert process.returncode == 2
    assert process.stderr.startswith("nmrun: output_dir=xxx")
    assert "File name too long" in process.stderr
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("line", [
    "init=PLACE", "dataset=image_folder dataset.path=PLACE", "--config-dir PLACE recipe=ste",
    "trainer.distill=PLACE", "status PLACE",
])  # fmt: skip
def test_a_place_that_the_system_refuses_to_look_at(line, monkeypatch, capsys, tmp_path):
    """As too long a name, and one below a folder that is not to be read."""
    monkeypatch.chdir(tmp_path)
    place = "x" * 300
    monkeypatch.setattr(sys, "argv", ["nmrun", *line.replace("PLACE", place).split()])
    assert cli.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("nmrun: ")
    assert place in said
    assert "File name too long" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("key", "more"), [
    ("init", ""),
    ("trainer.distill", ""),
    ("recipe.masks", "recipe=maskllm"),
    ("dataset.path", "dataset=image_folder"),
    ("dataset.train", "dataset=text model=gpt_tiny"),
    ("model.pretrained", "dataset=glue model=hf_encoder"),
    ("dataset.tokenizer", "dataset=glue model=hf_encoder"),
])  # fmt: skip
def test_the_folder_of_a_user_whom_nobody_knows(key, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nmrun", *more.split(), f'{key}="~nobody_here/x"'])
    assert cli.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nmrun: {key}=~nobody_here/x: ")
    assert said.count("\n") == 1


def test_what_takes_a_moment_is_told_until_the_next_line(monkeypatch):
    shown, file = terminal.Terminal(monkeypatch, 80), io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    with output.ends_quietly():
        output.waiting("checking the settings")
        assert shown.lines() == ["checking the settings ..."]
        jobs.checked(["seed=0,1"], multirun=True)  # a launcher's processes write behind it
        assert (shown.lines(), shown.screen.cursor.x) == ([""], 0)
        output.waiting("loading torch")
        print("an epoch")
    assert shown.lines() == ["an epoch"]
    monkeypatch.setattr(sys, "stdout", file)
    with output.ends_quietly():
        output.waiting("loading torch")
        print("an epoch")
    assert file.getvalue() == "an epoch\n"


def test_characters_that_the_output_lacks_are_replaced(monkeypatch):
    output_bytes = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output_bytes, encoding="latin-1"))
    with output.ends_quietly():
        print("caf\xe9 \u2603")
    assert output_bytes.getvalue() == b"caf\xe9 ?\n"


@pytest.mark.parametrize(
    "of", [KeyError, OmegaConfBaseException, HydraException, ConfigCompositionException]
)
def test_ctrl_c_while_hydra_composes(of, monkeypatch, capsys, tmp_path):
    """Hydra's own clean-up may raise another error in the place of the interrupt."""

    def cut_off(*_):
        try:
            raise KeyboardInterrupt
        finally:
            raise of("'old'")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(composition, "put", cut_off)
    monkeypatch.setattr(sys, "argv", ["nmrun", "recipe=ste", "seed=0"])
    assert cli.main() == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


def test_a_run_or_a_sweep_is_composed_once(monkeypatch, tmp_path):
    compose, calls = composition.compose, []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return compose(*args, **kwargs)

    monkeypatch.setattr(jobs, "one", lambda *_: {"status": "planned", "folder": None})
    monkeypatch.setattr(composition, "compose", counted)
    for words in (
        ["recipe=ste", "sparsity=1:8", "trainer.epochs=3"],
        ["-m", "recipe=ste,asp", "sparsity=1:8,2:4", "seed=0,1"],
    ):
        jobs.main([*words, f"output_dir={tmp_path}"])
        assert len(calls) == 1
        calls.clear()


def test_torch_that_cannot_be_loaded_is_told_in_a_line(monkeypatch, capsys, tmp_path):
    """The reason, which numpy hides below forty lines of advice."""

    def loaded():
        try:
            raise ImportError("libopenblas.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("\n\nIMPORTANT: PLEASE READ THIS\n\n" + "advice\n" * 40) from error

    monkeypatch.setattr(jobs, "_runner", loaded)
    assert jobs.main(["recipe=ste", f"output_dir={tmp_path}"]) == 1
    assert capsys.readouterr().err == (
        "nmrun: torch, or what a run needs beside it, cannot be loaded: "
        "libopenblas.so: failed to map segment from shared object\n"
    )


def test_a_user_without_a_name(monkeypatch):
    """As in a container that is started with a number: torch asks for the name."""
    for name in NAMES:
        monkeypatch.setenv(name, "to be restored")
        del os.environ[name]
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(KeyError):
        getpass.getuser()
    monkeypatch.setattr(sys, "argv", ["nmrun", "--version"])
    assert cli.main() == 0
    assert getpass.getuser() == "uid54321"


def test_too_little_memory_for_torch(tmp_path):
    process = shell(tmp_path, f"ulimit -v 1000000; {RUN}")
    assert process.returncode != 0
    assert "Traceback" not in process.stderr


def test_a_run_that_its_data_refuse_has_the_status_of_a_mistake(tmp_path, capsys):
    words = [*TINY, f"output_dir={tmp_path}", "trainer.batch_size=5000"]
    assert jobs.main(words) == 2
    assert "trainer.batch_size=5000" in capsys.readouterr().err
