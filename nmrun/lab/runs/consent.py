"""Consent to the code that a run folder names: what stands as ``_target_`` in its config is imported
and called, and a folder may come from anybody.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from nmrun.errors import ConfigError
from nmrun.recipes import installed

BUILT = ("dataset", "model")  # the groups that a network needs


def option(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes`` to a verb that builds a run's network."""
    told = "import the code that the run names (dataset._target_, model._target_)"
    parser.add_argument("--yes", action="store_true", help=told)


def code(config: Mapping[str, Any], groups: Iterable[str] = BUILT) -> list[str]:
    """The ``_target_`` of each of these groups, but for recipes that an installed package registers.
    Any other counts: among what is installed there are functions that load anything.
    """
    targets = (config.get(group, {}).get("_target_") for group in groups)
    registered = {None, *installed().values()}
    return [str(target) for target in targets if target not in registered]


def demand(
    folder: object, config: Mapping[str, Any], given: bool, groups: Iterable[str] = BUILT
) -> None:
    """Raise ConfigError where a run's config names code, unless consent is given."""
    if not given and (found := code(config, groups)):
        raise ConfigError(
            f"{folder}: the run imports {', '.join(found)}, which may do anything; --yes says that "
            "you trust it"
        )
