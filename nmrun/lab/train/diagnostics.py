"""The curves by which S-STE shows what a discontinuous pruning function does to training (Hu et al.
2024, arXiv 2409.09099).

They cost several passes and a copy of the model, so they are computed on request
(``trainer.diagnose_every``). All losses F of a step are of the step's first micro-batch. A plain
copy of the model computes them in evaluation mode and full precision, so training is not touched.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.lab.tasks.base import Batch, Loss
from nmrun.sparsity.metrics import mask_of, pack, unpack
from nmrun.step.handle import Handle

Weights = dict[str, Tensor]  # by the names that parameters have in the plain model


class Diagnostics:
    """The numbers of a diagnosed step: call :meth:`before` and :meth:`after` around it. Masks are
    compared from one such step to the next."""

    def __init__(self, model: nn.Module, handle: Handle, loss_of: Loss) -> None:
        self.model, self.handle, self.loss_of = model, handle, loss_of
        self.sparse = {w.name: w for w in handle.sparse}
        self.twin = copy.deepcopy(model)
        self.twin.eval()
        self.load_state_dict(None)
        self._dense: Weights = {}
        self._used: Weights = {}
        handle.stepper.followers.append(self._reorder)

    def before(self) -> None:
        self._dense, self._used = self._weights()

    def after(self, batch: Batch) -> dict[str, float]:
        """The step's numbers, with losses F of ``batch``. w are all dense weights, mw those that
        the forward pass uses; primes are after the step.

        ``loss_change`` = F(m'w') - F(mw) and ``loss_change_fixed_mask`` = F(mw') - F(mw), figure 1:
        where the first is positive and the second is not, the change of masks spoilt the step. m is
        the used weight over the dense one: 0 or 1 for a hard mask, 1 in a dense phase, ``beta *
        S(w) / w`` for S-STE.

        ``descent_actual`` = F(mw) - F(m'w'), figure 2, and what the gradient at mw predicts for it:
        ``descent_predicted_projected`` from mw - m'w', ``descent_predicted_dense`` from w - w'.

        ``flipped`` and ``flipped_again``, figure 4: the shares of mask entries that have changed at
        least once, and more than once; ``flips``, their changes on average. The last two masks are
        ``flip_interval`` steps apart.
        """
        dense, used = self._weights()
        fixed = {
            name: _factor(self._used[name], self._dense[name]) * dense[name] for name in self.sparse
        }
        with torch.no_grad():
            # running statistics are no part of the question: one for all losses
            for name, buffer in self.twin.named_buffers():
                buffer.copy_(self.model.get_buffer(name))
        with self._fork_rng():
            loss = self._loss(self._used, batch)
            start = loss.detach()
            trained = {name: p for name, p in self.twin.named_parameters() if p.requires_grad}
            slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            pairs = zip(trained, slopes, strict=True)
            gradient = {name: slope for name, slope in pairs if slope is not None}
            end = self._loss(used, batch).detach()
            end_fixed = self._loss(dense | fixed, batch).detach()
        metrics = {
            "diagnose/loss_change": end - start,
            "diagnose/loss_change_fixed_mask": end_fixed - start,
            "diagnose/descent_actual": start - end,
            "diagnose/descent_predicted_projected": _product(gradient, self._used, used),
            "diagnose/descent_predicted_dense": _product(gradient, self._dense, dense),
        }
        self._dense, self._used = {}, {}
        return {key: float(value) for key, value in metrics.items()} | self._count_flips()

    def state_dict(self) -> dict[str, Any]:
        return {"masks": list(self.masks), "flips": list(self.flips), "step": self.step}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`state_dict`, after the handle's; None begins to count here."""
        weights = self.sparse.values()
        if state is None:
            zeros = [torch.zeros(w.shape, dtype=torch.int32) for w in weights]
            state = {
                "masks": [pack(mask_of(w, self.handle.recipe)) for w in weights],
                "flips": zeros,
                "step": self.handle.recipe.step,
            }
        self.masks, self.flips = (
            [tensor.to(w.dense.device) for tensor, w in zip(state[key], weights, strict=True)]
            for key in ("masks", "flips")
        )
        self.step = int(state["step"])

    def _reorder(self, name: str, dim: int, index: Tensor) -> None:
        """A parameter became ``p.index_select(dim, index)``: so does what is remembered of it."""
        for weights in (self._dense, self._used):
            if name in weights:
                weights[name] = weights[name].index_select(dim, index)
        for i, weight in enumerate(self.sparse.values()):
            if weight.name == name:
                self.masks[i] = pack(unpack(self.masks[i], weight.shape).index_select(dim, index))
                self.flips[i] = self.flips[i].index_select(dim, index)

    def _weights(self) -> tuple[Weights, Weights]:
        """Copies of all parameters: the dense ones, and those that the forward pass uses."""
        plain = [name for name, _ in self.twin.named_parameters() if name not in self.sparse]
        dense = {name: self.model.get_parameter(name).detach().clone() for name in plain}
        used = dense | {name: w.weight.clone() for name, w in self.sparse.items()}
        dense |= {name: w.dense.clone() for name, w in self.sparse.items()}
        return dense, used

    def _loss(self, weights: Weights, batch: Batch) -> Tensor:
        with torch.no_grad():
            for name, parameter in self.twin.named_parameters():
                parameter.copy_(weights[name])
        with torch.enable_grad():
            return self.loss_of(self.twin, batch)

    def _count_flips(self) -> dict[str, float]:
        if not self.sparse:
            return {}
        masks = [mask_of(w, self.handle.recipe) for w in self.sparse.values()]
        for flips, before, mask in zip(self.flips, self.masks, masks, strict=True):
            flips += unpack(before, mask.shape) ^ mask
        interval, self.step = self.handle.recipe.step - self.step, self.handle.recipe.step
        self.masks = [pack(mask) for mask in masks]
        counts = [
            torch.stack([(flips > 0).sum(), (flips > 1).sum(), flips.sum()]) for flips in self.flips
        ]
        entries, totals = sum(mask.numel() for mask in masks), torch.stack(counts).sum(0).tolist()
        names = ("flipped", "flipped_again", "flips")
        row = {
            f"diagnose/{name}": count / entries for name, count in zip(names, totals, strict=True)
        }
        return row | {"diagnose/flip_interval": float(interval)}

    def _fork_rng(self) -> AbstractContextManager[None]:
        device = next(self.model.parameters()).device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _factor(used: Tensor, dense: Tensor) -> Tensor:
    return torch.where(dense == 0, 0.0, used / dense)


def _product(gradient: Weights, before: Weights, after: Weights) -> Tensor:
    return torch.stack(
        [(slope * (before[name] - after[name])).sum() for name, slope in gradient.items()]
    ).sum()
