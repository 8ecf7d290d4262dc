"""What a table in a paper needs besides: whom to cite, as BibTeX, and how the table was made."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from nmrun.lab.compare.tables import Table
from nmrun.lab.output import quantity

REFERENCES = Path(__file__).with_name("references.bib")
OF = re.compile(r"  of = \{(.*)\},\n")
DIGITS = 16  # of a checksum


def bibtex(tables: Sequence[Table]) -> str:
    """The entries of nmrun and of the recipes, data sets, metrics and tests of some tables. A line
    names the recipes and data sets that have none."""
    recipes, data = (
        {str(run[key]) for table in tables for run in table.runs.to_dict("records")}
        for key in ("recipe", "dataset")
    )
    metrics = {metric for table in tables for metric in table.metric.split(",")}
    tests = {"baseline"} if any(table.baseline for table in tables) else set()
    used = {"nmrun"} | recipes | data | {name.rpartition("/")[2] for name in metrics} | tests
    entries, known = [], {"dense"}
    for entry in REFERENCES.read_text(encoding="utf-8").split("\n\n")[1:]:
        (names,) = OF.findall(entry)
        known |= {*names.split(", ")}
        if used & {*names.split(", ")}:
            entries.append(OF.sub("", entry).strip() + "\n")
    if without := sorted((recipes | data) - known):
        entries.append(f"% no entry here for {', '.join(without)}\n")
    return "\n".join(entries)


def provenance(command: str, tables: Sequence[Table]) -> list[str]:
    """The command of some tables, the version of nmrun, and a checksum of the runs: of the id and the
    value of each, in the order of the ids."""
    lines = [
        f"{run.get('id')} {metric} {run.get(metric)!r}"
        for table in tables
        for metric in table.metric.split(",")
        for run in table.runs.to_dict("records")
    ]
    checksum = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:DIGITS]
    runs = quantity(sum(len(table.runs) for table in tables), "run")
    version = sys.modules["nmrun"].__version__  # an import would point upwards
    return [command, f"nmrun {version}, {runs} with the checksum {checksum}"]
