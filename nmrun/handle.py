"""The handle of a model that trains with sparse weights: what a loop asks, saves and ends with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.hooks.resume import KEY, check_finished, counterpart
from nmrun.hooks.steps import Steps
from nmrun.products import layer
from nmrun.recipes.base import Recipe
from nmrun.sparsity.check import layer_report
from nmrun.sparsity.select import LeftDense
from nmrun.sparsity.weight import LIVE, SparseWeight


class Handle(Steps):
    """What :func:`nmrun.sparsify` returns. The order of a step is in :class:`Steps`.

    Attributes:
        left_dense: the weights that are not sparse, each with the reason.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        sparse: list[SparseWeight],
        left_dense: list[LeftDense],
    ) -> None:
        self.left_dense = left_dense
        super().__init__(optimizer, recipe, sparse)

    # --- what a loop asks ------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Which weights the forward pass uses now: ``"dense"``, ``"sparse"``, or in
        ``"transition"`` something between."""
        return self.recipe.phase if self.sparse else "dense"

    @property
    def is_sparse(self) -> bool:
        """Whether the forward pass uses N:M weights now. False with no sparse weight at all."""
        return bool(self.sparse) and self.recipe.is_sparse

    def pop_events(self) -> list[str]:
        """Sentences about what the recipe did since the last call."""
        events, self.recipe.events[:] = list(self.recipe.events), []
        return events

    @property
    def flip_rate(self) -> float | None:
        """Share of mask entries that changed in the last step, if it was measured."""
        return self._measured.get("sparsity/flip_rate")

    def metrics(self) -> dict[str, float]:
        """The recipe's scalars for a log, and what the last step did, if it was measured
        (``nmrun.sparsity.metrics.MaskMetrics.after``)."""
        return {**self._measured, **self.recipe.metrics()} if self.sparse else {}

    @torch.no_grad()
    def final_weight(self, weight: SparseWeight) -> Tensor:
        """The weight that the run would leave now (a copy, this process's part)."""
        if self.recipe.is_sparse:
            return weight.weight + 0.0
        out = torch.empty_like(weight.dense)
        self.recipe.project_final(weight, out)
        return out + 0.0

    def report(self) -> dict[str, Any]:
        """Plain data on the final weights, as they would be now.

        Returns:
            ``pattern``; ``density`` over the sparse weights; ``layers`` (``name``, ``shape``,
            ``nonzeros``, ``numel``, ``holds``: at most N of every M); ``left_dense`` (``name``,
            ``shape``, ``reason``).
        """
        layers = [
            layer_report(w.name, w.whole(self.final_weight(w)), w.pattern, w.dim)
            for w in self.sparse
        ]
        numel = sum(layer["numel"] for layer in layers)
        return {
            "pattern": str(self.recipe.pattern) if self.sparse else "dense",
            "density": sum(layer["nonzeros"] for layer in layers) / numel if numel else 1.0,
            "layers": layers,
            "left_dense": [
                {"name": d.name, "shape": list(d.shape), "reason": d.reason}
                for d in self.left_dense
            ],
        }

    @contextlib.contextmanager
    def dense_weights(self) -> Iterator[None]:
        """While entered, the parameters are the dense weights: for averages (EMA), dense
        evaluation, dense checkpoints. Weights that are written inside are kept."""
        self._reshard()
        # what layers have packed or pruned again is not of the dense weights
        own = [w.layer for w in self.sparse if w.layer is not None and w.layer.active]
        for products in own:
            products.active = False
        for weight in self.sparse:
            weight.show_dense()
        before = [weight.parameter._version for weight in self.sparse]
        try:
            yield
        finally:
            self._reshard()
            after = [weight.parameter._version for weight in self.sparse]
            for weight in self.sparse:
                weight.show_projected()
            for products in own:
                products.active = True
            if before != after:
                self.refresh()
            for weight in self.sparse:
                weight.version = weight.parameter._version

    def _reshard(self) -> None:
        """Let FSDP's modules gather their weights anew: after a forward pass that no backward pass
        followed, the outermost one keeps what it has gathered."""
        for module in self.gathering:
            module.reshard()

    # --- saving and finishing --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer's state dict has of nmrun too, apart: for loops that save it so."""
        return {
            "nmrun": self._resume.settings(),
            "weights": {w.name: w.saved() for w in self.sparse},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ConfigError: for the state of another recipe or ratio, or of an older nmrun.
        """
        self._resume.check(state.get("nmrun") or {})
        for weight in self.sparse:
            weight.clear()
            for key, value in state["weights"][weight.name].items():
                weight.restore(key, value.clone())
        self._resume.restore(state["nmrun"])

    def make_room(self, metadata: Any) -> None:
        """Before files of ``torch.distributed.checkpoint`` are loaded: make room for what they
        have.

        It loads what the state dict that it is given has places for. A recipe that begins dense has
        none for dense weights and masks, which files that were saved later hold. ::

            handle.make_room(dcp.FileSystemReader(path).read_metadata())
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(parts, checkpoint_id=path)
            set_state_dict(...)

        Args:
            metadata: of the files.
        """
        self._resume.make_room(metadata)

    @torch.no_grad()
    def finalize(self, model: nn.Module | None = None) -> None:
        """End the recipe: the weights stay, exactly N:M, and the optimizer forgets the rest.

        With ``model``, a copy of the model that holds dense weights (an average), that copy gets
        the projections of its own weights instead, and training can go on.

        Raises:
            RunError: where a weight does not hold its pattern: the optimizer never stepped,
                training ended in a dense phase, or the weights moved without the optimizer.
                Nothing is changed then.
        """
        if model is not None:
            self._finalize_copy(model)
            return
        self._reshard()
        if self.sparse:
            self._recover()
            dense = self.recipe.dense_forward
            moved = (w.name for w in self.sparse if not dense and w.moved() and self._differs(w))
            check_finished(self.recipe, self.sparse, next(moved, ""))
        for weight in self.sparse:
            weight.weight.add_(0.0)  # no zero is negative
            weight.pop_state(self._optimizer)
            layer.uninstall(weight)
            LIVE.pop(id(weight.parameter), None)
        for hook in self._hooks:
            hook.remove()
        self._optimizer.param_groups[0].pop(KEY, None)
        self.sparse, self._hooks = [], []

    def _finalize_copy(self, model: nn.Module) -> None:
        for weight in self.sparse:
            own = counterpart(model, weight.name)
            out = torch.empty_like(own)
            dense = weight.with_dense(own.detach().clone())
            self.recipe.project_final(dense, out)
            own.copy_(out + 0.0)
