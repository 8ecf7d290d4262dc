"""A finished run as exports read it: its weights, checked to be N:M, and their description; and the
export to plain safetensors, which any library loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from nmrun.errors import RunError, refused
from nmrun.lab import models, tasks
from nmrun.lab.arguments import demand_consent
from nmrun.lab.config import schema
from nmrun.lab.runs.run_folder import FINAL, REMEDY, RunFolder, activations_of
from nmrun.lab.tasks.base import Task
from nmrun.oneshot import METHODS
from nmrun.patterns import Pattern, hold
from nmrun.sparsity.check import check_nm
from nmrun.step.activations import SparseActivations


@dataclass(frozen=True)
class SparseLayer:
    """A sparse weight, and the dimension that groups run along."""

    name: str
    pattern: Pattern
    dim: int

    @property
    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "pattern": str(self.pattern), "dim": self.dim}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; ``state`` has its final weights on the CPU, pruned ones +0.0. ``trusted``:
    the code that it names may be imported."""

    folder: Path
    result: dict[str, Any]
    state: dict[str, Tensor]
    layers: list[SparseLayer]
    trusted: bool = False

    @property
    def holds(self) -> str:
        """The patterns, and how many layers have each."""
        return f"{hold(layer.pattern for layer in self.layers)} in {len(self.layers)} layers"

    def describe(self, to: Path, layers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Write ``sparsity.json``, and return what is in it. ``layers`` are other lines than the
        report's, where a format names layers otherwise."""
        sparsity = self.result["sparsity"]
        about = {
            "pattern": sparsity["pattern"],
            "recipe": self.result["config"]["recipe"],
            "layers": sparsity["layers"] if layers is None else layers,
            "id": self.result["id"],
            **self.result.get("signature", {}),
        }
        (to / "sparsity.json").write_text(json.dumps(about, indent=2) + "\n")
        return about


def read(folder: Path, trusted: bool = False) -> FinishedRun:
    """Read a run, sparse or dense, and check it against the hashes of its files. Layers that did
    not hold their pattern in the end, as after a dense end, are dense ones. RunError if it is
    damaged, changed, or not N:M after all; ConfigError if it is not finished."""
    run = RunFolder(folder)
    result, source = run.result, folder / FINAL
    if not (run.problem or run.is_finished):
        run.demand(folder)
    for name, problem in run.broken(contents=True).items():
        raise RunError(f"{folder / name}: {problem}; {REMEDY}")
    try:
        state = load_file(source)
    except SafetensorError as error:
        raise RunError(f"{source} is damaged or cut off ({error})") from None
    sparsity, layers = result["sparsity"], list[SparseLayer]()
    for line in sparsity["layers"]:
        if not line.get("holds", True):  # in a network that ends dense
            continue
        name, pattern = line["name"], Pattern.parse(line.get("pattern", sparsity["pattern"]))
        layers.append(SparseLayer(name, pattern, line.get("dim", 1)))
        try:
            check_nm(state[name], pattern, layers[-1].dim, pad=True)
        except ValueError as error:
            raise RunError(f"{name}: {str(error).removeprefix('tensor ')}") from None
        state[name] = state[name] + 0.0
    return FinishedRun(folder, result, state, layers, trusted)


def network(run: FinishedRun) -> tuple[nn.Module, Task]:
    """The run's network with its weights, on the CPU and set to evaluation, and its task. It prunes
    its activations if the run did in the end."""
    plain = run.result["config"]
    demand_consent(run.folder, plain, run.trusted)
    if plain["recipe"]["name"] in METHODS:  # no recipe, and no part of the network
        plain = {**plain, "recipe": {"name": schema.STAND_IN}}
    config = schema.check(OmegaConf.create(plain))
    task = tasks.build(config, torch.device("cpu"))
    model = models.build(config.model.mapping(), task.inputs).cpu().eval()
    changed = "its network's code or its data have changed since the run"
    with refused(f"{run.folder}: {changed}: ", RuntimeError):
        model.load_state_dict(run.state)
    SparseActivations(model, activations_of(run.result["config"]))
    return model, task


def write_plain(run: FinishedRun, folder: Path) -> list[str]:
    """Write ``model.safetensors`` and ``sparsity.json``: pattern, recipe and every sparse layer."""
    (folder / "model.safetensors").write_bytes(save(run.state))
    run.describe(folder)
    return [f"model.safetensors: {run.holds}"]
