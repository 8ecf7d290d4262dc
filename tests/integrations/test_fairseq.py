"""Stock fairseq-train, fairseq-generate and a resume, with nmrun's folder as --user-dir."""

from __future__ import annotations

import importlib.util
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from training import bits
from verbs import python

from nmrun.integrations import fairseq as integration

# not imported in this process: fairseq gives Hydra groups of its own, such as optimizer
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairseq") is None,
    reason="needs fairseq: pip install '.[translation]'",
)

FOLDER = Path(integration.__file__).with_name("nmrun_fairseq")
# Three epochs of four updates, each of two batches
TRAIN = """--cpu --dataset-impl raw --arch transformer --encoder-embed-dim 16 --decoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-layers 1 --decoder-layers 1
    --encoder-attention-heads 2 --decoder-attention-heads 2 --lr 0.01 --batch-size 8
    --update-freq 2 --clip-norm 0.5 --max-update 12 --no-progress-bar"""
STEP = ["--nm-recipe", "step", "--nm-options", "switch=0.5", "--optimizer", "nm_adam"]


def fairseq(
    command: str, data: Path, *arguments: str, warnings: str = "ignore"
) -> subprocess.CompletedProcess[str]:
    # fairseq's checkpoints are not for torch's loader of plain data
    more = {"PYTHONWARNINGS": warnings, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    return python("-m", f"fairseq_cli.{command}", str(data), *arguments, timeout=600, **more)


def ours(to: Path, plug: bool = True) -> list[str]:
    """Words for a training with nmrun's folder."""
    return [*TRAIN.split(), *(["--user-dir", str(FOLDER)] if plug else []), "--save-dir", str(to)]


def train(data: Path, to: Path, *arguments: str, plug: bool = True) -> None:
    process = fairseq("train", data, *ours(to, plug), *arguments)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "nmrun:" not in process.stderr


def saved(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / name, weights_only=False)
    return checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of twenty words, and the same backwards."""
    folder = tmp_path_factory.mktemp("data")
    draw, words = random.Random(0), [f"w{i}" for i in range(20)]
    for split, count in (("train", 64), ("valid", 8), ("test", 8)):
        lines = [draw.choices(words, k=draw.randint(3, 7)) for _ in range(count)]
        for side, step in (("src", 1), ("tgt", -1)):
            text = "".join(" ".join(line[::step]) + "\n" for line in lines)
            (folder / f"{split}.src-tgt.{side}").write_text(text)
    for side in ("src", "tgt"):
        (folder / f"dict.{side}.txt").write_text("".join(f"{word} 1\n" for word in words))
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(data, folder, *STEP)
    return folder


def most_of_four(weight: torch.Tensor) -> int:
    return int((weight.view(-1, 4) != 0).sum(1).max())


@pytest.mark.slow
def test_a_checkpoint_is_plain_and_nm(trained):
    """Its first moment is before STEP's sparse phase."""
    for name, most, clock in (("checkpoint1.pt", 4, 4), ("checkpoint2.pt", 2, 8)):
        state = saved(trained, name)
        settings = state["last_optimizer_state"]["param_groups"][0]["nmrun"]
        assert settings["state"]["step"] == clock == state["optimizer_history"][-1]["num_updates"]
        assert len(settings["weights"]) == 16  # the head stays dense
        assert not [key for key in state["model"] if "nmrun" in key or "parametriz" in key]
        assert {most_of_four(state["model"][key]) for key in settings["weights"]} == {most}


@pytest.mark.minutes
@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
def test_a_resumed_training_is_the_same(recipe, data, tmp_path):
    """In and after ASP's dense phase. All data are one batch, since fairseq itself draws other
    batches after a resume."""
    asked = ["--nm-recipe", recipe, "--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.5"]
    asked += ["--batch-size", "64", "--update-freq", "1", "--dropout", "0", "--max-update", "6"]
    train(data, tmp_path / "whole", *asked)
    whole = saved(tmp_path / "whole")
    for epoch in (2, 4):
        again = ["--restore-file", str(tmp_path / "whole" / f"checkpoint{epoch}.pt")]
        train(data, tmp_path / f"{epoch}", *asked, *again)
        ended = saved(tmp_path / f"{epoch}")
        assert ended["last_optimizer_state"]["param_groups"][0]["nmrun"]["state"]["step"] == 6
        for name, tensor in whole["model"].items():
            torch.testing.assert_close(ended["model"][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.minutes
def test_generate_reads_it_without_the_folder(data, trained):
    path = str(trained / "checkpoint2.pt")
    options = ["--cpu", "--dataset-impl", "raw", "--beam", "2", "--max-len-b", "8"]
    process = fairseq("generate", data, "--path", path, *options)
    assert process.returncode == 0, process.stderr[-2000:]
    assert sum(line.startswith("H-") for line in process.stdout.splitlines()) == 8


@pytest.mark.minutes
def test_with_nothing_to_prune_it_is_the_stock_training(data, tmp_path):
    sgd = ["--optimizer", "sgd", "--momentum", "0.9"]
    train(data, tmp_path / "stock", *sgd, plug=False)
    train(data, tmp_path / "ours", *sgd, "--nm-recipe", "sr_ste", "--nm-pattern", "4:4")
    stock, ours = saved(tmp_path / "stock"), saved(tmp_path / "ours")
    assert bits(stock["model"]) == bits(ours["model"])
    assert "nmrun" in ours["last_optimizer_state"]["param_groups"][0]


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nm-recipe spet --optimizer adam", "recipe=spet: no such recipe; did you mean step?"),
        ("--nm-recipe step --optimizer adam", "a drop-in with the same arguments"),
        ("--nm-recipe ste --nm-pattern 5:4 --optimizer sgd", "5:4 is not an N:M pattern"),
        ("--nm-recipe asp --max-update 0 --optimizer sgd", "asp needs total_steps"),
        ("--nm-recipe ste --fp16 --optimizer sgd", "--fp16, --bf16 and --store-ema"),
        ("--nm-recipe ste --store-ema --optimizer sgd", "--fp16, --bf16 and --store-ema"),
        ("--nm-recipe ste --nm-options decay --optimizer sgd", "--nm-options 'decay': it takes"),
        ("--nm-recipe ste --nm-options a=1)or(2 --optimizer sgd", "--nm-options 'a=1)or(2': it takes"),
        ("--nm-recipe ste --nm-options x=1 --optimizer sgd", "ste: x: no such hyperparameter"),
    ],
)  # fmt: skip
def test_mistakes_get_a_line(arguments, message, data, tmp_path):
    process = fairseq("train", data, *ours(tmp_path), *arguments.split())
    assert process.returncode == 2
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("nmrun: ")]
    assert message in line
    assert "Traceback" not in process.stderr


@pytest.mark.minutes
def test_a_dense_end_is_told(data, tmp_path):
    asp = ["--optimizer", "sgd", "--nm-recipe", "asp", "--nm-options", "total_steps=100"]
    process = fairseq("train", data, *ours(tmp_path), *asp)
    assert "nmrun: training ended in a dense phase of asp, after step 12" in process.stderr
    assert process.returncode == 1
    assert "Traceback" not in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("most", ["0", "100"])
def test_the_last_epoch_ends_the_recipe(most, data, tmp_path):
    """Eight batches an epoch, four updates in the first and eight in the second. ProxSparse is N:M at
    its last step alone.
    """
    asked = ["--nm-recipe", "proxsparse", "--optimizer", "sgd", "--max-update", most]
    train(data, tmp_path, *asked, "--update-freq", "2,1", "--max-epoch", "2")
    assert saved(tmp_path)["optimizer_history"][-1]["num_updates"] == 12


@pytest.mark.minutes
def test_a_checkpoint_of_a_dense_training_is_warned_of(data, tmp_path):
    """The recipe has the updates that follow: ProxSparse is N:M at the last one alone."""
    train(data, tmp_path, "--optimizer", "sgd", "--max-update", "4")
    sgd = ["--optimizer", "sgd", "--nm-recipe", "proxsparse"]
    process = fairseq("train", data, *ours(tmp_path), *sgd, warnings="default")
    assert process.returncode == 0, process.stderr[-2000:]
    assert "at its step 4, and the recipe begins here, with the first of 8" in process.stderr
    settings = saved(tmp_path)["last_optimizer_state"]["param_groups"][0]["nmrun"]
    assert settings["state"]["step"] == 8


@pytest.mark.minutes
def test_only_sparse_models_compete_for_the_best(data, tmp_path):
    """With 1 of 16 weights the loss is worse than it was before. A training that goes on with
    sparse weights compares with the best of them."""
    asked = ["--nm-recipe", "asp", "--nm-pattern", "1:16", "--nm-options", "prune_at=0.5"]
    asked += ["--optimizer", "sgd", "--lr", "0.5", "--keep-best-checkpoints", "1"]
    asked += ["--max-update", "24", "--save-interval-updates", "3", "--patience", "9"]
    train(data, tmp_path, *asked)
    best = saved(tmp_path, "checkpoint_best.pt")
    names = best["last_optimizer_state"]["param_groups"][0]["nmrun"]["weights"]
    losses = {}
    for path in tmp_path.glob("checkpoint_*_*.pt"):
        state = saved(tmp_path, path.name)
        step = state["optimizer_history"][-1]["num_updates"]
        losses[step] = state["extra_state"]["val_loss"]
    assert min(losses, key=lambda step: losses[step]) < 12
    (file,) = tmp_path.glob("checkpoint.best_loss_*.pt")
    for state in (best, saved(tmp_path, file.name)):
        for name in names:
            assert int((state["model"][name].view(-1, 16) != 0).sum(1).max()) == 1
    after = min(loss for step, loss in losses.items() if step >= 12)
    assert best["extra_state"]["val_loss"] <= after
    assert list(tmp_path.glob("dense_checkpoint.best_loss_*.pt"))


BECOMES_SPARSE = """
import os, sys
from types import SimpleNamespace
import torch, nmrun
os.environ.pop("RANK", None)
from nmrun.integrations.fairseq import nmrun_fairseq as plugin
for name, saves in (("other", False), ("first", True)):
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=SimpleNamespace(save_dir=f"{sys.argv[1]}/{name}")),
        should_save_checkpoint_on_current_rank=saves, get_num_updates=lambda: 0,
    )
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin.compare_anew(trainer, nmrun.sparsify(model, optimizer, "asp", "2:4", 2, exclude=None))
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_the_process_that_saves_renames_alone(tmp_path):
    """fairseq's own processes have no RANK."""
    for name in ("other", "first"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.best_loss_1.00.pt").touch()
    python("-c", BECOMES_SPARSE, str(tmp_path)).check_returncode()
    names = [path.name for name in ("other", "first") for path in (tmp_path / name).iterdir()]
    assert names == ["checkpoint.best_loss_1.00.pt", "dense_checkpoint.best_loss_1.00.pt"]


VALIDATES = """
import torch, nmrun
from nmrun.integrations.fairseq import nmrun_fairseq as plugin
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plugin.begun.append(nmrun.sparsify(model, optimizer, "proxsparse", "2:4", 2, dense=0.0, exclude=None))
most = lambda *_: int((model.weight.view(-1, 4) != 0).sum(1).max())
plugin.stock_validate = most
print(most(), plugin.command.validate("cfg"), most())
"""


@pytest.mark.slow
def test_it_validates_what_the_run_would_leave():
    assert python("-c", VALIDATES).stdout.splitlines()[-1] == "4 2 4"


LOADS = """
import copy
from types import SimpleNamespace
import torch, nmrun
from nmrun.integrations.fairseq import nmrun_fairseq as plugin

def make():
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step(model, optimizer):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())

dense, sparse = make(), make()
nmrun.sparsify(*sparse, "proxsparse", "2:4", 12, exclude=None)
for state in (step(*dense), step(*sparse)):
    model, optimizer = make()
    config = SimpleNamespace(
        nm_recipe="proxsparse", nm_pattern="2:4", nm_options="exclude=None", max_update=12,
        max_epoch=0, get=lambda key: "proxsparse",
    )
    common = SimpleNamespace(fp16=False, bf16=False)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            optimization=config, common=common, ema=SimpleNamespace(store_ema=False),
            checkpoint=SimpleNamespace(save_dir="."),
        ),
        _model=model, _optimizer=SimpleNamespace(optimizer=optimizer), get_num_updates=lambda: 4,
    )
    plugin.stock_build = lambda trainer: None

    def load(trainer, name):
        plugin.build_and_begin(trainer)
        optimizer.load_state_dict(state)
        return name

    plugin.stock_load = load
    assert plugin.Trainer.load_checkpoint(trainer, "extra") == "extra"
    handle = plugin.begun.pop()
    print(handle.recipe.total_steps, handle.recipe.step, len(plugin.begun), len(handle.sparse))
"""


@pytest.mark.slow
def test_the_updates_of_a_dense_training_are_taken_off():
    """And not those of a training with the recipe."""
    process = python("-c", LOADS)
    assert process.stdout.splitlines()[-2:] == ["8 0 0 1", "12 1 0 1"], process.stderr[-2000:]


def test_the_folder_is_printed():
    assert python("-m", "nmrun.integrations.fairseq").stdout.strip() == str(FOLDER)
    assert (FOLDER / "__init__.py").is_file()
