"""S-STE's three curves on a linear model, whose loss is a quadratic function that can be worked out
by hand; and no trace of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runs import build_noisy, config, finished, resumed, rows
from torch import Tensor, nn

import nmrun
from nmrun.lab import models
from nmrun.lab.tasks.base import Batch
from nmrun.lab.train import build, checkpoint
from nmrun.lab.train.console import Console
from nmrun.lab.train.diagnostics import Diagnostics
from nmrun.lab.train.loop import Loop
from nmrun.lab.words.identity import run_folder
from nmrun.step.handle import Handle

BEFORE = [[4.0, 3.0, 2.0, 1.0], [-1.0, 2.0, -3.0, 4.0]]  # masks 1100 0011
AFTER = [[4.1, 1.0, 2.5, 2.9], [-1.0, 2.2, -2.8, 4.0]]  # masks 1001 0011
BIAS = [0.3, -0.2]


class Squares:
    """``mean((x W^T + b - y)^2)`` on one batch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batch = (
            torch.randn(7, 4, generator=generator, dtype=torch.float64),
            torch.randn(7, 2, generator=generator, dtype=torch.float64),
        )

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def by_hand(self, weight: Tensor, bias: Tensor) -> float:
        x, y = self.batch
        return float((x @ weight.T + bias - y).pow(2).sum() / 14)

    def slope(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.batch
        residual = x @ weight.T + bias - y
        return residual.T @ x / 7, residual.sum(0) / 7


def start(recipe: str, **hyperparameters: Any) -> tuple[Any, Handle, Squares, Diagnostics]:
    model = nn.Sequential(nn.Linear(4, 2).double())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(BEFORE))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", **{"exclude": None, **hyperparameters})
    task = Squares()
    return optimizer, handle, task, Diagnostics(model, handle, task.loss)


def move(optimizer: Any, handle: Handle, weight: list[list[float]], bias: list[float]) -> None:
    """One step of SGD that ends there."""
    (sparse,) = handle.sparse
    bias_parameter = optimizer.param_groups[0]["params"][1]
    for p, dense, target in (
        (sparse.parameter, sparse.dense, weight),
        (bias_parameter, bias_parameter.detach(), bias),
    ):
        p.grad = dense - torch.tensor(target, dtype=torch.float64)
    optimizer.step()


def soft(w: Tensor, scale: Tensor) -> Tensor:
    """S-STE by hand for 2:4: the third largest magnitude is the threshold."""
    threshold = w.abs().sort(1).values[:, 1:2]
    return scale * w.sign() * (w.abs() - threshold).clamp_min(0)


@pytest.mark.parametrize("recipe", ["ste", "s_ste", "asp"])
def test_loss_change_and_descent_by_hand(recipe):
    hyperparameters = {"asp": {"prune_at": 0.9, "total_steps": 10}}.get(recipe, {})  # still dense
    optimizer, handle, task, diagnostics = start(recipe, **hyperparameters)
    w, later = torch.tensor(BEFORE, dtype=torch.float64), torch.tensor(AFTER, dtype=torch.float64)
    b, b_later = torch.zeros(2, dtype=torch.float64), torch.tensor(BIAS, dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.float64)
    mask_later = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.float64)
    if recipe == "ste":
        used, used_later, fixed = mask * w, mask_later * later, mask * later
    elif recipe == "s_ste":
        scale = (w * soft(w, torch.ones(()))).sum() / soft(w, torch.ones(())).square().sum()
        used, used_later = soft(w, scale), soft(later, scale)
        fixed = used / w * later
    else:
        used, used_later, fixed = w, later, later

    diagnostics.before()
    move(optimizer, handle, AFTER, BIAS)
    metrics = diagnostics.after(task.batch)
    start_loss, end_loss = task.by_hand(used, b), task.by_hand(used_later, b_later)
    assert metrics["diagnose/loss_change"] == pytest.approx(end_loss - start_loss)
    assert metrics["diagnose/loss_change_fixed_mask"] == pytest.approx(
        task.by_hand(fixed, b_later) - start_loss
    )
    assert metrics["diagnose/descent_actual"] == pytest.approx(start_loss - end_loss)
    of_weight, of_bias = task.slope(used, b)
    of_bias = (of_bias * (b - b_later)).sum()
    assert metrics["diagnose/descent_predicted_projected"] == pytest.approx(
        float((of_weight * (used - used_later)).sum() + of_bias)
    )
    assert metrics["diagnose/descent_predicted_dense"] == pytest.approx(
        float((of_weight * (w - later)).sum() + of_bias)
    )
    # what the first order misses of a quadratic function is half its curvature along the way
    along = task.batch[0] @ (used_later - used).T + b_later - b
    curvature = float(along.square().sum() / 14)
    assert metrics["diagnose/descent_predicted_projected"] - metrics[
        "diagnose/descent_actual"
    ] == pytest.approx(curvature)


def test_a_change_of_masks_alone_spoils_the_step():
    """At a tie the weights hardly move, and yet the loss jumps under a hard threshold."""
    optimizer, handle, task, diagnostics = start("ste")
    tie = [[4.0, 3.0, 2.999, 1.0], BEFORE[1]]
    move(optimizer, handle, tie, [0.0, 0.0])
    diagnostics.before()
    move(optimizer, handle, [[4.0, 2.999, 3.0, 1.0], BEFORE[1]], [0.0, 0.0])
    metrics = diagnostics.after(task.batch)
    assert abs(metrics["diagnose/loss_change"]) > 100 * abs(
        metrics["diagnose/loss_change_fixed_mask"]
    )


def test_oscillation_counts_flips_of_every_entry():
    optimizer, handle, task, diagnostics = start("ste")
    seen = []
    for weight in (AFTER, BEFORE, BEFORE, AFTER):
        diagnostics.before()
        move(optimizer, handle, weight, BIAS)
        seen.append(
            {
                key.partition("/")[2]: value
                for key, value in diagnostics.after(task.batch).items()
                if "flip" in key
            }
        )
    shares = [(row["flipped"], row["flipped_again"], row["flips"]) for row in seen]
    assert shares == [
        (2 / 8, 0, 2 / 8),
        (2 / 8, 2 / 8, 4 / 8),
        (2 / 8, 2 / 8, 4 / 8),
        (2 / 8, 2 / 8, 6 / 8),
    ]
    assert [row["flip_interval"] for row in seen] == [1, 1, 1, 1]
    move(optimizer, handle, BEFORE, BIAS)  # not looked at: the masks are compared across it
    diagnostics.before()
    move(optimizer, handle, BEFORE, BIAS)
    row = diagnostics.after(task.batch)
    assert (row["diagnose/flip_interval"], row["diagnose/flips"]) == (2, 1.0)


# --- no trace -------------------------------------------------------------------------------------


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose running statistics and random numbers a careless look would change."""
    monkeypatch.setattr(models, "build", build_noisy)


SWITCH = {"step": ["recipe.switch=0.5"], "sdgf_geometric": ["recipe.frames=1"]}


@pytest.mark.parametrize("recipe", ["s_ste", "step", "maskllm"])
def test_training_is_the_same_to_the_bit(recipe, tmp_path, noisy):
    ends = []
    for every in ("null", "1"):
        options = [
            "model.exclude=[stem,head.*]",
            "trainer.accumulate=2",
            f"trainer.diagnose_every={every}",
        ]
        cfg = config(tmp_path / every, f"recipe={recipe}", *options, *SWITCH.get(recipe, []))
        finished(cfg)
        state = checkpoint.load(run_folder(cfg) / "checkpoint.pt")
        logged = [
            {k: v for k, v in row.items() if not k.startswith("diagnose/")}
            for row in rows(run_folder(cfg))
        ]
        logged = [row for row in logged if set(row) > {"step", "epoch"}]
        ends.append(
            (
                state["model"],
                state["random"][0]["torch"],
                logged,
                (run_folder(cfg) / "model.safetensors").read_bytes(),
            )
        )
        looked = [row for row in rows(run_folder(cfg)) if "diagnose/loss_change" in row]
        assert len(looked) == (0 if every == "null" else 12)
        assert any(row["diagnose/loss_change"] for row in looked) == (every != "null")
    assert ends[0][0].keys() == ends[1][0].keys()
    assert all(torch.equal(value, ends[1][0][key]) for key, value in ends[0][0].items())
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2:] == ends[1][2:]


def test_losses_are_of_the_step_s_batch_in_evaluation_mode(tmp_path, noisy):
    """Batch normalisation uses the running statistics of after the step in both losses; dropout is
    off.
    """
    cfg = config(
        tmp_path, "recipe=sr_ste", "model.exclude=[stem,head.*]", "trainer.diagnose_every=1"
    )
    loop = Loop(cfg, build.build(cfg), Console(None), "0123456789")
    diagnostics = loop.diagnostics
    loop.steps.train_step(0, 0, measure_flips=False)
    diagnostics.before()
    former = copy.deepcopy(loop.model)
    metrics = diagnostics.after(loop.steps.train_step(0, 1, measure_flips=False))
    for name, buffer in loop.model.named_buffers():
        if "running" in name:
            former.get_buffer(name).copy_(buffer)
    batch = loop.task.micro_batches(0, 1, 1)[0]
    with torch.no_grad():
        start, end = (
            float(loop.task.loss(copy.deepcopy(model).eval(), batch))
            for model in (former, loop.model)
        )
    assert metrics["diagnose/loss_change"] == pytest.approx(end - start, rel=1e-3)
    assert all(p.grad is None for p in loop.model.parameters())


def test_a_resumed_run_goes_on_counting(tmp_path):
    words = ("recipe=sr_ste", "trainer.diagnose_every=2", "optimizer.lr=0.02")
    assert resumed(tmp_path, *words, steps=(5,)).rows[-1]["diagnose/flipped_again"] > 0
