"""A teacher's term in the loss: against the formula in probabilities, for the tasks that have
logits, and in whole runs.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import one_line
from runs import config, finished, result_of, resumed, rewrite, rows
from safetensors.torch import load_file
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.api.runs import Result
from nmrun.lab.config.identity import identity, run_folder
from nmrun.lab.config.schema import Config
from nmrun.lab.tasks.base import Categorical, Task
from nmrun.lab.train import build
from nmrun.lab.train.build import Distilled, divergence
from nmrun.lab.train.steps import TrainingSteps

LANGUAGE = (
    *("dataset=stdlib_text", "dataset.context=16", "model=gpt_tiny", "model.layers=1"),
    *("model.width=32", "model.heads=2", "trainer.limit_evaluation=4"),
)


def by_hand(logits: Tensor, taught: Tensor, temperature: float) -> float:
    """T^2 * KL, item by item, from the definition."""
    total = 0.0
    ours, theirs = logits.reshape(-1, logits.shape[-1]), taught.reshape(-1, taught.shape[-1])
    for z, v in zip(ours.tolist(), theirs.tolist(), strict=True):
        p = [math.exp(x / temperature) for x in v]
        q = [math.exp(x / temperature) for x in z]
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / len(ours)


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 7)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_formula(shape, temperature):
    logits, taught = 3 * torch.randn(shape), 3 * torch.randn(shape)
    loss = divergence(logits, taught, temperature)
    assert float(loss) == pytest.approx(by_hand(logits, taught, temperature), rel=1e-4)
    assert float(divergence(taught, taught, temperature)) == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_is_hintons():
    """dC/dz_i = T (q_i - p_i) for T^2 times the cross entropy with soft targets (equation 2)."""
    torch.manual_seed(1)
    logits, taught = torch.randn(4, requires_grad=True), torch.randn(4)
    divergence(logits[None], taught[None], 3.0).backward()
    expected = 3.0 * ((logits.detach() / 3).softmax(0) - (taught / 3).softmax(0))
    torch.testing.assert_close(logits.grad, expected)


class Points(Categorical):
    """Cross entropy of eight points."""

    def logits(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def loss_of(self, logits: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.cross_entropy(logits, batch[1])

    def micro_batches(self, *where: Any) -> Any: ...
    def size(self, batch: tuple[Tensor, ...]) -> int:
        return len(batch[1])

    def example(self) -> Any: ...


def test_the_sum_of_both_and_who_learns():
    torch.manual_seed(2)
    student, teacher = nn.Linear(3, 4), nn.Linear(3, 4)
    batch = (torch.randn(8, 3), torch.randint(4, (8,)))
    loss = Distilled(Points(), teacher, 0.3, 2.0)(student, batch)
    with torch.no_grad():
        label_loss = nn.functional.cross_entropy(student(batch[0]), batch[1])
        expected = 0.7 * float(label_loss) + 0.3 * by_hand(
            student(batch[0]), teacher(batch[0]), 2.0
        )
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert student.weight.grad is not None
    assert teacher.weight.grad is None


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished dense run."""
    cfg = config(tmp_path_factory.mktemp("teacher"), "recipe=dense")
    finished(cfg)
    return run_folder(cfg)


def taught(out: Path, teacher: Path, *overrides: str) -> Config:
    return config(out, "recipe=sr_ste", f"trainer.distill='{teacher}'", *overrides)


def test_the_teacher_is_the_finished_run(tmp_path, teacher):
    """Its weights, frozen; another start than the student's; evaluated without dropout."""
    cfg = taught(tmp_path, teacher, "seed=1")
    parts = build.build(cfg)
    assert isinstance(parts.loss, Distilled)
    state = parts.loss.teacher.state_dict()
    for name, tensor in load_file(teacher / "model.safetensors").items():
        assert torch.equal(state[name], tensor)
    assert not parts.loss.teacher.training
    assert not any(p.requires_grad for p in parts.loss.teacher.parameters())


def test_start_is_the_model_as_it_begins(tmp_path):
    """Dense, and untouched by what the optimizer does."""
    cfg = config(tmp_path, "recipe=sr_ste", "trainer.distill=start")
    plain = build.build(config(tmp_path, "recipe=dense"))
    parts = build.build(cfg)
    assert isinstance(parts.loss, Distilled)
    steps = TrainingSteps(cfg, parts)
    for step in range(3):
        steps.train_step(0, step, measure_flips=False)
    teacher = parts.loss.teacher.state_dict()
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(teacher[name], tensor)
    assert not torch.equal(parts.model.state_dict()["stem.weight"], teacher["stem.weight"])


def test_accumulation_gives_the_same_loss(tmp_path, teacher):
    """The term is a mean over items, like the loss beside it."""
    losses = []
    for accumulate in (1, 2):
        cfg = taught(tmp_path, teacher, f"trainer.accumulate={accumulate}")
        parts = build.build(cfg)
        steps = TrainingSteps(cfg, parts)
        steps.train_step(0, 0, measure_flips=False)
        losses.append(float(steps.losses[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "by"), [("sr_ste", "start"), ("dense", "finished"), ("step", "finished")]
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, teacher, recipe, by):
    distill = "start" if by == "start" else f"'{teacher}'"
    resumed(tmp_path, f"recipe={recipe}", f"trainer.distill={distill}")


def test_the_teacher_counts(tmp_path, teacher):
    """A dense forward pass for every item that is trained on; inference has no teacher."""
    plain, cfg = config(tmp_path / "a", "recipe=sr_ste"), taught(tmp_path / "b", teacher)
    flops = []
    for each in (plain, cfg):
        finished(each)
        flops.append(result_of(run_folder(each))["flops"])
    forward = build.build(plain).cost.forward
    items = 12 * 32
    for kind in ("training_arithmetic", "training_hardware"):
        assert flops[1][kind] - flops[0][kind] == items * forward
    for kind in ("training_dense", "inference_arithmetic", "inference_hardware"):
        assert flops[1][kind] == flops[0][kind]


def test_a_budget_in_flops_buys_fewer_steps_with_a_teacher(tmp_path, teacher):
    budget = ("trainer.budget=flops:dense",)
    plain = build.build(config(tmp_path, "recipe=sr_ste", *budget))
    with_teacher = build.build(taught(tmp_path, teacher, *budget))
    expected = plain.cost.dense / with_teacher.cost.training(with_teacher.handle.recipe)
    assert with_teacher.total_steps == round(12 * expected)
    assert with_teacher.total_steps < plain.total_steps


def test_a_language_model_learns_from_one(tmp_path):
    dense = config(tmp_path, "recipe=dense", *LANGUAGE)
    finished(dense)
    cfg = taught(tmp_path, run_folder(dense), "trainer.distill_weight=1", *LANGUAGE)
    finished(cfg)
    losses = [row["train/loss"] for row in rows(run_folder(cfg)) if "train/loss" in row]
    assert losses[-1] < losses[0]


# --- what is refused, and what a run is called ----------------------------------------------------


class Sums(Task):
    """Not categorical."""

    inputs: dict[str, Any] = {}

    def micro_batches(self, *where: Any) -> Any: ...
    def size(self, batch: Any) -> int: ...
    def loss(self, model: Any, batch: Any) -> Any: ...
    def example(self) -> Any: ...


def test_what_cannot_be_taught(tmp_path, teacher):
    model = nn.Linear(2, 2)
    cfg = taught(tmp_path, teacher)
    scores = Points()
    scores.inputs = {"classes": 1}
    for task in (Sums(), scores):
        with pytest.raises(ConfigError, match="compares distributions over classes or tokens"):
            build.taught(cfg, task, model)
    for overrides, message in (
        (("model.channels=[8,8,12]",), "is another network than this run's"),
        (("trainer.distributed=fsdp",), "keeps a whole teacher in every process"),
        ((f"trainer.distill='{tmp_path}'",), "no finished run is there"),
    ):
        with one_line(ConfigError, message):
            build.build(taught(tmp_path, teacher, *overrides))


@pytest.mark.parametrize("other", ["model.heads=1", "model.activation=relu2"])
def test_a_teacher_whose_weights_would_compute_something_else(other, tmp_path):
    """Of the same shapes: this network makes other outputs of them."""
    dense = config(tmp_path, "recipe=dense", *LANGUAGE)
    loss = finished(dense)["metrics"]["final"]["eval/loss"]
    same, unlike = (build.build(config(tmp_path, *LANGUAGE, *o)) for o in ((), (other,)))
    for parts in (same, unlike):
        parts.model.load_state_dict(load_file(run_folder(dense) / "model.safetensors"))
        parts.model.eval()
    assert same.task.evaluate(same.model, "val")["loss"] == pytest.approx(loss, rel=1e-6)
    (batch, *_) = same.task.micro_batches(0, 0, 1)
    assert same.task.loss(same.model, batch) != unlike.task.loss(unlike.model, batch)
    build.build(taught(tmp_path, run_folder(dense), *LANGUAGE))
    with one_line(ConfigError, f"is another network than this run's: {other.partition('=')[0]} is"):
        build.build(taught(tmp_path, run_folder(dense), *LANGUAGE, other))


@pytest.mark.parametrize("dense_end", ["0", "0.5"])
def test_the_teacher_computes_with_the_activations_of_its_run(dense_end, tmp_path):
    """What its run measured in the end is what the teacher's loss is, and ``Result.model``'s."""
    language = (*LANGUAGE, "model.activation=relu2")
    pruned = ("trainer.activations=1:16", f"trainer.activations_dense_end={dense_end}")
    cfg = config(tmp_path, "recipe=dense", *language, *pruned)
    loss = finished(cfg)["metrics"]["final"]["eval/loss"]
    parts = build.build(taught(tmp_path, run_folder(cfg), *language))
    assert isinstance(parts.loss, Distilled)
    result = Result("finished", cfg.plain, {}, run_folder(cfg))
    for model in (parts.loss.teacher, result.model()):
        assert parts.task.evaluate(model, "val")["loss"] == pytest.approx(loss, rel=1e-8)


def test_a_teacher_s_place_is_no_part_of_the_id(tmp_path, teacher, monkeypatch):
    places = [shutil.copytree(teacher, tmp_path / name) for name in ("here", "start")]
    assert len({identity(taught(tmp_path, place)) for place in (teacher, *places)}) == 1
    rewrite(places[0], id="another")
    assert identity(taught(tmp_path, places[0])) != identity(taught(tmp_path, teacher))
    monkeypatch.chdir(tmp_path)  # "start" is no folder, even if there is one
    begins = identity(config(tmp_path, "recipe=sr_ste", "trainer.distill=start"))
    assert begins != identity(taught(tmp_path, teacher))


def test_the_same_run_without_a_teacher(tmp_path):
    """Its weight and temperature are then no part of the id; with one they are."""
    plain = identity(config(tmp_path))
    assert identity(config(tmp_path, "trainer.distill_weight=0.3")) == plain
    with_teacher = [
        identity(config(tmp_path, "trainer.distill=start", *more))
        for more in ((), ("trainer.distill_weight=0.3",), ("trainer.distill_temperature=4",))
    ]
    assert len({plain, *with_teacher}) == 4
