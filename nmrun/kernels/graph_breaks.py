"""Calls that ``torch.compile`` looks into nowhere: it stops before them and goes on behind them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])


def breaks_graph(call: Call) -> Call:
    """``torch.compiler.disable``, without its import, which takes seconds, where nothing is
    compiled. The mark alone keeps ``torch.compile`` out of this function, but not out of what it
    calls."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not disabled and (compiler := sys.modules.get("torch._dynamo")) is not None:
            disabled.append(compiler.disable(call))
        return (disabled[0] if disabled else call)(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
