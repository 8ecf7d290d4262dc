"""torch's optimizers without torch's compiler, which they import when they are made and when they
step: that takes a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

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


def _eager(method: Call) -> Call:
    """A method of torch's optimizer without torch's own wrapper, which keeps ``torch.compile`` out
    as well, but imports it."""
    inner: Call = getattr(method, "__wrapped__", method)
    return breaks_graph(inner)


class EagerOptimizer(torch.optim.Optimizer):
    add_param_group = _eager(torch.optim.Optimizer.add_param_group)
    zero_grad = _eager(torch.optim.Optimizer.zero_grad)
    state_dict = _eager(torch.optim.Optimizer.state_dict)
    load_state_dict = _eager(torch.optim.Optimizer.load_state_dict)


class SGD(EagerOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``, same arguments and results. It starts a second sooner: it does not import
    torch's compiler where nothing is compiled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stock_step(self, torch.optim.SGD)
        return loss


def stock_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
    """Call ``kind.step`` without hooks: a plain optimizer makes torch wrap them around it."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    # What torch still has around it sets the grad mode and ends a graph that is being compiled, and
    # imports the compiler for that.
    inner = getattr(step, "__wrapped__", None)
    if inner is None or "torch._dynamo" in sys.modules:
        step(optimizer)
        return
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        inner(optimizer)
