"""Which parameters decay, and by how much a step moves them; schedules: against closed forms."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from errors import one_line
from runs import config, kill, rows
from torch import nn
from torchvision.models.swin_transformer import SwinTransformerBlockV2

from nmrun.errors import ConfigError
from nmrun.lab import models
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import runner
from nmrun.lab.train.optimizers import is_matrix, optimizer_of, schedule_factor, scheduled
from nmrun.lab.train.steps import TrainingSteps

GPT = {"vocabulary": 20, "context": 8}
IMAGES = {"shape": (1, 8, 8), "classes": 10}


def build(folder: Path, model: str, *options: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    name, *sizes = model.split(",")
    asked = config(
        folder,
        f"model={name}",
        *(f"model.{size}" for size in sizes),
        "optimizer=adamw",
        "optimizer.lr=0.1",
        "optimizer.weight_decay=0.5",
        *options,
    )
    torch.manual_seed(0)
    inputs = GPT if name.startswith("gpt") else IMAGES
    network = models.build(asked.model.mapping(), inputs)
    return network, optimizer_of(asked.optimizer, network)


def decayed(network: nn.Module, by: torch.optim.Optimizer) -> dict[str, float]:
    """What a step with gradients of 0 multiplies each parameter by: AdamW's 1 - lr * decay."""
    for parameter in network.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    by.step()
    return {name: float(p.detach().flatten()[0]) for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    ("model", "spared"),
    [
        # nanoGPT's configure_optimizers: tensors of two dimensions or more decay, wte and wpe too
        ("gpt_tiny,layers=1", ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")),
        # timm for DeiT: no bias, no norm, neither class token nor position table
        (
            "vit_tiny,layers=1",
            ("bias", "ln.weight", "ln_1.weight", "ln_2.weight", "class_token", "pos_embedding"),
        ),
    ],
)
@pytest.mark.parametrize("asked", ["null", "matrices"])
def test_transformers_decay_as_in_their_literature(model, spared, asked, tmp_path):
    left = decayed(*build(tmp_path, model, f"optimizer.decay={asked}"))
    for name, value in left.items():
        assert value == pytest.approx(1.0 if name.endswith(spared) else 1 - 0.1 * 0.5), name
    assert {name for name in left if name.endswith(spared)}
    assert {name for name in left if not name.endswith(spared)}


def test_swin_v2_spares_the_networks_of_its_position_biases():
    """microsoft/Swin-Transformer: no_weight_decay_keywords, and whatever has one dimension."""
    network = SwinTransformerBlockV2(8, 1, [4, 4], [0, 0])
    decay = {name for name, parameter in network.named_parameters() if is_matrix(name, parameter)}
    assert decay == {"attn.qkv.weight", "attn.proj.weight", "mlp.0.weight", "mlp.3.weight"}
    assert any("cpb_mlp" in name for name, _ in network.named_parameters())


@pytest.mark.parametrize(
    ("model", "asked"), [("small_conv", "null"), ("resnet20", "null"), ("gpt_tiny,layers=1", "all")]
)
def test_all_parameters_decay(model, asked, tmp_path):
    network, by = build(tmp_path, model, f"optimizer.decay={asked}")
    assert len(by.param_groups) == 1
    assert list(by.param_groups[0]["params"]) == list(network.parameters())
    assert list(decayed(network, by).values()) == pytest.approx(
        [0.95] * len(list(network.parameters()))
    )


@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_a_rate_for_the_head_goes_with_either(decay, tmp_path):
    network, by = build(tmp_path, "small_conv", f"optimizer.decay={decay}", "optimizer.head_lr=0.3")
    rates = {
        id(p): (group["lr"], group["weight_decay"])
        for group in by.param_groups
        for p in group["params"]
    }
    assert len(rates) == sum(len(g["params"]) for g in by.param_groups)
    for name, p in network.named_parameters():
        matrix = name.endswith("weight") and p.dim() > 1
        expected = (
            0.3 if name.startswith("head") else 0.1,
            0.5 if matrix or decay == "all" else 0.0,
        )
        assert rates[id(p)] == expected, name


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules(warmup, final):
    total = 20
    for step in range(total + 5):
        done = min(1.0, (step - warmup) / (total - warmup))
        expected = {
            "constant": 1.0,
            "linear": final + (1 - final) * (1 - done),
            "cosine": final + (1 - final) * (1 + math.cos(math.pi * done)) / 2,
        }
        for name, factor in expected.items():
            rising = (step + 1) / warmup if step < warmup else factor
            assert schedule_factor(name, warmup, total, final)(step) == pytest.approx(
                rising, abs=1e-12
            )


def test_schedule_names_and_short_runs():
    assert [schedule_factor("cosine", 3, 3)(step) for step in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )


@pytest.mark.parametrize("cycles", [9, 10**23])
def test_more_cycles_than_steps_are_cycles_of_one_step(cycles):
    options = {"name": "linear", "warmup": 0.0, "final": 0.0}
    factor = scheduled({**options, "cycles": cycles}, 0.1, 5)
    one = scheduled({**options, "cycles": 1}, 0.1, 1)
    assert [factor(step) for step in range(5)] == [one(0)] * 5


@pytest.mark.parametrize("total", [20, 21, 40])
@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_cycles_are_the_schedule_again_and_again(cycles, total):
    options = {"name": "cosine", "warmup": 0.2, "final": 0.1, "cycles": cycles}
    factor = scheduled(options, 1.0, total)
    expected = []
    for cycle in range(cycles):
        steps = round((cycle + 1) * total / cycles) - round(cycle * total / cycles)
        warmup = round(0.2 * steps)
        for step in range(steps):
            done = (step - warmup) / (steps - warmup)
            cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
            expected.append((step + 1) / warmup if step < warmup else cosine)
    assert [factor(step) for step in range(total)] == pytest.approx(expected)
    assert factor(total + 5) == pytest.approx(0.1)
    # with two cycles, the step at which ASP prunes is the first of the second
    assert cycles != 2 or factor(round(0.5 * total)) == factor(0)


# the run: 12 steps, 3 an epoch
SCHEDULES = [
    ("StepLR", {"step_size": 2, "gamma": 0.5}, "epoch"),
    ("MultiStepLR", {"milestones": [4, 7]}, "step"),
    ("CosineAnnealingLR", {"eta_min": 0.001}, "step"),
    ("OneCycleLR", {"max_lr": 0.3, "cycle_momentum": False}, "step"),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3}, "epoch"),
]


@pytest.mark.parametrize(("name", "arguments", "interval"), SCHEDULES, ids=lambda each: str(each))
def test_a_schedule_of_torch_s_gives_its_rates_also_to_a_run_that_was_killed(
    name, arguments, interval, tmp_path
):
    """Beside the schedule itself, which steps an optimizer of torch's once an interval."""
    length = {"CosineAnnealingLR": {"T_max": 12}, "OneCycleLR": {"total_steps": 12}}.get(name, {})
    arguments = {**arguments, **({"cycle_momentum": False} if name == "CyclicLR" else {})}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.02)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments, **length)
    expected = []
    for step in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        if interval == "step" or step % 3 == 2:
            optimizer.step()
            schedule.step()
    written = str(arguments).replace("'", "")
    cfg = config(
        tmp_path, "recipe=sr_ste", "optimizer=sgd", "optimizer.lr=0.02", "schedule=custom",
        f"schedule.target=torch.optim.lr_scheduler.{name}", f"schedule.options={written}",
        f"schedule.interval={interval}", "trainer.log_every=1",
    )  # fmt: skip
    kill(cfg, TrainingSteps, "train_step", 5)
    assert runner.run(cfg, run_folder(cfg))["status"] == "finished"
    rates = [row["lr"] for row in rows(run_folder(cfg)) if "lr" in row]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_a_rate_that_falls_at_milestones():
    options = {"name": "multistep", "warmup": 0.1, "milestones": [0.5, 0.75], "gamma": 0.1}
    factor = scheduled(options, 1.0, 20)
    expected = [0.5, 1.0, *[1.0] * 8, *[0.1] * 5, *[0.01] * 5]
    assert [factor(step) for step in range(20)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", None, "'metrics'"),
        ("torch.optim.lr_scheduler.StepLR", None, r"StepLR.* missing 1 required .*step_size"),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 0}, r"StepLR: .* zero"),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": "x"}, r"StepLR: "),
        ("torch.optim.SGD", None, "is no LRScheduler"),
        ("torch.optim.lr_scheduler.NoSuch", None, "cannot be imported"),
    ],
)
def test_what_is_no_schedule_of_the_step_is_refused(target, arguments, message):
    options = {"name": "custom", "target": target, "options": arguments, "interval": "step"}
    with one_line(ConfigError, message):
        scheduled(options, 0.1, 10)


def test_an_optimizer_by_its_class(tmp_path):
    """NAdam with a keyword of its own, by its groups, moves the weights as torch's; Rprop knows no
    weight decay. Resumed after a kill, the run has the same bits."""
    words = ("recipe=sr_ste", "optimizer=custom", "optimizer.lr=0.02")
    for target, more in (
        ("torch.optim.NAdam", ("optimizer.options={momentum_decay: 0.1}",)),
        ("torch.optim.Rprop", ()),
    ):
        cfg = config(tmp_path / "a", *words, f"optimizer.target={target}", *more)
        twin = config(tmp_path / "b", *words, f"optimizer.target={target}", *more)
        kill(cfg, TrainingSteps, "train_step", 5)
        for each in (cfg, twin):
            assert runner.run(each, run_folder(each))["status"] == "finished"
        ends = [(run_folder(each) / "model.safetensors").read_bytes() for each in (cfg, twin)]
        assert ends[0] == ends[1]
    network = models.build(twin.model.mapping(), {"shape": (1, 8, 8), "classes": 10})
    options = dataclasses.replace(
        config(tmp_path, *words, "optimizer.target=torch.optim.NAdam").optimizer,
        options={"momentum_decay": 0.1}, weight_decay=0.5, decay="matrices",
    )  # fmt: skip
    made = optimizer_of(options, network)
    assert type(made) is torch.optim.NAdam
    assert [g["weight_decay"] for g in made.param_groups] == [0.5, 0.0]
    assert {g["momentum_decay"] for g in made.param_groups} == {0.1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer.target=torch.nn.Linear",), "is no Optimizer"),
        (("optimizer.target=torch.optim.Rprop", "optimizer.weight_decay=0.1"), "weight_decay"),
        (("optimizer.target=torch.optim.NAdam", "optimizer.options={beta: 1}"), "'beta'"),
        (("optimizer.target=torch.optim.NAdam", "optimizer.options={lr: 1}"), "argument 'lr'"),
        (("optimizer.target=torch.optim.LBFGS",), "LBFGS"),
    ],
)
def test_what_is_no_such_optimizer_is_refused(words, message, tmp_path):
    cfg = config(tmp_path, "recipe=sr_ste", "optimizer=custom", *words)
    with one_line(ConfigError, message):
        runner.run(cfg, run_folder(cfg))
