"""What int8 costs the metric of finished runs: float32 and int8 on their validation set.

    python benchmarks/int8_accuracy.py RUN... --out benchmarks/results/int8_accuracy.csv

Each run is exported as `nmrun export RUN --format packed --precision int8` does, which measures both.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
from pathlib import Path

import torch

from nmrun.lab.export import finished_run, packed

COLUMNS = (
    "run",
    "model",
    "recipe",
    "sparsity",
    "seed",
    "metric",
    "float32",
    "int8",
    "layers",
    "int8_layers",
)


def row(folder: Path) -> dict[str, object]:
    """What one run's export says."""
    run = finished_run.read(folder)
    config = run.result["config"]
    with tempfile.TemporaryDirectory() as to:
        first, told, *_ = packed.write(run, Path(to), "int8")
    metric, before, after = re.findall(r"eval/(\S+): (\S+) before, (\S+) in int8", told)[0]
    layers, low = re.findall(r"in (\d+) layers, (\d+) of them in int8", first)[0]
    of = (
        folder.name,
        config["model"]["name"],
        config["recipe"]["name"],
        run.result["sparsity"]["pattern"],
        config["seed"],
    )
    return dict(zip(COLUMNS, (*of, metric, before, after, layers, low), strict=True))


def main() -> None:
    """Write the table, a line a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="a .csv file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(folder) for folder in options.runs]
    with options.out.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda r: (str(r["sparsity"]), r["seed"])))


if __name__ == "__main__":
    main()
