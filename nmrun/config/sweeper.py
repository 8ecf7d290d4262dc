"""The sweeper of nmrun: Hydra's own, which takes ``zip=`` and ``experiment=`` as well."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins

from nmrun.config import experiment, sweep
from nmrun.config.source import SWEEPER

Plugins.instance()  # loads Hydra's own plugins anew, and so has to come before the next line
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402


class NMSweeper(BasicSweeper):
    """The jobs of several sweeps, one sweep's after the other's, in one launch.

    A launcher can so run any of them side by side. The sweeps are those of the record of the sweep,
    which the command line has checked; without a record, those that ``zip=`` and ``experiment=``
    stand for among the arguments.
    """

    def split_arguments(  # type: ignore[override]  # a static method there
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs, in batches.

        Args:
            overrides: ``hydra.sweeper.params``, then the arguments.
            max_batch_size: how many jobs are launched at a time; None for all.
        """
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        params, arguments = overrides[: len(self.params)], overrides[len(self.params) :]
        jobs = []
        for words in _sweeps([argument.input_line or "" for argument in arguments]):
            parsed = parser.parse_overrides([word for word in words if not sweep.is_hydras(word)])
            jobs += BasicSweeper.split_arguments([*params, *parsed], None)[0]
        return list(self.split_overrides_to_chunks(jobs, max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: ``precheck`` has seen to each job, and composing them all takes long."""


def _sweeps(arguments: list[str]) -> list[list[str]]:
    recorded = sweep.read(Path(os.environ[sweep.SWEEP])).sweeps if sweep.SWEEP in os.environ else []
    return recorded or experiment.expand(arguments, multirun=True)


def register() -> None:
    """Make the class known to Hydra, which so need not look for it.

    The node ``hydra/sweeper: nmrun``, which names it, is registered by ``nmrun.config.source``.
    """
    plugins = Plugins.instance()
    plugins.register(NMSweeper)
    plugins.class_name_to_class[SWEEPER["_target_"]] = NMSweeper
