"""CPU seconds of pruning and of 98 retraining steps of the network of docs/results/retraining.md:
a character-level GPT with random weights, 16 texts of 64 characters a step, one thread.

``python benchmarks/retraining_cost.py`` writes docs/results/retraining_cost.csv: of pruning the least of
three, of retraining one. ``asp_taught`` is ASP with a dense teacher, whose forward pass is the same
with any recipe.
"""

from __future__ import annotations

import copy
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import nmrun
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.train.build import divergence
from nmrun.oneshot import METHODS

OUT = Path(__file__).parents[1] / "docs" / "results" / "retraining_cost.csv"
RATIO, STEPS = "2:4", 98
VOCABULARY, CONTEXT, BATCH, CALIBRATION = 65, 64, 16, 8  # 8 batches of 16: 128 texts
OPTIONS: dict[str, Any] = {
    "asp": {"prune_at": 0.0},
    "proxsparse": {"dense": 0.0},
    "maskllm": {"dense": 0.0},
    "sqft": {"rank": 128},
}
RECIPES = ("dense", "asp", "sr_ste", "step", "s_ste", "slope", "sqft", "ast", "cast", "proxsparse", "maskllm")  # fmt: skip


def pruned(method: str, model: GPTNetwork) -> None:
    """Prune the network by the method."""
    texts = [torch.randint(VOCABULARY, (BATCH, CONTEXT)) for _ in range(CALIBRATION)]
    nmrun.prune(model, texts, method, RATIO)


def taught(recipe: str, model: GPTNetwork) -> None:
    """Train the network by the recipe, with what it was before as the teacher."""
    retrained(recipe, model, copy.deepcopy(model))


def retrained(recipe: str, model: GPTNetwork, teacher: GPTNetwork | None = None) -> None:
    """Train the network by the recipe, clipped as in the runs."""
    optimizer = nmrun.optim.Adam(model.parameters(), 1e-3)
    nmrun.sparsify(
        model, optimizer, recipe, RATIO, STEPS, exclude="lm_head", **OPTIONS.get(recipe, {})
    )
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
        logits = model(text[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                said = teacher(text[:, :-1])
            loss = 0.33 * loss + 0.67 * divergence(logits, said, 2.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def seconds(work: Callable[[str, GPTNetwork], None], name: str, times: int) -> float:
    """The least CPU seconds of some tries, each on a copy."""
    torch.manual_seed(0)
    model, found = GPTNetwork(VOCABULARY, CONTEXT, 2, 4, 128), []
    for _ in range(times):
        own, began = copy.deepcopy(model), time.process_time()
        work(name, own)
        found.append(time.process_time() - began)
    return min(found)


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    rows = [(name, seconds(pruned, name, 3)) for name in METHODS]
    rows += [(name, seconds(retrained, name, 1)) for name in RECIPES]
    rows += [("asp_taught", seconds(taught, "asp", 1))]
    with OUT.open("w") as file:
        written = csv.writer(file, lineterminator="\n")
        written.writerow(["recipe", "cpu_seconds"])
        written.writerows((name, f"{value:.2f}") for name, value in rows)


if __name__ == "__main__":
    main()
