"""The graph of a model's forward pass, by ``torch.fx``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx, nn

# modules whose functions are known by name
HOMES = {"torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator"}


def graphs(model: nn.Module) -> list[tuple[fx.Graph, set[str]]]:
    """Trace a model in training and in evaluation.

    A submodule that cannot be traced is one node of the graph. A copy of the model is traced.

    Args:
        model: the model.

    Returns:
        Both graphs, each with the names of the modules that cannot be traced and of all modules
        inside them.

    Raises:
        ValueError: in one line, where the model's own ``forward`` cannot be traced.
    """
    try:
        empty: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
        }
        # tracing runs the model's code, which may change its attributes
        twin = copy.deepcopy(model, empty)
        return [_trace(twin.train(training)) for training in (True, False)]
    except Exception as error:  # the model's code may do anything with a symbol for a tensor
        first = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise ValueError(f"the model cannot be traced ({first})") from error


class _Tracer(fx.Tracer):
    """Makes modules of the classes ``opaque`` nodes; ``failed`` is the innermost class that failed."""

    def __init__(self, opaque: set[type]) -> None:
        super().__init__()
        self.opaque = opaque
        self.failed: type | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or type(m)
            raise


def _trace(model: nn.Module) -> tuple[fx.Graph, set[str]]:
    opaque: set[type] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            graph = tracer.trace(model)
        except Exception:
            if tracer.failed is None or tracer.failed in opaque:
                raise
            opaque.add(tracer.failed)
            continue
        hidden = {
            id(part)
            for module in model.modules()
            if type(module) in opaque
            for part in module.modules()
        }
        return graph, {name for name, module in model.named_modules() if id(module) in hidden}


def name_of(node: fx.Node) -> str:
    """Return the name of a node's module, attribute, method or function.

    Args:
        node: a node of a graph.

    Returns:
        The name without underscores at its ends: "relu" for ``relu_``. Empty for a function outside
        torch.
    """
    if node.target is getattr:
        return str(node.args[1])
    if node.op == "call_function":
        known = getattr(node.target, "__module__", "") in HOMES
        return str(getattr(node.target, "__name__", "")).strip("_") if known else ""
    return str(node.target).strip("_") if node.op == "call_method" else str(node.target)


def said(node: fx.Node) -> str:
    """Name a node in a sentence of a log."""
    return (
        "the model's input"
        if node.op == "placeholder"
        else name_of(node) or getattr(node.target, "__name__", str(node.target))
    )


def is_batch_size(size: Any, x: Any) -> bool:
    """Say whether a node is the batch size of another.

    Args:
        size: a node, or a number.
        x: a node.

    Returns:
        Whether ``size`` is ``x.size(0)`` or ``x.shape[0]``.
    """
    if not isinstance(size, fx.Node):
        return False
    shape: Any = size.args[0]
    indexed = (
        name_of(size) == "getitem"
        and isinstance(shape, fx.Node)
        and shape.target is getattr
        and size.args[1] == 0
    )
    return (
        shape.args == (x, "shape") if indexed else name_of(size) == "size" and size.args == (x, 0)
    )
