"""Users' own code by its dotted path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def imported(path: str, what: str) -> Any:
    """What ``package.module.name`` names, also in a module of the current folder. Raises ValueError that begins with ``what``."""
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from None
