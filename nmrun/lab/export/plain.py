"""Plain safetensors: the names and shapes of the model itself, pruned weights as +0.0, so that any
library loads them.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from nmrun.lab.export.finished_run import FinishedRun, write_about


def write(run: FinishedRun, folder: Path) -> list[str]:
    """Write ``model.safetensors`` and ``sparsity.json``: pattern, recipe and every sparse layer.

    Args:
        folder: where to.
    """
    (folder / "model.safetensors").write_bytes(save(run.state))
    write_about(run.about(), folder)
    return [f"model.safetensors: {run.pattern} holds in {len(run.layers)} layers"]
