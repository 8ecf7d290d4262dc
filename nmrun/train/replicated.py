"""How a process that has the whole model gives and takes its state; ``nmrun.train.sharded.Sharded`` does the same where it has shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmrun.sparsity import baked_state_dict


class Whole:
    """A sparse model and its optimizer, with the methods of ``nmrun.train.sharded.Sharded``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict
        self.load_baked_state_dict = model.load_state_dict  # of a model that is finished
        self.optimizer_state_dict, self.load_optimizer_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def take_gradients(self) -> None:
        """Nothing to do: gradients come where the optimizer looks for them."""

    def baked_state_dict(self) -> dict[str, Tensor]:
        return baked_state_dict(self.model)
