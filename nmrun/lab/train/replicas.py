"""A model that every process holds whole: how its state is given and taken.

``nmrun.lab.train.fsdp.Sharded`` does it where processes hold shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmrun import ranks
from nmrun.step.handle import Handle


class Replicated:
    """A sparse model, its optimizer and its handle, whole in every process."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle) -> None:
        self.model, self.optimizer, self.handle = model, optimizer, handle

    def forward(self, model: Any) -> Any:
        """``model``, compiled or not, with gradients averaged over the ranks if there are some."""
        return DistributedDataParallel(model) if ranks.world() > 1 else model

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of model and optimizer, the recipe's state included."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def handed_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's parts of tensors by the names of parameters and buffers: as they are."""
        return dict(tensors)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`handed_out`, for a file: on the CPU, contiguous."""
        return {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}

    def final_state_dict(self) -> dict[str, Tensor]:
        """Copies of what the model would have if training ended now, sparse weights N:M."""
        own = {w.name: self.handle.final_weight(w) for w in self.handle.sparse}
        saved = self.model.state_dict().items()
        plain = {name: own[name] if name in own else t.detach().clone() for name, t in saved}
        return dict(sorted(plain.items()))

    def dense_state_dict(self) -> dict[str, Tensor]:
        """Copies of what the model has, with the dense weights in the place of the sparse ones; on
        the CPU."""
        with self.handle.dense_weights():
            saved = self.model.state_dict().items()
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in sorted(saved)}

    def load_final_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Evaluate with a :meth:`final_state_dict` from here on."""
        self.model.load_state_dict(state)
