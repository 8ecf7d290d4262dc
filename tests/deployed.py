"""What every kind of packed layer has to do as the dense one does."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor, nn


def stays_itself(model: nn.Module, other: nn.Module, x: Tensor) -> nn.Module:
    """The same bits after pickle, compiled, and by its state dict in ``other``, of another pattern;
    returns a copy of the latter.
    """
    reloaded = copy.deepcopy(other)
    reloaded.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        again = pickle.loads(pickle.dumps(model))
        for one in (again, reloaded, torch.compile(model, backend="eager", fullgraph=True)):
            assert torch.equal(one(x), expected)
    return reloaded


def share(actual: Tensor, expected: Tensor) -> float:
    """The norm of the error as a share of what is expected."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
