"""The sweeper of nmrun: it launches the jobs that the command line has composed and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins

from nmrun.lab.config.composition import SWEEPER, BasicSweeper


class NMSweeper(BasicSweeper):
    """Launches the jobs of several sweeps at once, so that a launcher can run any side by side.

    ``jobs`` has the words of each. It is the class's, since Hydra makes the sweeper.
    """

    jobs: ClassVar[list[list[str]]] = []

    def split_arguments(  # type: ignore[override]  # a static method there
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The words of all jobs, in batches."""
        return list(self.split_overrides_to_chunks(self.jobs, max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: ``precheck`` checked the jobs, and composing them all takes long."""


def register(jobs: Sequence[Sequence[str]]) -> None:
    """Register the class with Hydra, under the name in ``hydra/sweeper: nmrun``, for these jobs."""
    NMSweeper.jobs = [list(words) for words in jobs]
    plugins = Plugins.instance()
    plugins.register(NMSweeper)
    plugins.class_name_to_class[SWEEPER["_target_"]] = NMSweeper
