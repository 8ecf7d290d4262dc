"""Consent to the code that a run folder names. What its config has as ``_target_`` is imported and
called, and a folder may come from anybody.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from nmrun.errors import ConfigError

BUILT = ("dataset", "model")  # the groups that a network needs


def confirmed(verb: str, question: str) -> bool:
    """Ask, and return whether the answer is yes; ConfigError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{verb}: {question} Nobody to ask here; --yes is the answer")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def consent_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes`` to a verb that builds a run's network."""
    text = "import the code that the run names (dataset._target_, model._target_)"
    parser.add_argument("--yes", action="store_true", help=text)


def code_of(config: Mapping[str, Any], groups: Iterable[str] = BUILT) -> list[str]:
    """The ``_target_`` of each of these groups, but for recipes that an installed package
    registers. Any other counts: among what is installed there are functions that load anything."""
    from nmrun.recipes import installed  # which --help need not wait for

    targets = (config.get(group, {}).get("_target_") for group in groups)
    registered = {None, *installed().values()}
    return [str(target) for target in targets if target not in registered]


def demand_consent(
    folder: object, config: Mapping[str, Any], consent: bool, groups: Iterable[str] = BUILT
) -> None:
    if not consent and (targets := code_of(config, groups)):
        raise ConfigError(
            f"{folder}: the run imports {', '.join(targets)}, which may do anything; --yes says that "
            "you trust it"
        )
