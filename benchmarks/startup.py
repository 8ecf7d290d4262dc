"""What the command costs beyond its training: whole processes, from the start to the exit.

``python benchmarks/startup.py [--rounds 7] [--against FOLDER] [--out FILE]``. A round runs each
command once, with this checkout and, with ``--against``, with another one, in alternating order.
``beyond`` is a run's time less that of its training loop, as result.json has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
RUN = "recipe=step sparsity=2:8 force=true"
COMMANDS = {
    "import torch": "",
    "one run": RUN,
    "one run, track=local": f"{RUN} track=local",
    "a sweep of 4 runs": "-m recipe=ste,sr_ste sparsity=2:4,1:8 trainer.epochs=2 force=true",
    "--help": "--help",
    "a mistake": "recipe=stpe",
}


class Times(NamedTuple):
    """Seconds: wall, CPU of the process and its children, and wall outside of training."""

    wall: float
    cpu: float
    beyond: float


def once(words: str, checkout: Path) -> Times:
    """Run a command in an empty folder; no words import torch."""
    code = ["-m", "nmrun", *words.split()] if words else ["-c", "import torch"]
    # bytecode may be kept, as it is where nmrun is installed
    own = {"PYTHONPATH": str(checkout), "WANDB_MODE": "offline", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, *code], cwd=folder, env=os.environ | own, capture_output=True
        )
        wall, after = time.perf_counter() - began, os.times()
        results = [json.loads(path.read_text()) for path in Path(folder).rglob("result.json")]
        if words.split()[-1:] == ["force=true"] and not results:
            raise RuntimeError(f"{words}: there is no result")
    used = after.children_user + after.children_system
    cpu = used - before.children_user - before.children_system
    return Times(wall, cpu, wall - sum(result["seconds"] for result in results))


def row(name: str, times: list[Times]) -> str:
    """Medians and quartiles as a row of a table."""
    cells = []
    for column in zip(*times, strict=True):
        q1, middle, q3 = statistics.quantiles(column, n=4, method="inclusive")
        cells.append(f"{middle:.2f} [{q1:.2f}, {q3:.2f}]")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    checkouts = {"": HERE} | ({"before: ": options.against} if options.against else {})
    cases = {
        f"{label}{name}": (COMMANDS[name], checkout)
        for name in options.only
        for label, checkout in checkouts.items()
        if name != "import torch" or not label
    }
    times: dict[str, list[Times]] = {name: [] for name in cases}
    for number in range(-1, options.rounds):  # the first round fills caches
        for name in list(cases)[:: 1 if number % 2 else -1]:
            found = once(*cases[name])
            if number >= 0:
                times[name].append(found)
    head = f"Seconds, median [quartiles] of {options.rounds}; {os.cpu_count()} cores."
    lines = [head, "", "| command | wall | CPU | beyond training |", "|---|---|---|---|"]
    text = "\n".join([*lines, *(row(name, found) for name, found in times.items())])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
