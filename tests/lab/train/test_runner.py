"""A run folder holds what it should, whatever happened to the run."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from typing import Any

import pytest
import torch
from errors import one_line
from omegaconf import OmegaConf
from runs import (
    KINDS,
    TINY,
    after_step,
    at_work,
    config,
    cut_off,
    evaluations,
    handled,
    kill,
    mistakes,
    result_of,
    rows,
    signal_after,
    stopped,
)
from safetensors.torch import load_file, save_file
from sklearn import datasets
from torch.nn import functional

from nmrun import sparsify
from nmrun.errors import ConfigError
from nmrun.kernels import compiler
from nmrun.lab import models
from nmrun.lab.config.identity import identity, run_folder, title
from nmrun.lab.config.schema import Config
from nmrun.lab.models.images import SmallConvNetwork
from nmrun.lab.runs.locks import NAME
from nmrun.lab.runs.run_folder import RunFolder, sealed
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.tasks.vision.images import load_digits
from nmrun.lab.train import build, console, results, runner
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.lab.train.steps import TrainingSteps
from nmrun.recipes.asp import ASP
from nmrun.sparsity import check_nm

FILES = {
    "config.yaml",
    "run.log",
    "metrics.jsonl",
    "checkpoint.pt",
    "model.safetensors",
    "best.safetensors",
    "result.json",
}


def run(cfg: Config, sweep: str | None = None) -> dict[str, Any]:
    return runner.run(cfg, run_folder(cfg), sweep)


# --- a finished run -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", KINDS)
def test_the_folder_of_a_finished_run(recipe, tmp_path, capsys):
    cfg = config(tmp_path, f"recipe={recipe}", "sparsity='1:4'")
    folder = run_folder(cfg)
    returned = run(cfg)
    output = capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == FILES
    result = result_of(folder)
    assert returned == {**result, "folder": str(folder)}
    assert (result["status"], result["id"], result["config"]) == (
        "finished",
        identity(cfg),
        cfg.plain,
    )
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == cfg.plain
    names = {"eval/accuracy", "eval/loss", "test/accuracy", "test/loss"}
    assert set(result["metrics"]["final"]) == names
    assert set(result["metrics"]["best"]) == {*names, "epoch", "step", "candidates"}
    assert {"commit", "dirty", "python", "torch", "device", "command"} <= set(result["environment"])
    assert os.uname().nodename not in json.dumps(result["environment"])
    assert 0 < result["checkpoint_seconds"] < result["seconds"]
    last = rows(folder)[-1]
    assert last["step"] == 12
    assert last["eval/accuracy"] == result["metrics"]["final"]["eval/accuracy"]

    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(SmallConvNetwork((1, 8, 8), 10, [8, 8, 8]).state_dict())
    layers = result["sparsity"]["layers"]
    assert [layer["name"] for layer in layers] == (
        [] if recipe == "dense" else ["inner.0.weight", "inner.1.weight"]
    )
    for layer in layers:
        check_nm(weights[layer["name"]], "1:4")
        assert layer["holds"]
        assert (
            layer["nonzeros"] == int(weights[layer["name"]].count_nonzero()) <= layer["numel"] // 4
        )
        zeros = weights[layer["name"]][weights[layer["name"]] == 0]
        assert not zeros.signbit().any()
    assert all(
        reason in output
        for reason in (
            () if recipe == "dense" else ("first layer (exclude=auto)", "2 x inner.*.weight")
        )
    )
    assert str(folder) in output
    assert (folder / "run.log").read_text() == f"{title(cfg)}\n{output}"


@pytest.mark.parametrize("recipe", ["s_ste", "step"])
def test_saved_weights_give_the_metrics_that_were_told(recipe, tmp_path):
    """Rebuilt by hand: a plain model, the saved weights, the test images."""
    cfg = config(tmp_path, f"recipe={recipe}", "trainer.epochs=8")
    metrics = run(cfg)["metrics"]
    images, labels = load_digits()[0]["test"]
    for file, reported in (("model", metrics["final"]), ("best", metrics["best"])):
        model = SmallConvNetwork((1, 8, 8), 10, [8, 8, 8])
        model.load_state_dict(load_file(run_folder(cfg) / f"{file}.safetensors"))
        with torch.no_grad():
            logits = model(images)
        assert reported["test/accuracy"] == pytest.approx(
            float((logits.argmax(1) == labels).double().mean())
        )
        assert reported["test/loss"] == pytest.approx(
            float(functional.cross_entropy(logits, labels)), rel=1e-5
        )


def test_a_finished_run_is_not_touched_and_force_repeats_it(tmp_path, capsys):
    cfg = config(tmp_path, "recipe=ste")
    folder = run_folder(cfg)
    first = run(cfg)
    before = (folder / "model.safetensors").stat()
    capsys.readouterr()
    assert run(cfg) == {**first, "status": "skipped"}
    assert "finished already: eval/loss" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat() == before
    plain = {**first["config"], "optimizer": {**first["config"]["optimizer"], "lr": 0.5}}
    kept = {key: value for key, value in first.items() if key != "folder"}
    RunFolder(folder).write_result({**kept, "config": plain})  # of before a default changed
    assert run(cfg)["status"] == "skipped"
    assert "that was before optimizer.lr (0.5, now 0.001) changed" in capsys.readouterr().err
    again = run(config(tmp_path, "recipe=ste", "force=true"))
    assert again["metrics"] == first["metrics"]
    assert {path.name for path in folder.iterdir()} == FILES
    assert "goes on" not in (folder / "run.log").read_text()


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    weights = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        cfg = config(tmp_path / place, f"seed={seed}")
        run(cfg)
        weights.append((run_folder(cfg) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_in_a_sweep_the_screen_has_less_and_the_log_all(tmp_path, capsys):
    cfg = config(tmp_path, "recipe=ste")
    run(cfg, "some-sweep")
    output, log = capsys.readouterr().out, (run_folder(cfg) / "run.log").read_text()
    assert "exclude=auto" not in output
    assert "exclude=auto" in log
    assert set(output.splitlines()) < set(log.splitlines())


def test_a_dry_run_tells_the_plan_and_leaves_nothing(tmp_path, capsys):
    cfg = config(tmp_path / "out", "sparsity='2:8'", "dry=true", "model=small_conv")
    assert run(cfg)["status"] == "planned"
    assert not (tmp_path / "out").exists()
    output = capsys.readouterr().out
    assert "  sparse  inner.1.weight  64x64x3x3  2:8\n" in output
    total = 320 + 18_496 + 36_928 + 2_570
    nonzeros = total - 0.75 * (64 * 32 * 9 + 64 * 64 * 9)
    assert f"density {nonzeros / total:.1%} of {total:,} parameters" in output
    forward = 2 * (64 * 32 * 9 + 16 * 64 * 32 * 9 * 4 + 16 * 64 * 64 * 9 + 2560)
    assert f"{forward / 1e6:.3g}M dense" in output


# --- runs that do not finish ----------------------------------------------------------------------


def test_a_failure_is_told_in_a_line_and_kept_in_full(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr(Classification, "evaluate", broken)
    cfg = config(tmp_path, "recipe=ste")
    result = run(cfg)
    captured = capsys.readouterr()
    assert (result["status"], result["error"]) == ("failed", "ZeroDivisionError: first line")
    assert result_of(run_folder(cfg))["error"] == result["error"]
    assert "Traceback" in (run_folder(cfg) / "run.log").read_text()
    assert "Traceback" not in captured.out + captured.err
    assert "nmrun: failed: ZeroDivisionError: first line" in captured.err
    monkeypatch.undo()
    assert run(cfg)["status"] == "finished"


def test_a_mistake_that_shows_in_training_fails_the_run(tmp_path, monkeypatch):
    closed = list[Classification]()
    monkeypatch.setattr(Classification, "close", lambda task: closed.append(task))
    target = "schedule.target=torch.optim.lr_scheduler.OneCycleLR"
    words = ("schedule=custom", target, "schedule.options={total_steps: 2, max_lr: 0.01}")
    cfg = config(tmp_path, "recipe=ste", *words)
    result = run(cfg)
    assert (result["status"], len(closed)) == ("failed", 1)
    assert result["error"].startswith(f"{target}: Tried to step 3 times")
    assert result_of(run_folder(cfg))["error"] == result["error"]


@pytest.mark.parametrize("words", [(), ("dry=true",)])
def test_threads_are_of_one_run_alone(words, tmp_path):
    threads = torch.get_num_threads()
    result = run(config(tmp_path, "recipe=ste", f"trainer.threads={threads + 1}", *words))
    assert result.get("environment", {"threads": threads + 1})["threads"] == threads + 1
    assert torch.get_num_threads() == threads


def test_a_run_whose_last_step_diverges_fails(tmp_path):
    cfg = config(tmp_path, "recipe=dense", "optimizer.lr=1e30", "trainer.limit_batches=1",
                  "trainer.epochs=1")  # fmt: skip
    result = run(cfg)
    assert result["status"] == "failed"
    assert result["error"].startswith("step 1: eval/loss is ")
    assert "Try a lower optimizer.lr (it was 1e+30)" in result["error"]
    assert not (run_folder(cfg) / "model.safetensors").exists()


def test_a_weight_that_is_not_finite_is_never_saved(tmp_path, monkeypatch):
    """Though no loss tells: the evaluation does not see it."""

    def spoil(loop):
        loop.parts.model.get_parameter("head.bias").data[3] = math.inf

    evaluations(monkeypatch, itertools.repeat(0.5))
    cfg = config(tmp_path, "recipe=dense")
    with after_step(12, spoil):
        result = run(cfg)
    assert result["status"] == "failed"
    assert result["error"].startswith("step 12: parameter head.bias is not finite.")
    assert not (run_folder(cfg) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("accuracies", "status", "best"),
    [
        ([math.nan, 0.2, 0.4, 0.3], "finished", 3),
        ([0.2, math.nan, 0.1, 0.1], "finished", 1),
        ([0.2, 0.3, 0.1, math.nan], "failed", 2),
    ],
)
def test_nan_is_never_the_best_nor_the_last(accuracies, status, best, tmp_path, monkeypatch):
    evaluations(monkeypatch, [*accuracies, accuracies[-1], *[0.5] * 3])
    result = run(config(tmp_path, "recipe=ste"))
    assert (result["status"], result["metrics"]["best"]["epoch"]) == (status, best)


# --- a run that is given again --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shorter"),
    [("model.safetensors", False), ("best.safetensors", True), ("config.yaml", False)],
)
def test_a_finished_run_whose_file_is_gone_is_made_whole(name, shorter, tmp_path, capsys):
    cfg = config(tmp_path, "recipe=ste")
    folder, first = run_folder(cfg), run(cfg)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1]) if shorter else (folder / name).unlink()
    capsys.readouterr()
    again = run(cfg)
    output = capsys.readouterr().out
    size = f"changed: it has {len(data) - 1} bytes and had {len(data)}"
    assert f"finished before, but {name}: it {f'was {size}' if shorter else 'is missing'}" in output
    assert "goes on at step 12 of 12" in output
    assert (folder / name).read_bytes() == data
    assert again["status"] == "finished"
    assert again["metrics"] == first["metrics"]
    assert again["files"] == first["files"]


def test_rows_of_a_finished_run_cannot_be_made_again_alone(tmp_path, capsys):
    cfg = config(tmp_path, "recipe=ste")
    folder, first = run_folder(cfg), run(cfg)
    before = (folder / "result.json").read_bytes()
    (folder / "metrics.jsonl").unlink()
    again = run(cfg)
    line = "metrics.jsonl of this finished run: it is missing; force=true makes all anew"
    assert (again["status"], again["error"]) == ("failed", line)
    assert capsys.readouterr().err == f"nmrun: {line}: {folder}\n"
    assert (folder / "result.json").read_bytes() == before
    assert not (folder / "metrics.jsonl").exists()
    forced = run(config(tmp_path, "recipe=ste", "force=true"))
    assert (forced["status"], forced["metrics"]) == ("finished", first["metrics"])


def test_a_forced_run_that_was_cut_off_goes_on(tmp_path, capsys):
    plain, forced = (config(tmp_path, "recipe=ste", *words) for words in ((), ("force=true",)))

    def went_on(cfg):
        capsys.readouterr()
        run(cfg)
        return "goes on at step" in capsys.readouterr().out

    def cut(cfg):
        with signal_after(8, signal.SIGTERM):
            return went_on(cfg)

    assert not cut(plain)
    assert not cut(forced)  # what was begun without it is done anew
    assert went_on(forced)
    assert not cut(forced)  # it had finished
    (run_folder(forced) / "result.json").unlink()  # as after a kill
    assert went_on(forced)
    (run_folder(forced) / "result.json").write_text("{")
    assert not went_on(forced)  # nobody knows how it ended


@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("mine"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_forced_run_that_ends_before_it_begins_leaves_the_finished_one(
    error, status, tmp_path, monkeypatch, capsys
):
    cfg, forced = (config(tmp_path, "recipe=ste", *words) for words in ((), ("force=true",)))
    folder, first = run_folder(cfg), run(cfg)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.log"}

    def broken(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(build, "assembled", broken)
        assert run(forced)["status"] == status
    assert "is as it was" in capsys.readouterr().out
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert run(cfg) == {**first, "status": "skipped"}
    assert run(forced)["status"] == "finished"


def test_the_run_that_another_began_with_may_be_moved_meanwhile(tmp_path, monkeypatch):
    first = run_folder(config(tmp_path, "recipe=dense"))
    run(config(tmp_path, "recipe=dense"))
    cfg = config(tmp_path, "recipe=ste", f"init={first}")
    folder, train = run_folder(cfg), Loop.train

    def moved(*args):
        first.rename(tmp_path / "moved")
        return train(*args)

    monkeypatch.setattr(Loop, "train", moved)
    assert run(cfg)["status"] == "finished"
    assert RunFolder(folder).finished() is not None


@pytest.mark.filterwarnings("error")
def test_an_event_of_the_training_is_said_once(tmp_path, capsys):
    run(config(tmp_path, "recipe=sr_ste"))
    first = run_folder(config(tmp_path, "recipe=sr_ste"))
    capsys.readouterr()
    result = run(config(tmp_path, "recipe=sr_ste", f"init={first}", "seed=2"))
    assert result["status"] == "finished"
    (sentence,) = [
        event["sentence"] for event in result["events"] if "2:4 before" in event["sentence"]
    ]
    said = capsys.readouterr()
    assert said.out.count(sentence) == 1
    assert said.err == ""


@pytest.mark.parametrize("name", ["checkpoint.pt", "checkpoint.previous.pt"])
@pytest.mark.parametrize("ended", ["finished", "killed"])
def test_a_checkpoint_of_a_run_is_no_file_of_one_s_own(name, ended, tmp_path):
    cfg = config(tmp_path, "recipe=dense", "trainer.epochs=2")
    assert run(cfg)["status"] == "finished"
    folder = run_folder(cfg)
    (folder / "checkpoint.pt").rename(folder / name)
    if ended == "killed":
        (folder / "result.json").unlink()
    moved = folder.rename(tmp_path / "moved")
    for key in ("init", "trainer.distill", "recipe.masks"):
        recipe = "maskllm" if key == "recipe.masks" else "ste"
        (problem,) = mistakes([f"recipe={recipe}", *TINY[1:], f"{key}={moved / name}"])
        assert problem.startswith(f"{key}={moved / name}: a run's checkpoint; it takes the run's")


FORMS = ["plain.safetensors", "plain.pt", "of_ddp.pth", "checkpoint.bin", "checkpoint.pt"]


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_one_s_own(form, tmp_path):
    """A run that begins with them and learns nothing ends with them; other values are another run."""
    (tmp_path / "config.yaml").write_text("model: {name: theirs}\n")
    words = ("recipe=dense", "optimizer.lr=1e-30", f"init={tmp_path / form}")
    ids = set()
    for fill in (0.25, 0.5):
        network = models.build(
            config(tmp_path, "recipe=dense").model.mapping(), {"shape": (1, 8, 8), "classes": 10}
        )
        state = {name: torch.full_like(t, fill) for name, t in network.state_dict().items()}
        if form == "plain.safetensors":
            save_file(state, tmp_path / form)
        else:
            ddp = {f"module.{name}": tensor for name, tensor in state.items()}
            saved = {"of_ddp.pth": ddp, "checkpoint.bin": {"epoch": 3, "state_dict": state}}
            torch.save(saved.get(form, state), tmp_path / form)
        cfg = config(tmp_path, *words)
        assert run(cfg)["status"] == "finished"
        ids.add(run_folder(cfg).name)
        ended = load_file(run_folder(cfg) / "model.safetensors")
        assert all(torch.equal(ended[name], tensor) for name, tensor in state.items())
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        *((data, "cannot be read") for data in (b"", b".", b"G", b"U\xd1j\xe0\xcf\x87")),
        ([1, 2], "has no state dict"),
        ({"stem.weight": torch.zeros(3)}, r"another network than this run's"),
    ],
)
def test_a_file_without_such_weights_is_refused(saved, message, tmp_path):
    place = tmp_path / "mine.pt"
    if isinstance(saved, bytes):
        place.write_bytes(saved)
    else:
        torch.save(saved, place)
    with one_line(ConfigError, f"init=.*mine.pt.*{message}"):
        run(config(tmp_path, "recipe=dense", f"init={place}"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=ste model.exclude=[stem,haed]", "haed"),
        ("recipe=ste model.include=[head] model.channels=[6,6,6]", "can be 2:4 sparse"),
        ("recipe=ste model.exclude=['.*']", "can be 2:4 sparse"),
        ("recipe=ste sparsity=1:128", "8 inputs are not a multiple of 128"),
        ("recipe=ste sparsity.overrides={nosuch:1:8}", "'nosuch' matches no layer's whole name"),
        ("recipe=ste sparsity.overrides={inner.1:3:7}", "8 inputs are not a multiple of 7"),
        ("recipe=maskllm trainer.patience=2", "maskllm is N:M at its last step alone"),
        ("recipe=sdgf_stepwise sparsity=3:8", "M / N is not a power of two"),
        ("recipe=sdgf_geometric sparsity=1:8", "coarsest pattern 2:16"),
        ("recipe=ste trainer.batch_size=5000", "training images"),
    ],
)
def test_what_does_not_fit_the_network_or_the_data_is_refused(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(config(tmp_path / "out", *words.split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("group", "value", "message"),
    [
        ("dataset", {"val_fraction": 1e-9}, "leave no image"),
        ("dataset", {"val_fraction": 0.6, "test_fraction": 0.5}, "leave no image"),
        *([] if torch.cuda.is_available() else [("trainer", {"device": "cuda"}, "no CUDA device")]),
    ],
)
def test_what_only_the_data_and_the_machine_show(group, value, message, tmp_path):
    cfg = config(tmp_path / "out", "recipe=ste")
    cfg = Config({**cfg.plain, group: {**cfg.plain[group], **value}}, cfg.pattern)
    with pytest.raises(ConfigError, match=message):
        run(cfg)
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_refused_leaves_folders_that_were_there(tmp_path):
    (theirs := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        run(config(theirs / "out", "recipe=ste", "trainer.batch_size=5000"))
    assert [*tmp_path.rglob("*")] == [theirs]


def test_code_that_ends_the_program_fails_the_run(tmp_path, monkeypatch):
    """Of a model of one's own, whose status would be that of the command."""

    def ended(*_):
        raise SystemExit(0)

    monkeypatch.setattr(SmallConvNetwork, "forward", ended)
    cfg = config(tmp_path)
    assert run(cfg)["status"] == "failed"
    assert result_of(run_folder(cfg))["status"] == "failed"


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    cfg = config(tmp_path / "file2")
    cfg.plain["output_dir"] = str(tmp_path / "file")
    with pytest.raises(ConfigError, match="output_dir="):
        run(cfg)


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_the_plan_is_on_the_screen_before_products_are_timed(
    precision, tmp_path, monkeypatch, capsys
):
    before: list[str] = []

    def timed(_: Config, parts: build.Parts, *__: Any) -> build.Parts:
        before.append(capsys.readouterr().out)
        return parts

    monkeypatch.setattr(compiler, "processor_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(build, "WORTH_BF16", (1, 1))
    monkeypatch.setattr(build, "accelerated", timed)
    words = (f"trainer.precision={precision}", "trainer.epochs=1", "trainer.limit_batches=1")
    run(config(tmp_path, *words, "dry=true"))
    cfg = config(tmp_path, *words)
    run(cfg)
    assert len(before) == 2
    for text in (*before, (run_folder(cfg) / "run.log").read_text()):
        assert text.count("FLOPs of the training") == 1
        assert "cpu bf16" in text
        assert ("this processor has it" in text) == (precision == "auto"), "where nobody asked"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_begins(number, tmp_path, monkeypatch, capsys):
    def signalled(*_):
        os.kill(os.getpid(), number)
        pytest.fail("went on")

    monkeypatch.setattr(console, "plan_lines", signalled)
    result = run(config(tmp_path))
    assert (result["status"], result["signal"]) == ("interrupted", number)
    assert "the same command begins it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "end", "step", "said"),
    [
        ((), stopped, 5, "the same command goes on"),
        (("resume=false",), stopped, 5, "with resume=true goes on"),
        ((), cut_off, 1, "the same command starts over"),
    ],
)
def test_it_is_said_what_the_same_command_does(words, end, step, said, tmp_path, capsys):
    end(config(tmp_path, "recipe=ste", *words), step)
    assert said in capsys.readouterr().out


def test_a_second_signal_acts_at_once(tmp_path, monkeypatch):
    def twice(*_, **__):
        os.kill(os.getpid(), 2)
        os.kill(os.getpid(), 2)
        pytest.fail("went on after the second one")

    monkeypatch.setattr(TrainingSteps, "train_step", twice)
    # a shell starts what runs in the background with it ignored
    with handled(signal.default_int_handler, signal.SIGINT):
        result = run(config(tmp_path))
    assert (result["status"], result["signal"]) == ("interrupted", 2)


def test_a_signal_that_comes_too_late_still_stops_the_sweep(tmp_path, monkeypatch):
    original = sealed

    def late(*arguments):
        os.kill(os.getpid(), 15)
        monkeypatch.undo()
        return original(*arguments)

    monkeypatch.setattr("nmrun.lab.runs.run_folder.sealed", late)
    cfg = config(tmp_path, "recipe=ste")
    result = run(cfg)
    assert (result["status"], result["signal"]) == ("interrupted", 15)
    assert result_of(run_folder(cfg))["status"] == "finished"


def test_two_processes_do_not_share_a_folder(tmp_path, capsys):
    cfg = config(tmp_path)
    folder = run_folder(cfg)
    folder.mkdir(parents=True)
    with at_work(folder):
        assert run(cfg)["status"] == "running"
        assert capsys.readouterr().err.count("\n") == 1
        assert [path.name for path in folder.iterdir()] == [NAME]
    assert run(cfg)["status"] == "finished"


def test_a_checkpoint_of_another_model_is_not_forced_in(tmp_path, monkeypatch):
    cfg = config(tmp_path)
    kill(cfg, results, "save_weights", 1)
    monkeypatch.setattr(
        models, "build", lambda config, inputs: SmallConvNetwork(**inputs, channels=[4, 4, 4, 4])
    )
    result = run(cfg)
    assert result["status"] == "failed"
    assert "force=true starts over" in result["error"]


def test_an_edited_checkpoint_is_refused(tmp_path):
    """It is loaded without an error, and trains on to other bits."""
    cfg = config(tmp_path, "recipe=ste")
    kill(cfg, results, "save_weights", 1)
    path = run_folder(cfg) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, path)
    theirs = path.read_bytes()
    result = run(cfg)
    assert (result["status"], path.read_bytes()) == ("failed", theirs)
    assert "checkpoint.pt was changed" in result["error"]
    assert run(config(tmp_path, "recipe=ste", "force=true"))["status"] == "finished"


def test_a_checkpoint_that_is_a_pipe_is_not_waited_for(tmp_path, capsys):
    cfg = config(tmp_path, "recipe=ste")
    run_folder(cfg).mkdir(parents=True)
    os.mkfifo(run_folder(cfg) / "checkpoint.pt")
    assert run(cfg)["status"] == "finished"
    assert "checkpoint.pt is damaged" in capsys.readouterr().out


def test_a_run_that_ends_before_its_weights_are_sparse_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(ASP, "after_step", lambda *_: None)  # never prunes
    cfg = config(tmp_path, "recipe=asp")
    result = run(cfg)
    assert result["status"] == "failed"
    assert result["error"].startswith(
        "training ended in a dense phase of asp, after step 12 of total_steps=12"
    )
    assert not (run_folder(cfg) / "model.safetensors").exists()


# --- data, models, cost ---------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    """With pixels from 0 to 16, which are normalised."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images, classes = (torch.cat(part) for part in zip(*load_digits()[0].values(), strict=True))
    _, levels = images.view(-1, 64).unique(return_inverse=True)
    ours = sorted(zip(levels.tolist(), classes.tolist(), strict=True))
    assert ours == sorted(zip(pixels.astype(int).tolist(), labels.tolist(), strict=True))


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    images = torch.arange(100.0).view(100, 1, 1, 1)
    splits = {name: (images, images.view(-1).long()) for name in ("train", "val", "test")}

    def order(seed, epoch):
        task = Classification(splits, 100, batch_size=20, seed=seed)
        torch.manual_seed(epoch)  # the global generator must not matter
        task.micro_batches(epoch + 5, 3, 1)  # nor what was asked before
        return [
            int(label)
            for index in range(5)
            for batch in task.micro_batches(epoch, index, 3)
            for label in batch[1]
        ]

    assert sorted(order(0, 0)) == list(range(100))
    assert order(0, 0) == order(0, 0)
    different = [order(seed, epoch) for seed in (0, 1, 2, 2**31) for epoch in (0, 1, 2)]
    assert len({tuple(o) for o in different}) == 12
    assert Classification(splits, 100, batch_size=30, seed=0).batches_per_epoch == 3


def test_what_a_recipe_does_before_the_first_step_counts(tmp_path, monkeypatch):
    """As ASP's search for permutations of a trained model does: here 100 seconds of a clock."""
    clock = [5.0]

    def slowly(*args, **options):
        clock[0] += 100.0
        return sparsify(*args, **options)

    monkeypatch.setattr(build, "sparsify", slowly)
    monkeypatch.setattr(build.time, "perf_counter", lambda: clock[0])
    parts = build.build(config(tmp_path, "recipe=asp", "recipe.prune_at=0"))
    monkeypatch.undo()
    assert parts.seconds == 100.0
    assert Loop(config(tmp_path, "recipe=asp"), parts, Console(None), "0123456789").seconds == 100.0


@pytest.mark.parametrize(("higher", "epoch"), [(True, 4), (False, 1)])
def test_the_best_epoch_is_by_the_direction_that_the_task_says(
    higher, epoch, tmp_path, monkeypatch
):
    monkeypatch.setattr(Classification, "metric", "calibration")
    monkeypatch.setattr(Classification, "higher_is_better", higher)
    evaluations(monkeypatch, range(1, 9), "calibration")
    result = run(config(tmp_path, "recipe=ste"))
    assert result["metrics"]["best"]["epoch"] == epoch
    assert (result["metric"], result["higher_is_better"]) == ("calibration", higher)
