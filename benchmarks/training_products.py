"""What N:M products gain in a training step: a recipe with them and by masks alone, beside dense steps.

    python benchmarks/training_products.py [--model gpt_512] [--recipe sr_ste] [--sparsity 2:4 1:16]
        [--steps 1] [--rounds 12] [--out DIR] [key=value ...]

``dense`` is by oneDNN where that is faster, ``torch`` by torch's default products; ``plain_loop`` is a
loop of a few lines. ``masked`` has trainer.acceleration=off, ``accelerated`` is as runs are.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from nmrun.lab.bench import harness, train
from nmrun.lab.bench.harness import Benchmark, Call, Case, Row
from nmrun.lab.bench.options import NETWORKS, composed, random_text
from nmrun.lab.train.build import prepare

OFF = "trainer.acceleration=off"


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=NETWORKS, default="gpt_512")
    parser.add_argument("--recipe", default="sr_ste")
    parser.add_argument("--sparsity", nargs="+", default=["2:4"])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    words = [word for word in sys.argv[1:] if "=" in word]
    options = parser.parse_args([word for word in sys.argv[1:] if word not in words])
    words = [*NETWORKS[options.model], "trainer.epochs=1000000", *words]

    def cases() -> Iterator[Case]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            random_text(folder)

            def loop(how: list[str], row: Row) -> Call:
                return train.nmruns_loop(composed(folder, [*words, *how]), options.steps, row)

            def plain(row: Row) -> Call:
                dense = composed(folder, [*words, "recipe=dense"])
                return train.plain_loop(dense, options.steps, row)

            for ratio in options.sparsity:
                sparse = [f"recipe={options.recipe}", f"sparsity='{ratio}'"]
                loops: dict[str, Callable[[Row], Call]] = {
                    "dense": partial(loop, ["recipe=dense"]),
                    "torch": partial(loop, ["recipe=dense", OFF]),
                    "plain_loop": plain,
                    "masked": partial(loop, [*sparse, OFF]),
                    "accelerated": partial(loop, sparse),
                }
                yield Case({"model": options.model, "sparsity": ratio}, loops)

    clock = harness.Clock(prepare(composed(Path(), words)), options.steps)
    page = partial(train.page, clock=clock)
    command = shlex.join(["python", *sys.argv])
    benchmark = Benchmark(cases(), page, clock, options.rounds, train.compared)
    harness.run("training_products", benchmark, options.out, command)


if __name__ == "__main__":
    main()
