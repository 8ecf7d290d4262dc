"""What the loop promises: one batch is one batch however it is cut, hooks see final gradients,
clocks count real updates.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import after_step, config, evaluations, rows
from safetensors.torch import load_file
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.lab import models
from nmrun.lab.config.identity import run_folder
from nmrun.lab.config.schema import Config
from nmrun.lab.signals import Signals
from nmrun.lab.train import build, checkpoint, runner, steps
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.lab.train.optimizers import schedule_factor
from nmrun.sparsity import nm_mask


class Rows:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.mark = [0, 0]

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def sync(self) -> None: ...


def trained(cfg: Config, folder: Path, prepare: Any = None) -> tuple[Loop, list[dict[str, Any]]]:
    """A loop that has gone through its run; ``prepare(loop)`` may change it beforehand."""
    loop, tracker = Loop(cfg, build.build(cfg), Console(None, brief=True), "0123456789"), Rows()
    if prepare is not None:
        prepare(loop)
    loop.train(folder, tracker, Signals())
    return loop, tracker.rows


def weights(loop: Loop) -> dict[str, Tensor]:
    """Copies of the parameters, of sparse weights the dense ones."""
    with loop.handle.dense_weights():
        return {
            name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()
        }


# --- micro-batches, clipping, schedule ------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["dense", "sr_ste", "step", "s_ste", "lbc", "sqft", "bi_mask"])
def test_micro_batches_give_the_update_of_the_whole_batch(recipe, tmp_path):
    """Also when they are of unequal size (30 images in 4 parts), and with SR-STE's decay, which
    must not be added 4 times.
    """
    results = []
    for parts in (1, 4):
        # eps = 1e-3 keeps Adam from blowing up the rounding of gradients that are almost zero
        options = ["optimizer.eps=1e-3", f"recipe={recipe}", "trainer.clip=0.5", "trainer.epochs=2"]
        options += {"sr_ste": ["recipe.decay=0.1"], "step": ["recipe.switch=0.5"]}.get(recipe, [])
        cfg = config(tmp_path, *options)
        trainer = {**cfg.plain["trainer"], "batch_size": 30, "accumulate": parts}
        cfg = Config({**cfg.plain, "trainer": trainer}, cfg.pattern)  # refused by the command line
        results.append(weights(trained(cfg, tmp_path)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_clipping_comes_before_the_recipe(tmp_path):
    """One step of SGD by hand: w - lr (clipped gradient + decay * pruned weight), the decay
    unclipped.
    """
    lr, clip, decay = 0.5, 0.01, 0.3
    words = (
        f"recipe=sr_ste recipe.decay={decay} optimizer=sgd optimizer.momentum=0 optimizer.lr={lr} "
    )
    words += (
        f"optimizer.weight_decay=0 trainer.clip={clip} trainer.epochs=1 trainer.limit_batches=1"
    )
    cfg = config(tmp_path, *words.split())
    parts = build.build(cfg)
    with parts.handle.dense_weights():
        before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    sparse = {weight.name for weight in parts.handle.sparse}
    parts.task.loss(parts.model, parts.task.micro_batches(0, 0, 1)[0]).backward()
    norm = math.sqrt(
        sum(float(p.grad.square().sum()) for p in parts.model.parameters() if p.grad is not None)
    )
    assert norm > clip
    expected = {}
    for name, p in parts.model.named_parameters():
        expected[name] = before[name] - lr * p.grad * clip / norm
        if name in sparse:
            expected[name] -= lr * decay * before[name] * ~nm_mask(before[name], "2:4")
    loop, _ = trained(cfg, tmp_path)
    torch.testing.assert_close(weights(loop), expected, rtol=1e-4, atol=1e-6)
    assert len(sparse) == 2
    for weight in loop.handle.sparse:
        assert torch.equal(weight.parameter, weight.dense * nm_mask(weight.dense, "2:4"))


@pytest.mark.parametrize(
    ("every", "total", "expected"),
    [(10, 200_000, 10), (10, 200_001, 20), (10, 1_000_000, 50), (7, 1_000_000, 56), (1, 30_000, 2)],
)
def test_the_rows_of_a_long_run_are_bounded(every, total, expected):
    """Twenty thousand at most, at multiples of the interval that was asked for and at the end."""
    assert steps.log_interval(every, total) == expected
    assert math.ceil(total / expected) <= 20_000
    assert expected == every or math.ceil(total / (expected - every)) > 20_000


def test_a_long_run_logs_less_often_and_its_losses_are_means_still(tmp_path, monkeypatch):
    _, every = trained(config(tmp_path, "trainer.log_every=1"), tmp_path)
    monkeypatch.setattr(steps, "MOST_ROWS", 4)
    _, some = trained(config(tmp_path, "trainer.log_every=2"), tmp_path)
    losses = [row["train/loss"] for row in every]
    logged = {row["step"]: row["train/loss"] for row in some if "train/loss" in row}
    assert logged == pytest.approx({i: sum(losses[i - 4 : i]) / 4 for i in (4, 8, 12)})


# --- precision ------------------------------------------------------------------------------------


def with_scale(scale: float) -> Any:
    def prepare(loop: Loop) -> None:
        loop.steps.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)

    return prepare


@pytest.mark.parametrize("optimizer", ["optimizer=sgd", "optimizer=adam optimizer.eps=1e-3"])
def test_the_result_does_not_depend_on_the_loss_scale(optimizer, tmp_path):
    words = (
        "trainer.precision=fp16 trainer.clip=0.5 recipe=sr_ste recipe.decay=0.05 trainer.epochs=1"
    )
    cfg = config(tmp_path, *words.split(), *optimizer.split())
    start = weights(Loop(cfg, build.build(cfg), Console(None), "0123456789"))
    one, two = (weights(trained(cfg, tmp_path, with_scale(s))[0]) for s in (2.0**6, 2.0**10))
    apart = math.sqrt(sum(float((one[name] - two[name]).square().sum()) for name in start))
    moved = math.sqrt(sum(float((one[name] - start[name]).square().sum()) for name in start))
    assert apart < 0.05 * moved


def test_a_step_that_loss_scaling_skips_did_not_happen(tmp_path):
    """The first scale overflows fp16: no update, no tick of the recipe's clock or the schedule;
    then training goes on.
    """
    words = (
        "trainer.precision=fp16 recipe=step recipe.switch=0.5 schedule=linear trainer.log_every=1"
    )
    cfg = config(tmp_path, *words.split(), "trainer.epochs=12")
    start = weights(Loop(cfg, build.build(cfg), Console(None), "0123456789"))
    seen: list[tuple[int, int, bool]] = []

    def prepare(loop):
        with_scale(2.0**30)(loop)
        original = loop.steps.train_step

        def watched(*args, **kwargs):
            original(*args, **kwargs)
            same = all(torch.equal(start[name], now) for name, now in weights(loop).items())
            seen.append((loop.steps.updates, loop.handle.recipe.step, same))

        loop.steps.train_step = watched

    loop, logged = trained(cfg, tmp_path, prepare)
    updates = [number for number, _, _ in seen]
    before_each = [0, *updates[:-1]]
    assert updates[:3] == [0, 0, 0]
    assert all(after - before in (0, 1) for before, after in zip(before_each, updates, strict=True))
    assert 18 <= loop.steps.updates < 36
    assert all(number == clock and same == (number == 0) for number, clock, same in seen)
    factor = schedule_factor("linear", 0, 36)
    assert [row["lr"] for row in logged] == pytest.approx(
        [1e-3 * factor(number) for number in before_each]
    )
    assert loop.handle.is_sparse
    assert logged[0]["loss_scale"] == 2.0**29


def test_bf16_autocast_keeps_fp32_weights(tmp_path):
    loop, logged = trained(config(tmp_path, "trainer.precision=bf16", "recipe=ste"), tmp_path)
    assert all(p.dtype == torch.float32 for p in loop.model.parameters())
    assert logged[-1]["eval/loss"] < math.log(10)


@pytest.mark.minutes
@pytest.mark.parametrize("recipe", ["step", "sr_ste"])
def test_compiled(recipe, tmp_path):
    eager, compiled = (
        trained(
            config(tmp_path, f"recipe={recipe}", "optimizer.eps=1e-3", f"trainer.compile={flag}"),
            tmp_path,
        )[1]
        for flag in (False, True)
    )
    assert [r["train/loss"] for r in compiled if "train/loss" in r] == pytest.approx(
        [r["train/loss"] for r in eager if "train/loss" in r], rel=1e-3
    )


# --- evaluation and best --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"), [("dense", 1), ("ste", 1), ("step", 3), ("asp", 3)]
)
def test_the_best_evaluation_counts_only_while_sparse(recipe, expected, tmp_path, monkeypatch):
    """Accuracy falls from epoch to epoch, so the best one is the first that counts: after the
    switch at step 7 of 12.
    """
    evaluations(monkeypatch, [0.9, 0.8, 0.7, 0.6])
    switch = {"step": ["recipe.switch=0.58"], "asp": ["recipe.prune_at=0.58"]}.get(recipe, [])
    loop, logged = trained(config(tmp_path, f"recipe={recipe}", *switch), tmp_path)
    assert loop.evaluation.best == {
        "eval/loss": 1.0,
        "eval/accuracy": [0.9, 0.8, 0.7, 0.6][expected - 1],
        "epoch": expected,
        "step": 3 * expected,
    }
    assert loop.evaluation.candidates == 5 - expected
    if recipe != "dense":
        holds = [row["sparsity/holds"] for row in logged if "sparsity/holds" in row]
        assert holds == [0.0] * (expected - 1) + [1.0] * (5 - expected)
        density = [row["sparsity/density"] for row in logged if "sparsity/density" in row]
        assert density == pytest.approx([1.0] * (expected - 1) + [0.5] * (5 - expected))


def test_evaluations_by_steps(tmp_path, monkeypatch):
    """The best weights are those of a step within an epoch: a run that ends there has them too."""
    evaluations(monkeypatch, [0.9, 0.8, 0.7, *[0.5] * 9])
    cfg = config(tmp_path, "recipe=ste", "trainer.eval_every=5steps")
    result = runner.run(cfg, run_folder(cfg))
    evaluated = [row for row in rows(run_folder(cfg)) if "eval/accuracy" in row]
    assert [(row["step"], row["epoch"]) for row in evaluated] == [(5, 2), (10, 4), (12, 4)]
    best = result["metrics"]["best"]
    assert (best["step"], best["epoch"], best["candidates"]) == (5, 2, 3)
    assert best["eval/accuracy"] == 0.9
    short = config(tmp_path, "recipe=ste", "trainer.steps=5")
    runner.run(short, run_folder(short))
    files = (run_folder(cfg) / "best.safetensors", run_folder(short) / "model.safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_patience_counts_evaluations_of_sparse_weights(tmp_path, monkeypatch):
    """After each 3 of 24 steps, dense until step 7: the best are those of steps 9 and 15. The run ends
    with the weights of its step 21."""
    evaluations(monkeypatch, [0.9, 0.8, 0.5, 0.4, 0.6, 0.6, 0.1, 0.9] * 2)
    words = ["recipe=step", "recipe.switch=0.3", "trainer.epochs=8", "trainer.test=false"]
    cfg = config(tmp_path, *words, "trainer.patience=2")
    result = runner.run(cfg, run_folder(cfg))
    assert (result["steps"], result["metrics"]["best"]["step"]) == (21, 15)
    (event,) = [each for each in result["events"] if each["kind"] == "early"]
    assert event["step"] == 21
    evaluations(monkeypatch, [0.5] * 9)
    whole, ends = config(tmp_path, *words), {}
    with after_step(21, lambda steps: ends.update(steps.strategy.final_state_dict())):
        runner.run(whole, run_folder(whole))
    saved = load_file(run_folder(cfg) / "model.safetensors")
    assert saved.keys() == ends.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in ends.items())


@pytest.mark.parametrize("length", [2, 7, 12])
def test_a_length_in_steps(length, tmp_path):
    """Schedule, recipe, FLOPs and evaluations are those of a run of so many steps."""
    options = ["recipe=step", "schedule=linear", "optimizer.lr=0.01", "trainer.log_every=1"]
    loop, logged = trained(config(tmp_path, *options, f"trainer.steps={length}"), tmp_path)
    assert [row["step"] for row in logged] == [*range(1, length + 1)]
    assert [row["lr"] for row in logged] == pytest.approx(
        [0.01 * (1 - step / length) for step in range(length)]
    )
    assert [row["step"] for row in logged if "eval/loss" in row] == sorted(
        {*range(3, length + 1, 3), length}
    )
    assert loop.handle.recipe.total_steps == length
    # in images of 32 a batch, each of which costs the same densely
    assert loop.steps.flops["training_dense"] == length * round(32 * loop.parts.cost.dense)


def test_a_length_in_steps_and_a_budget(tmp_path):
    """``flops:dense`` is what so many dense steps cost; a sparse recipe has more of them."""
    words = ("trainer.steps=7", "trainer.budget=flops:dense")
    assert build.build(config(tmp_path, "recipe=dense", *words)).total_steps == 7
    assert build.build(config(tmp_path, "recipe=ste", *words)).total_steps > 7
    with pytest.raises(ConfigError, match=r"trainer.average=3"):
        build.build(config(tmp_path, "trainer.steps=6", "trainer.average=3"))
    build.build(config(tmp_path, "trainer.steps=7", "trainer.average=3"))


def test_rows_hold_what_recipes_measure(tmp_path):
    words = "recipe=step recipe.t_max=0.5 trainer.log_every=3 optimizer.lr=0.01"
    _, logged = trained(config(tmp_path, *words.split()), tmp_path)
    keys = "step epoch train/loss lr steps_per_second step/phase step/variance_change eval/loss"
    keys += " eval/accuracy sparsity/density sparsity/holds"
    assert {*keys.split()} <= set(logged[0])
    # in the dense phase that of a virtual mask
    assert all(0 <= row["sparsity/flip_rate"] < 1 for row in logged)
    assert logged[0]["sparsity/flip_rate"] > 0
    assert logged[-1]["sparsity/flip_rate"] > 0
    assert [row["step/phase"] for row in logged] == [1.0, 1.0, 2.0, 2.0]


def test_checkpoints_load_without_pickle_and_come_when_asked(tmp_path, monkeypatch):
    saved, original = [], checkpoint.save
    monkeypatch.setattr(
        checkpoint,
        "save",
        lambda path, state: (saved.append(state["loop"]["step"]), original(path, state)),
    )
    trained(config(tmp_path, "recipe=asp", "trainer.checkpoint_every=3"), tmp_path)
    assert saved == [9, 12]
    saved.clear()
    trained(config(tmp_path, "recipe=asp", "trainer.checkpoint_every=1h"), tmp_path)
    assert saved == [3, 6, 9, 12]
    saved.clear()
    monkeypatch.setattr(checkpoint, "WAIT", 0)
    trained(config(tmp_path, "recipe=asp", "trainer.checkpoint_every=0.0001s"), tmp_path)
    assert saved == [*range(1, 13)]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {
        *("model", "optimizer", "scaler", "average", "random", "loop", "rows"),
        *("acceleration", "precision", "total_steps", "id"),
    }


# --- early failure --------------------------------------------------------------------------------


def failure(cfg: Config, folder: Path, prepare: Any = None) -> str:
    with pytest.raises(RunError) as caught:
        trained(cfg, folder, prepare)
    return str(caught.value)


def test_overflow_names_the_step_and_says_what_to_try(tmp_path):
    def prepare(loop):
        original = loop.steps.train_step

        def sabotaged(*args, **kwargs):
            if loop.steps.step == 4:
                with torch.no_grad():
                    loop.model.inner[1].weight.fill_(3e38)
            original(*args, **kwargs)

        loop.steps.train_step = sabotaged

    message = failure(config(tmp_path, "recipe=ste"), tmp_path, prepare)
    assert message.startswith("step 5: the loss is ")
    assert "optimizer.lr" in message
    assert "trainer.clip=1" in message
    assert "\n" not in message


def test_a_learning_rate_far_too_high(tmp_path):
    message = failure(
        config(tmp_path, "optimizer=sgd", "optimizer.lr=1e30", "recipe=ste", "trainer.clip=1.0"),
        tmp_path,
    )
    assert message.startswith("step 2: ")
    assert "(it was 1e+30)" in message
    assert "trainer.clip" not in message


def test_a_broken_batch(tmp_path):
    def prepare(loop):
        task: Any = loop.task
        task.images = task.images.clone()
        task.images[:] = math.inf

    assert "a number in its batch" in failure(config(tmp_path), tmp_path, prepare)


def test_a_gradient_that_no_loss_scale_helps(tmp_path, monkeypatch):
    class Root(nn.Module):
        """The slope of the root is infinite at zero, its value is not."""

        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x):
            return self.head((self.inner(x.flatten(1)) * 0).abs().sqrt())

    monkeypatch.setattr(models, "build", lambda *_: Root())
    cfg = config(
        tmp_path,
        "recipe=ste",
        "model.exclude=[head]",
        "trainer.precision=fp16",
        "trainer.epochs=40",
    )
    message = failure(cfg, tmp_path)
    assert "however small the loss scale" in message
    assert "trainer.precision=fp32" in message


def test_losses_read_late_still_tell_the_step(tmp_path):
    """On a GPU losses are looked at only when a row is due."""
    cfg = config(tmp_path)
    loop = Loop(cfg, build.build(cfg), Console(None), "0123456789")
    loop.steps.step = 8  # the last row was that of step 4
    loop.steps.losses = [torch.tensor(x) for x in (1.0, 0.9, math.nan, math.nan)]
    with pytest.raises(RunError, match=r"^step 7: the loss is nan"):
        loop.steps.check_losses()


# --- memory layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["asp", "s_ste", "sqft", "bi_mask"])
def test_with_channels_last_the_same_training_up_to_rounding(recipe, tmp_path, monkeypatch):
    cfg = config(tmp_path, f"recipe={recipe}", "trainer.epochs=2", "optimizer.eps=1e-3")
    assert cfg.model.name == "small_conv"
    ends, formats = [], []
    for least in (build.LARGE, 1):
        monkeypatch.setattr(build, "LARGE", least)
        monkeypatch.setattr(build, "fuse", lambda *_: None)  # which has a rounding of its own
        loop, _ = trained(cfg, tmp_path)
        shapes = [p for p in loop.model.parameters() if p.dim() == 4 and p.shape[1] > 1]
        formats.append({p.is_contiguous(memory_format=torch.channels_last) for p in shapes})
        for weight in loop.handle.sparse:
            assert weight.weight.stride() == weight.dense.stride()
        ends.append(weights(loop))
    assert formats == [{False}, {True}]
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, rtol=1e-3, atol=1e-4)


# --- a learning rate of the head's own ------------------------------------------------------------


def test_the_head_has_a_learning_rate_of_its_own(tmp_path):
    """With a schedule too: the size of SGD's first step is the learning rate times the gradient."""
    words = "optimizer=sgd optimizer.lr=1e-3 optimizer.weight_decay=0 schedule=linear schedule.warmup=0.5"
    moved = []
    for head_lr in ("null", "0.02"):
        cfg = config(tmp_path, *words.split(), f"optimizer.head_lr={head_lr}", "recipe=sr_ste")
        loop = Loop(cfg, build.build(cfg), Console(None), "0123456789")
        before = weights(loop)
        loop.steps.train_step(0, 0, measure_flips=False)
        moved.append({name: weight - before[name] for name, weight in weights(loop).items()})
    for name, delta in moved[0].items():
        factor = 20.0 if name.startswith("head.") else 1.0
        torch.testing.assert_close(moved[1][name], factor * delta, rtol=1e-2, atol=1e-6 * factor)
        assert not name.startswith("head.") or delta.abs().max() > 0
