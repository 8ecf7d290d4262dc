"""What a finished run leaves: its final and best weights, and their metrics."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nmrun import atomic, ranks
from nmrun.errors import RunError
from nmrun.lab.runs.run_folder import BEST, DENSE, FINAL
from nmrun.lab.train import checkpoint
from nmrun.lab.train.loop import Loop


def write(folder: Path, loop: Loop) -> dict[str, Any]:
    """Save the final weights and the best ones, and evaluate on each split what was not yet: the
    last step's validation is that of the final weights, unless these are an average, and the best
    weights may be the final ones. All ranks call.

    All that is done here can be done again from the last checkpoint, and counts as the run's time.

    Args:
        folder: the run's folder, which gets ``model.safetensors``, if an evaluation held the
            pattern ``best.safetensors``, and if ``trainer.evaluate`` asks for the dense weights
            behind sparse ones ``dense.safetensors``.
        loop: its training, at the end.

    Returns:
        What is in ``result.json`` of a finished run only.

    Raises:
        RunError: if the metric or a weight is not finite.
    """
    evaluation, report = loop.evaluation, loop.handle.report()
    began, metric = time.perf_counter(), f"eval/{loop.task.metric}"
    last = evaluation.last if evaluation.last.get("step") == loop.step else {}
    known = {key: value for key, value in last.items() if key.startswith("eval/")}
    if loop.average.last > 1:
        known = {}
    of_dense = evaluation.evaluate_dense("test")
    if not known:
        of_dense |= evaluation.evaluate_dense("val")
    if not math.isfinite(known.get(metric, 0.0)):
        raise RunError(f"the final {metric} is not finite")
    if evaluation.trainer.evaluate != "sparse" and loop.handle.sparse:
        save_weights(folder / DENSE, loop.held.gathered(loop.held.dense_state_dict()))
    weights = loop.finalize()  # from here on, what is evaluated is what is saved
    save_weights(folder / FINAL, loop.held.gathered(weights))
    best: dict[str, float] = dict(evaluation.best)
    if best:
        save_weights(folder / BEST, loop.held.gathered(evaluation.best_weights))
    final = (known or evaluation.evaluate("val")) | evaluation.evaluate("test") | of_dense
    if not math.isfinite(final[metric]):
        raise RunError(f"the final {metric} is not finite")
    if best:
        tested = {
            key: value
            for key, value in final.items()
            if key.startswith("test/") and "/dense/" not in key
        }
        if not known or best.get("step") != loop.step:  # earlier versions kept no step
            loop.held.load_final_state_dict(evaluation.best_weights)
            tested = evaluation.evaluate("test")
        best |= {"candidates": evaluation.candidates, **tested}
    loop.seconds += time.perf_counter() - began
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
        with atomic.replaced(path) as partial:
            save_file(weights, partial)


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a kill has left of :func:`save_weights`: safetensors writes beside the
    name that it is given.

    Args:
        folder: a run's, which is ours.
    """
    for path in folder.glob(".tmp*"):
        path.unlink()
