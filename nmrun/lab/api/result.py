"""A run that has ended, as ``nmrun.run`` returns it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import RunError
from nmrun.lab.runs import consent
from nmrun.lab.runs.run_folder import METRICS, RunFolder
from nmrun.patterns import written

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@dataclass(frozen=True, repr=False)
class Result:
    """A run and its folder.

    Attributes:
        status: ``finished``; ``skipped`` where it had finished before; ``planned`` for
            ``dry=true``, which trains nothing and has no folder.
        config: the whole config, nested plain data.
        metrics: those of the last weights by name (``test/accuracy``), and those of the best
            weights by validation under ``best/``; None for what was not finite.
        folder: the run folder.
    """

    status: str
    config: dict[str, Any]
    metrics: dict[str, float | None]
    folder: Path

    def history(self) -> pd.DataFrame:
        """Read what was logged while the run trained.

        Returns:
            A row for each line of ``metrics.jsonl``, with ``step`` and ``epoch``; what a line does
            not have is missing.

        Raises:
            RunError: where there is no such file, or it was changed since the run finished.
        """
        from nmrun.lab.compare.records import frame

        if not (self.folder / METRICS).is_file():
            raise RunError(
                f"{self.folder / METRICS} is missing: nothing was logged there, or it was removed"
            )
        return frame(RunFolder(self.folder).rows())

    def model(self) -> nn.Module:
        """Build the run's model with its last weights, which are checked to be N:M.

        Returns:
            The model, on the CPU and set to evaluation.

        Raises:
            RunError: where the folder holds no finished run, or weights that do not hold their
                pattern.
        """
        from nmrun.lab.api.process import unchanged
        from nmrun.lab.export import finished_run

        try:
            with unchanged():  # building draws random numbers
                run = finished_run.read(self.folder)
                # what was asked for here is trusted, and no more
                asked = consent.code(run.result["config"]) == consent.code(self.config)
                run = replace(run, trusted=asked)
                model, _ = finished_run.network(run)
                model.load_state_dict(run.state)
                return model
        except (ValueError, RuntimeError) as error:
            raise RunError(" ".join(str(error).split())) from None

    def __repr__(self) -> str:
        lines = self._lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(["nmrun.Result", *(f"  {name:{width}}  {value}" for name, value in lines)])

    def _repr_html_(self) -> str:
        from nmrun.lab.show.formats import Grid, html_table

        lines = [([name], [(value, False)]) for name, value in self._lines()]
        return html_table(Grid(["nmrun.Result"], 1, ["", ""], lines))

    def _lines(self) -> list[tuple[str, str]]:
        """What there is to show: name and value."""
        config = self.config
        groups = ("dataset", "model", "recipe")
        shown = {name: value for name, value in self.metrics.items() if name[:5] != "best/"}
        return [
            ("status", self.status),
            *((group, str(config[group]["name"])) for group in groups),
            ("sparsity", written(config["sparsity"])),
            ("seed", str(config["seed"])),
            *((name, "-" if value is None else f"{value:.4g}") for name, value in shown.items()),
            ("folder", str(self.folder)),
        ]
