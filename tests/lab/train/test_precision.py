"""Which precision ``trainer.precision=auto`` is on a CPU, whose flags are played; which operations torch
may take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import config, cut_off, finished, result_of
from torch import nn

from nmrun.kernels import compiler
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import build
from nmrun.lab.train.steps import TrainingSteps

CPU = torch.device("cpu")


def played(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(compiler, "processor_flags", lambda: frozenset(flags))


@pytest.mark.parametrize(
    ("flags", "sizes", "precision"),
    [
        (("avx512f", "avx512_bf16"), (1_000_000,), "bf16"),
        (("amx_bf16",), (100_000,) * 20, "bf16"),
        (("amx_bf16",), (1_000_000, 10, 100_000), "bf16"),
        (("amx_bf16",), (1_000_000, 10, 99_999), "fp32"),
        (("amx_bf16",), (50_000,) * 40, "fp32"),
        (("avx512f", "avx512_bf16"), (999_999,), "fp32"),
        (("avx512f", "avx512_bf16"), (), "fp32"),
        (("avx512f", "avx2"), (2_000_000,), "fp32"),
        ((), (2_000_000,), "fp32"),
    ],
)
def test_auto_is_bf16_for_large_networks_on_processors_that_multiply_it(
    flags, sizes, precision, monkeypatch
):
    played(monkeypatch, *flags)
    parameters = [nn.Parameter(torch.empty(1, size, device="meta")) for size in sizes]
    parameters.append(nn.Parameter(torch.empty(2_000_000, device="meta")))  # a bias
    assert build.precision_of("auto", CPU, parameters) == precision
    for name in ("fp32", "bf16"):
        assert build.precision_of(name, CPU, parameters) == name


def losses(cfg: Any, steps: int = 3) -> tuple[str, list[float]]:
    loop = TrainingSteps(cfg, build.build(cfg))
    loop.parts.model.train()
    for step in range(steps):
        loop.train_step(0, step, measure_flips=False)
    return loop.parts.precision, [float(loss) for loss in loop.losses]


def test_a_small_network_has_the_same_bits(tmp_path, monkeypatch):
    played(monkeypatch, "avx512_bf16")
    asked = losses(config(tmp_path, "recipe=sr_ste", "trainer.precision=fp32"))
    assert losses(config(tmp_path, "recipe=sr_ste")) == asked
    monkeypatch.setattr(build, "WORTH_BF16", (1, 1))
    precision, low = losses(config(tmp_path, "recipe=sr_ste"))
    assert precision == "bf16"
    assert low != asked[1]
    assert low == pytest.approx(asked[1], rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_goes_on_keeps_its_precision(precision, tmp_path, monkeypatch):
    """Also on another processor; the result says which it was."""
    monkeypatch.setattr(build, "WORTH_BF16", (1, 1))
    flags = {"fp32": (), "bf16": ("avx512_bf16",)}
    results = []
    for interrupted in (False, True):
        cfg = config(tmp_path / str(interrupted), "recipe=sr_ste")
        played(monkeypatch, *flags[precision])
        if interrupted:
            cut_off(cfg, 8)
            played(monkeypatch, *flags["fp32" if precision == "bf16" else "bf16"])
        finished(cfg)
        result = result_of(run_folder(cfg))
        assert result["environment"]["precision"] == precision
        results.append((result["metrics"], (run_folder(cfg) / "model.safetensors").read_bytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize(("deterministic", "mode"), [("true", 1), ("false", 0)])
def test_operations_with_other_bits_every_time_are_for_those_who_want_them(
    deterministic, mode, tmp_path
):
    before = torch.get_deterministic_debug_mode()
    try:
        build.prepare(config(tmp_path, f"trainer.deterministic={deterministic}"))
        assert torch.get_deterministic_debug_mode() == mode  # 1 warns of what there is no other for
    finally:
        torch.set_deterministic_debug_mode(before)
