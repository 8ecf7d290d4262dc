"""How many operations of torch something takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts torch's operations, or those that are ``counted``: on a GPU each is a launch, or one
    for dozens of tensors.
    """

    def __init__(self, counted: Callable[[Any], bool] = lambda operation: True) -> None:
        super().__init__()
        self.counted, self.count = counted, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counted(func)
        return func(*args, **(kwargs or {}))
