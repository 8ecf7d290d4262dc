"""What a finished run leaves: its final and best weights, and their metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nmrun import ranks
from nmrun.errors import RunError
from nmrun.train import checkpoint
from nmrun.train.loop import Loop


def write(folder: Path, loop: Loop) -> dict[str, Any]:
    """Evaluate and save the final weights and the best ones. All ranks call.

    All that is done here can be done again from the last checkpoint.

    Args:
        folder: the run's folder, which gets ``model.safetensors`` and, if an evaluation held the
            pattern, ``best.safetensors``.
        loop: its training, at the end.

    Returns:
        What is in ``result.json`` of a finished run only.

    Raises:
        RunError: if the metric or a weight is not finite.
    """
    evaluation, report = loop.evaluation, loop.handle.report()
    of_dense = evaluation.evaluate_dense("val") | evaluation.evaluate_dense("test")
    weights = loop.finalize()  # from here on, what is evaluated is what is saved
    final = evaluation.evaluate("val") | evaluation.evaluate("test") | of_dense
    best: dict[str, float] = dict(evaluation.best)
    if not math.isfinite(final[f"eval/{loop.task.metric}"]):
        raise RunError(f"the final eval/{loop.task.metric} is not finite")
    save_weights(folder / "model.safetensors", loop.held.gathered(weights))
    if best:
        best_weights = evaluation.best_weights
        save_weights(folder / "best.safetensors", loop.held.gathered(best_weights))
        loop.held.load_final_state_dict(best_weights)
        best |= {"candidates": evaluation.candidates}
        best |= evaluation.evaluate("test")
    if ranks.leads():
        (folder / checkpoint.PREVIOUS).unlink(missing_ok=True)
        checkpoint.remove_unnamed(folder)
    return {
        "status": "finished",
        "metric": loop.task.metric,
        "metrics": {"final": final, "best": best},
        "notes": dict(loop.task.notes),
        "signature": dict(loop.task.signature),
        "sparsity": report,
    }


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a file of safetensors whole, on the leader alone.

    Args:
        path: where to.
        weights: whole tensors on the CPU, by name.
    """
    if ranks.leads():
        with checkpoint.replaced(path) as partial:
            save_file(weights, partial)
