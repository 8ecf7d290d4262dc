"""nmrun: train neural networks with N:M structured sparsity, and compare the recipes that do it.

The library: :func:`sparsify`, :func:`accelerate`, :func:`sparse_activations`, :func:`deploy`,
:func:`load_packed`, :func:`prune`, ``nmrun.optim`` and ``nmrun.sparsity``. The command line as
functions: :func:`run`, :func:`sweep`, :func:`runs`, :func:`table`, :func:`plot`.

Importing ``nmrun`` is cheap: torch and pandas are imported when a name that needs them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmrun import errors as errors
    from nmrun import optim as optim
    from nmrun import sparsity as sparsity
    from nmrun.fast.acceleration import accelerate as accelerate
    from nmrun.fast.deploy import deploy as deploy
    from nmrun.fast.load import load_packed as load_packed
    from nmrun.lab.api.reports import plot as plot
    from nmrun.lab.api.reports import runs as runs
    from nmrun.lab.api.reports import table as table
    from nmrun.lab.api.runs import Result as Result
    from nmrun.lab.api.runs import run as run
    from nmrun.lab.api.runs import sweep as sweep
    from nmrun.oneshot.prune import Pruned as Pruned
    from nmrun.oneshot.prune import prune as prune
    from nmrun.patterns import Pattern as Pattern
    from nmrun.step.activations import SparseActivations as SparseActivations
    from nmrun.step.activations import sparse_activations as sparse_activations
    from nmrun.step.handle import Handle as Handle
    from nmrun.step.sparsify import sparsify as sparsify

__version__ = "0.1.0"

_HOMES = {
    "accelerate": "nmrun.fast.acceleration",
    "deploy": "nmrun.fast.deploy",
    "load_packed": "nmrun.fast.load",
    "prune": "nmrun.oneshot.prune",
    "Pruned": "nmrun.oneshot.prune",
    "sparse_activations": "nmrun.step.activations",
    "SparseActivations": "nmrun.step.activations",
    "sparsify": "nmrun.step.sparsify",
    "Handle": "nmrun.step.handle",
    "Pattern": "nmrun.patterns",
    "Result": "nmrun.lab.api.runs",
    "plot": "nmrun.lab.api.reports",
    "run": "nmrun.lab.api.runs",
    "runs": "nmrun.lab.api.reports",
    "sweep": "nmrun.lab.api.runs",
    "table": "nmrun.lab.api.reports",
}
_MODULES = ("errors", "optim", "sparsity")
__all__ = ["__version__", *_MODULES, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"nmrun.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'nmrun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
