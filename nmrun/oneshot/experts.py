"""The experts of a mixture, whose matrices lie in one parameter: (experts, outputs, inputs), as in
transformers' Mixtral, or (experts, inputs, outputs), as in its GPT-OSS. Each sees the tokens that the
router sends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
Seen = Callable[[str, int, Tensor], None]


def are_seen(module: nn.Module) -> bool:
    """Whether a module's experts are multiplied one by one, so that what each sees can be seen.

    Args:
        module: that has the stacked matrices.
    """
    config = getattr(module, "config", None)
    stacked = isinstance(getattr(module, "is_transposed", None), bool)  # set by transformers
    return stacked and hasattr(config, "_experts_implementation")


class Watching(TorchFunctionMode):
    """Hands on the inputs of each expert, while the context is entered.

    Args:
        stacks: the stacked matrices by name.
        seen: ``seen(name, expert, x)`` is called with each product's input x (tokens, inputs).
    """

    def __init__(self, stacks: Mapping[str, Tensor], seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.at = {
            stack.untyped_storage().data_ptr(): (name, stack) for name, stack in stacks.items()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and len(args) > 1:
            found = self.at.get(args[1].untyped_storage().data_ptr())
            if found is not None:
                name, stack = found
                place = args[1].storage_offset() - stack.storage_offset()
                self.seen(name, place // stack.stride(0), args[0].detach())
        return func(*args, **(kwargs or {}))


def for_each(prune: Callable[[Tensor, Tensor], Tensor], stack: Tensor, grams: Tensor) -> Tensor:
    """Prune the matrices of all experts.

    Args:
        prune: ``prune(matrix, gram)`` prunes one.
        stack: (experts, outputs, inputs).
        grams: ``X^T X`` of each, (experts, inputs, inputs). An expert that no token has reached is
            pruned as if its inputs were alike and independent, so by its weights alone.

    Returns:
        The pruned matrices.
    """
    alike = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    pruned = [
        prune(matrix, gram if bool(gram.any()) else alike)
        for matrix, gram in zip(stack, grams, strict=True)
    ]
    return torch.stack(pruned)
