"""Shared by all tests: no tracking to anywhere, few threads, everything written below a temporary
folder.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verbs import verb

from nmrun.lab.runs.run_folder import RunFolder

os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models, and processes side by side
os.environ.pop("WANDB_API_KEY", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # a program holds back what it prints, as for most users
os.fsync = lambda handle: None  # no test cuts the power, and waiting for the disk takes long
# as of a job in the background of a script, or under nohup, they may be ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through it again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers alone as after any other, its fixtures' among them, and
    compiles as often as torch allows.
    """
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def nmrun_cli(tmp_path: Path):
    """Run the command line in a process of its own, in an empty folder; returns the completed
    process.
    """

    def call(
        *arguments: str, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        import preloaded

        return preloaded.run(arguments, tmp_path, timeout, {**os.environ, **environment})

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels stay for the next module, process and run: their names say what they
    were built from.
    """
    cache = getattr(pytestconfig, "cache", None)
    return cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels")


@pytest.fixture
def kernels_for_small_weights(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The compiled CPU kernels work on weights of any size, and are kept in a cache of the tests'."""
    from nmrun.kernels import cpu

    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setattr(cpu, "SMALLEST", 1)
    yield
    cpu.load.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a C compiler: nothing that was built before is there."""
    from nmrun.fast import fused
    from nmrun.fast.cpu.kernels import bf16, int8, products
    from nmrun.kernels import compiler, cpu

    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    for module in (bf16, fused, int8, products):
        monkeypatch.setattr(module, "KERNELS", replace(module.KERNELS))
    cpu.load.cache_clear()
    yield
    cpu.load.cache_clear()


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small layers are accelerated too; what is measured stays in this test."""
    from nmrun.fast.cpu import probe

    monkeypatch.setattr(probe, "SMALLEST", 1)
    monkeypatch.setattr(probe, "ROUNDS", 2)
    monkeypatch.setattr("nmrun.fast.measurement.cache_folder", lambda: tmp_path)


@pytest.fixture
def write(tmp_path: Path):
    """Write the result.json of one run; a double underscore in a name is a dot
    (``optimizer__lr=0.1``), and without one the name is a key by itself (``init=...``).
    """

    def call(
        recipe: str, ratio: str, seed: int, accuracy: float | None = None, **other: object
    ) -> Path:
        n, m = (None, None) if ratio == "dense" else map(int, ratio.split(":"))
        config: dict = {
            "dataset": {"name": "digits"}, "model": {"name": "small_conv", "channels": [32, 64]}, "recipe": {"name": recipe},
            "sparsity": {"n": n, "m": m}, "optimizer": {"name": "adam", "lr": 0.001}, "schedule": {"name": "constant"},
            "trainer": {"epochs": 12, "clip": None, "device": "auto", "distill": None}, "track": {"name": "local"}, "seed": seed,
            "init": None, "output_dir": "outputs",
        }  # fmt: skip
        status, loss = str(other.pop("status", "finished")), other.pop("loss", None)
        root = tmp_path / str(other.pop("root", "outputs"))
        for key, value in other.items():
            group, apart, name = key.partition("__")
            (config[group] if apart else config)[name or key] = value
        final = {
            key: value
            for key, value in {"test/accuracy": accuracy, "test/loss": loss}.items()
            if value is not None
        }
        best = {key: value + 0.005 for key, value in final.items()}
        folder = (
            root
            / config["dataset"]["name"]
            / config["model"]["name"]
            / recipe
            / ratio.replace(":", "of")
            / f"s{seed}-{len(other):08x}"
        )
        for number in range(100):  # the id, made unique by counting
            place = folder.with_name(f"{folder.name}{number:02}")
            if not place.exists():
                break
        place.mkdir(parents=True)
        result = {
            "status": status, "id": place.name.partition("-")[2], "config": config, "metrics": {"final": final, "best": best},
            "sparsity": {}, "environment": {"commit": "abc"}, "seconds": 2.5,
        }  # fmt: skip
        RunFolder(place).write_result(result)
        return place

    return call


@pytest.fixture
def table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """``nmrun table outputs ...`` in this process: (exit status, standard output, standard error)."""

    def call(*arguments: str, paths: tuple[str, ...] = ("outputs",)) -> tuple[int, str, str]:
        status = verb("table", *(str(tmp_path / path) for path in paths), *arguments)
        return status, *capsys.readouterr()

    return call
