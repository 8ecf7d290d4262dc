"""Layers of which oneDNN keeps a copy of the weight in a layout of its own."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor, nn

# by number: a compiled graph cannot hold a copy, but name it
COPIES: dict[int, Any] = {}
_numbers = itertools.count()


class OneDNNCopy(nn.Module):
    """A layer for inference whose product reads ``COPIES[layer.number]``, where there is one. The copy
    goes when the layer does, and is made anew for pickles, copies and state dicts."""

    number: int

    def make_copy(self) -> None:
        """Make the copy."""
        self.number = next(_numbers)
        weakref.finalize(self, COPIES.pop, self.number, None)
        self.renew()

    def renew(self) -> None:
        """Make it anew, under the same number."""
        source = self.source()
        COPIES[self.number] = None if source is None else self.copy(source)

    def source(self) -> Tensor | None:
        """The tensor that is copied, None where the product reads it as it is."""
        raise NotImplementedError

    def copy(self, source: Tensor) -> Any:
        """The source as oneDNN's product reads it."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:  # of pickles and copies
        super().__setstate__(state)
        self.make_copy()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.renew()
