"""Two processes that hold shards train what one process trains, and each goes on with what the
other has left.
"""

from __future__ import annotations

import json
from pathlib import Path

import one_rank
import preloaded
import pytest
import shards
import torch
from runs import config, result_of, rows
from safetensors.torch import load_file

from nmrun.errors import ConfigError
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train.build import build
from nmrun.sparsity import check_nm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See ``shards.main``; and ``one``, a checkpoint of one rank in shards."""
    folder = tmp_path_factory.mktemp("fsdp")
    for case in shards.RESUMED:
        assert shards.run(folder / "resumed", case, stop=shards.STOP)["status"] == "interrupted"
    one_rank.saved(folder / "one", 1, 2)
    process = preloaded.torchrun(shards.__file__, "main", folder)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr
    return folder


def compare(alone: Path, other: Path) -> None:
    """Same weights, same masks, same log up to rounding, same events."""
    results = [result_of(run) for run in (alone, other)]
    assert results[0]["sparsity"] == results[1]["sparsity"]
    assert results[0]["events"] == results[1]["events"]
    for name in sorted(path.name for path in alone.glob("*.safetensors")):
        expected, weights = load_file(alone / name), load_file(other / name)
        assert list(expected) == list(weights)
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-3, atol=1e-4)
            assert torch.equal(weights[key] == 0, weight == 0), key
    for layer in results[0]["sparsity"]["layers"]:
        check_nm(
            load_file(other / "model.safetensors")[layer["name"]], "2:4", layer["dim"], pad=True
        )
    for one, two in zip(rows(alone), rows(other), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6)
    names = []
    for run in (alone, other):
        saved = torch.load(run / "checkpoint.pt", weights_only=True).get("shards")
        folders = {saved["folder"]} if saved else set()
        assert folders == {path.name for path in run.glob("checkpoint.shards.*")}
        names.append({path.name for path in run.iterdir()} - folders)
    assert names[0] == names[1]


@pytest.mark.parametrize("case", shards.CASES)
def test_two_processes_train_the_weights_of_one(case, folder, tmp_path):
    # FP8 has one scale for a micro-batch: that of a rank is that of a half here
    cut = ("trainer.accumulate=2",) if case == "fp8" else ()
    alone = Path(shards.run(tmp_path, case, *cut)["folder"])
    compare(alone, run_folder(config(folder / "together", *shards.CASES[case])))


def test_estimated_gradients_are_those_of_replicas(folder):
    replicated = run_folder(config(folder / "ddp", *shards.ESTIMATED))
    compare(replicated, run_folder(config(folder / "fsdp", *shards.ESTIMATED)))


def test_the_cases_reach_what_they_are_for(folder):
    events = [
        " ".join(event["sentence"] for event in json.loads(path.read_text())["events"])
        for path in (folder / "together").rglob("result.json")
    ]
    assert sum("the variance has settled" in text for text in events) == 1
    assert sum(text.startswith("ASP pruned") for text in events) == 1


@pytest.mark.parametrize("case", shards.RESUMED)
def test_checkpoints_go_from_one_process_to_two_and_back(case, folder, tmp_path):
    alone = Path(shards.run(tmp_path, case)["folder"])
    place = alone.relative_to(tmp_path)
    assert "goes on at step 6 of 9" in (folder / "resumed" / place / "run.log").read_text()
    compare(alone, folder / "resumed" / place)
    assert shards.run(folder / "stopped", case)["status"] == "finished"
    assert "goes on at step 6 of 9" in (folder / "stopped" / place / "run.log").read_text()
    compare(alone, folder / "stopped" / place)


@pytest.mark.parametrize("case", shards.RESUMED)
def test_a_run_goes_on_in_shards_with_the_same_bits(case, folder):
    left, again = (
        run_folder(config(folder / place, *shards.CASES[case])) for place in ("together", "again")
    )
    assert "goes on at step 6 of 9" in (again / "run.log").read_text()
    for name in ("model.safetensors", "best.safetensors"):
        assert (again / name).read_bytes() == (left / name).read_bytes()
    assert rows(again) == rows(left)


@pytest.mark.parametrize("case", shards.RESUMED)
def test_replicas_go_on_with_shards(case, folder):
    left, replicas = (
        run_folder(config(folder / place, *shards.CASES[case]))
        for place in ("together", "replicas")
    )
    assert "goes on at step 6 of 9" in (replicas / "run.log").read_text()
    compare(left, replicas)


def test_a_rank_that_is_killed_while_it_saves(tmp_path):
    assert preloaded.torchrun(shards.__file__, "killed", tmp_path).returncode == 1
    alone = Path(shards.run(tmp_path / "alone", "step")["folder"])
    result = shards.run(tmp_path, "step")
    assert result["status"] == "finished"
    assert "goes on at step 3 of 9" in (Path(result["folder"]) / "run.log").read_text()
    compare(alone, Path(result["folder"]))


def test_a_run_is_the_same_on_shards(tmp_path):
    assert run_folder(config(tmp_path, "trainer.distributed=fsdp")) == run_folder(config(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("recipe=t_sr_ste",), "recipe t_sr_ste"),
        (("recipe=bi_mask",), "recipe bi_mask"),
        (("recipe=lbc",), "recipe lbc"),
        (("recipe=maskllm",), "recipe maskllm"),
        (("recipe=asp", "recipe.permute=true"), "recipe asp with permute=true"),
        (
            ("recipe=ste", "trainer.input_gradient=transposable"),
            "trainer.input_gradient=transposable needs whole weights",
        ),
        (("trainer.compile=true",), "trainer.compile=True"),
        (("trainer.precision=fp16",), "trainer.precision=fp16"),
    ],
)
def test_what_shards_cannot_do_is_refused(overrides, complaint, tmp_path):
    cfg = config(tmp_path, *overrides, "trainer.distributed=fsdp")
    with pytest.raises(ConfigError) as refused:
        build(cfg)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("use trainer.distributed=ddp")
