"""How far a comparison is: the runs that are done, by whichever process, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nmrun.config.identity import result_in, run_folder
from nmrun.config.sweep import span
from nmrun.tune.comparison import configs, study_of
from nmrun.tune.plan import Cell, total

ENDED = ("finished", "failed")  # ends of a seed's run after which nothing is left to do


class Progress:
    """Counts what is ahead of a comparison, from now on.

    Args:
        cells: of the comparison.
        trials: of each.
    """

    def __init__(self, cells: Sequence[Cell], trials: int) -> None:
        self.open, self.trials, self.total = list(cells), trials, total(cells, trials)
        self.began, self.at_first = time.monotonic(), self.ahead()

    def ahead(self) -> int:
        """Count the runs that have not ended, in all processes."""
        counts = [ahead(cell, self.trials) for cell in self.open]
        # a cell that is done stays so, and to look at its seeds takes longer than many a run
        self.open = [cell for cell, count in zip(self.open, counts, strict=True) if count]
        return sum(counts)

    def line(self, told: str) -> str:
        """Make the line that tells of a run: ``[3/24] ... (12 min left)``.

        A run takes what passed since the beginning for each of those that ended since.
        """
        ahead = self.ahead()
        ended, passed = self.at_first - ahead, time.monotonic() - self.began
        left = f" ({span(passed / ended * ahead)} left)" if ended > 0 and ahead else ""
        return f"[{self.total - ahead}/{self.total}] {told}{left}"


def ahead(cell: Cell, trials: int) -> int:
    """Count the runs of a cell that have not ended: trials, repeats of the best, seeds.

    Args:
        cell: the cell.
        trials: the number of its trials.
    """
    done = len(study_of(cell).trials())
    if done < trials:
        return total([cell], trials) - done
    repeats = len(study_of(cell).to_repeat(trials))
    if repeats:
        return repeats + len(cell.seeds)
    ends = [result_in(run_folder(config)).get("status") for config in configs(cell, trials)]
    return sum(end not in ENDED for end in ends)
