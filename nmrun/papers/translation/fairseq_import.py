"""fairseq, imported late and without its side effects.

Importing any part of it runs all of it (seconds), stores some thirty configs and groups in Hydra's
ConfigStore, where one named ``config`` would become the schema of an application's own, and
configures the root logger to print everything.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from nmrun.errors import ConfigError


def fairseq(module: str) -> Any:
    """Import a module of fairseq, or one that imports fairseq.

    Args:
        module: ``data`` for ``fairseq.data``; modules of nmrun by their whole name.

    Raises:
        ConfigError: if fairseq is not installed.
    """
    if importlib.util.find_spec("fairseq") is None:
        raise ConfigError(
            "this needs fairseq, which is not installed: pip install nmrun[translation]"
        )
    with undisturbed():
        return importlib.import_module(
            module if module.startswith("nmrun.") else f"fairseq.{module}"
        )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hydra's ConfigStore, the root logger and the filters of warnings are the same after as
    before; nothing is logged meanwhile.
    """
    store, root = ConfigStore.instance(), logging.getLogger()
    kept = copy.deepcopy(store.repo), root.level, list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        store.repo, root.level, root.handlers[:], root.manager.disable = kept
        root.manager._clear_cache()  # type: ignore[attr-defined]  # of which loggers are enabled, which depends on the level
