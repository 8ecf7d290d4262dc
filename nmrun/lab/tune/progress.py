"""How far a comparison is: the runs that are done, by whichever process, and the time that is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.tune.comparison import configs, study_of
from nmrun.lab.tune.plan import TuningCell, total
from nmrun.lab.tune.study import ENDED, RUNS
from nmrun.lab.words.identity import IRRELEVANT, completed, run_folder
from nmrun.lab.words.sweep import span


class TuningProgress:
    """Counts what is ahead of a comparison, from now on."""

    def __init__(self, cells: Sequence[TuningCell], trials: int) -> None:
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


def ahead(cell: TuningCell, trials: int) -> int:
    """Count the runs of a cell that have not ended: trials, repeats of the best, seeds."""
    study = study_of(cell)
    done = len(study.trials())
    if done < trials:
        return total([cell], trials) - done
    repeats = len(study.to_repeat(trials))
    if repeats:
        return repeats + len(cell.seeds)
    ends = [RunFolder(run_folder(config)).result.get("status") for config in configs(cell, trials)]
    return sum(end not in ENDED for end in ends)


def expected(cells: Sequence[TuningCell], trials: int) -> float | None:
    """The seconds that the runs ahead will take, one after the other, by the runs that there are of
    the same recipe, ratio, network, data and training. A cell without such runs takes what others
    do. None where no run has been measured.
    """
    took = [_took(cell) for cell in cells]
    if not (known := [seconds for each in took for seconds in each]):
        return None
    pairs = zip(cells, took, strict=True)
    return sum(ahead(cell, trials) * statistics.fmean(seconds or known) for cell, seconds in pairs)


def _took(cell: TuningCell) -> list[float]:
    """The seconds of the finished runs that are like a cell's."""
    wanted = _alike(cell.config.plain)
    places = [*(cell.folder / RUNS).glob("*/*/*/*/*"), *run_folder(cell.config).parent.glob("*")]
    results = [result for place in places if (result := RunFolder(place).finished())]
    return [one["seconds"] for one in results if _alike(completed(one["config"])) == wanted]


def _alike(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What decides how long a run takes."""
    leave = {"trainer": IRRELEVANT["trainer"] | {"test"}, "dataset": IRRELEVANT["dataset"]}
    return [
        {key: value for key, value in config[group].items() if key not in leave.get(group, ())}
        for group in ("dataset", "model", "trainer")
    ]
