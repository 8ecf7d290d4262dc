"""The sweeper of nmrun: Hydra's basic one with ``zip=`` and ``experiment=``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins

from nmrun.lab.folders import sweep
from nmrun.lab.words import command_line
from nmrun.lab.words.composition import SWEEPER
from nmrun.lab.words.hydra_internals import BasicSweeper, product


class NMSweeper(BasicSweeper):
    """Launches the jobs of several sweeps at once, so that a launcher can run any side by side. The
    command line has checked and recorded the sweeps.
    """

    def split_arguments(  # type: ignore[override]  # a static method there
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The overrides of all jobs, in batches. The arguments are ``hydra.sweeper.params``, then
        the words of one sweep."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        params, jobs = overrides[: len(self.params)], []
        folder = Path(os.environ[sweep.SWEEP])
        for words in sweep.read(folder).sweeps:
            parsed = parser.parse_overrides(
                [word for word in words if not command_line.is_hydras(word)]
            )
            jobs += product([*params, *parsed])
        jobs = command_line.each_once(jobs)
        if params:  # which the command line has not counted
            sweep.recount(folder, len(jobs))
        return list(self.split_overrides_to_chunks(jobs, max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: ``precheck`` checked the jobs, and composing them all takes long."""


def register() -> None:
    """Register the class with Hydra, under the name in ``hydra/sweeper: nmrun``."""
    plugins = Plugins.instance()
    plugins.register(NMSweeper)
    plugins.class_name_to_class[SWEEPER["_target_"]] = NMSweeper
