"""The mean of a model's weights over the last epochs (Vaswani et al. 2017, arXiv 1706.03762,
section 6.1: averaged checkpoints).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.step.handle import Handle


class Average:
    """Adds up what is saved of a model, parameters and running statistics, at the ends of epochs.

    Of a sparse weight it is the dense one that is averaged; the mask is that of the mean (or the
    recipe's, where it is fixed).

    Args:
        last: how many epochs, at the end of the run, are averaged; 1 does nothing.
    """

    def __init__(self, model: nn.Module, handle: Handle, last: int) -> None:
        self.model, self.handle, self.last = model, handle, last
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, left: int) -> None:
        """An epoch is over; ``left`` more will follow."""
        if self.last == 1 or left >= self.last:
            return
        with self.handle.dense_weights():
            for name, tensor in self._tensors().items():
                self.sums[name] = self.sums[name] + tensor if self.count else tensor.clone()
        self.count += 1

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the mean of what was added, if that was anything."""
        if not self.count:
            return
        with self.handle.dense_weights():
            for name, tensor in self._tensors().items():
                tensor.copy_(self.sums[name] / self.count)

    def state_dict(self) -> dict[str, Any]:
        """The sums, of which each process has a part where the model is sharded."""
        return {"sums": dict(self.sums), "count": self.count}

    def load_state_dict(
        self,
        state: dict[str, Any],
        handed_out: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    ) -> None:
        """Restore :meth:`state_dict`.

        Args:
            handed_out: gives this process's parts of whole tensors; all of them by default.
        """
        sums = handed_out(state["sums"]) if state["count"] else {}
        self.sums = {
            name: sums[name].to(tensor.device)
            for name, tensor in self._tensors().items()
            if state["count"]
        }
        self.count = state["count"]

    def _tensors(self) -> dict[str, Tensor]:
        saved = self.model.state_dict(keep_vars=True).items()
        return {name: t.detach() for name, t in saved if t.is_floating_point()}
