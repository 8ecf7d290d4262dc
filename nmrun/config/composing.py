"""Hydra over the configs of the package, for as long as something is composed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra


@contextlib.contextmanager
def composing(config_dir: str | None = None) -> Iterator[None]:
    """Let ``hydra.compose("nmrun", words)`` compose a config of nmrun, while the context is entered.

    Whoever had initialised Hydra before finds it so again.

    Args:
        config_dir: a folder of more configs, which exists.
    """
    search_path = create_config_search_path("pkg://nmrun.conf")
    if config_dir is not None:
        search_path.prepend(
            "command-line",
            f"file://{Path(config_dir).absolute()}",
            SearchPathQuery(provider="schema"),
        )
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        Hydra.create_main_hydra2("nmrun", search_path)
        yield
    finally:
        GlobalHydra.instance().hydra = before
