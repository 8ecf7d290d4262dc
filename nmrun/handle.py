"""The handle of a model that trains with sparse weights: the order of a step, saving, finishing.

Around ``optimizer.step()``, by hooks of the optimizer::

    before    a closure is evaluated; the weights' tensors leave the optimizer's state
              weights that were changed from outside are noticed
              recipe.before_step; the rule edits the gradients
              the parameters point at the dense weights
    step      the optimizer moves the dense weights (nmrun.optim: rule and step in one pass)
    after     the parameters point at their projected memory again; the clock moves on
              recipe.after_step; the rule projects the dense weights into the parameters
              what depends on them follows (packed copies); the tensors return to the state
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.kernels import projection
from nmrun.kernels.operands import Update
from nmrun.kernels.uncompiled import uncompiled
from nmrun.optim import Adam, skipped_by_loss_scaling
from nmrun.products import layer
from nmrun.recipes.base import Recipe
from nmrun.resume import KEY, Resume, check_finished, counterpart, makes_state
from nmrun.sparsity.check import layer_report
from nmrun.sparsity.metrics import MaskMetrics
from nmrun.sparsity.replicas import agree_over_ranks
from nmrun.sparsity.select import LeftDense
from nmrun.sparsity.weight import LIVE, SparseWeight, owns_its_storage

COMPARED_EVERY = 500  # steps between looks for weights that were written without a trace


class Handle:
    """What :func:`nmrun.sparsify` returns.

    Attributes:
        recipe: the recipe, with its clock.
        sparse: the sparse weights.
        left_dense: the other weights, each with the reason.
        measure_flips: set True before ``optimizer.step()`` to have that step's flip rate and its
            kin measured, for :meth:`metrics`.
        mask_metrics: how they are measured, with the run's first masks.
        followers: called with (parameter name, dim, index) when channel permutation made a
            parameter ``p.index_select(dim, index)``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        sparse: list[SparseWeight],
        left_dense: list[LeftDense],
    ) -> None:
        self.recipe, self.sparse, self.left_dense = recipe, sparse, left_dense
        self.measure_flips = False
        self.mask_metrics = MaskMetrics(recipe, sparse)
        self.followers: list[Callable[[str, int, Tensor], None]] = [self.mask_metrics.reorder]
        self._optimizer = optimizer
        self._measured: dict[str, float] = {}
        self._skipped = False  # the step under way does nothing, as where loss scaling overflows
        self._in_one_pass: dict[int, tuple[Tensor | None, int]] = {}  # by the step under way
        self._batch = _Batch()
        self._compared = False  # the ranks' dense weights, before the first step
        self.gathering: Sequence[Any] = ()  # fully_shard's modules of the model
        self._hooks: list[Any] = []
        self._resume = Resume(optimizer, recipe, sparse, self.refresh)
        captured = any(group.get("capturable") for group in optimizer.param_groups)
        for weight in sparse:
            LIVE[id(weight.parameter)] = weight.parameter
            weight.copies = captured or not owns_its_storage(weight.parameter)
        if sparse:
            self._hooks = [
                optimizer.register_step_pre_hook(_ours(self._before_step)),
                optimizer.register_step_post_hook(_ours(self._after_step)),
                *self._resume.hooks(),
            ]
        self.refresh()

    # --- the step --------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        answer = _closure_first(args, kwargs)
        self._skipped = skipped_by_loss_scaling(optimizer) or makes_state(optimizer, self.sparse)
        if self._skipped:
            return answer
        self._recover()
        for weight in self.sparse:
            weight.take(optimizer)
        if not self._compared:
            self._compared = True
            if agree_over_ranks(self.recipe, self.sparse):
                self.refresh()
        self._notice_changes()
        if self.measure_flips:
            self.mask_metrics.before()
        self.recipe.before_step(self.sparse, optimizer)
        if not self.recipe.dense_forward:
            self._in_one_pass = self._plan(optimizer)
            for weight in self.sparse:
                if id(weight) not in self._in_one_pass:
                    if (grad := weight.grad) is not None:
                        self.recipe.edit_gradient(weight, grad)
                    weight.expose()
        return answer

    def _recover(self) -> None:
        """A step has failed half-way: the parameters become projected weights again."""
        if any(weight.is_exposed for weight in self.sparse):
            for weight in self.sparse:
                weight.cover()
            self.refresh()

    def _plan(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[Tensor | None, int]]:
        """Let the optimizer carry out the rule inside its step where it can.

        Returns the weights, by id, for which it will, each with its mask and the mask's version.
        """
        recipe = self.recipe
        if not isinstance(optimizer, Adam) or not recipe.is_rule_alone:
            return {}
        rules = [recipe.rule(weight) for weight in self.sparse]
        with recipe.at(recipe.step + 1):
            after = [recipe.rule(weight) for weight in self.sparse]
        updates = {}
        for weight, now, then in zip(self.sparse, rules, after, strict=True):
            if then.mask is None and recipe.chooses:
                continue
            pattern = then.pattern or weight.pattern
            updates[weight.parameter] = Update(weight.dense, weight.weight, weight.dim, pattern, now.then(then))
        taken = set(map(id, optimizer.plan(updates)))
        masks = {id(w): rule.mask for w, rule in zip(self.sparse, after, strict=True)}
        return {
            id(w): (mask, 0 if mask is None else mask._version)
            for w in self.sparse
            if id(w.parameter) in taken
            for mask in (masks[id(w)],)
        }

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skipped:
            return
        for weight in self.sparse:
            weight.cover()
        self.recipe.step += 1
        self.recipe.after_step(self.sparse, optimizer)
        for name, dim, index in getattr(self.recipe, "reordered", ()):
            for follow in self.followers:
                follow(name, dim, index)
        getattr(self.recipe, "reordered", []).clear()
        self.refresh()
        self._measured = self.mask_metrics.after(optimizer) if self.measure_flips else {}
        for weight in self.sparse:
            weight.give(optimizer)

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the projections of the dense weights into the parameters, as after every step."""
        if self.recipe.dense_forward:
            for weight in self.sparse:
                weight.end_sparse()
                if weight.layer is not None:
                    weight.layer.active = weight.layer.uses_packed = False
        else:
            left = []
            for weight in self.sparse:
                if not weight.has_dense:
                    weight.begin_sparse()
                # the step has projected it, unless the recipe has changed the mask since
                mask, version = self._in_one_pass.get(id(weight), (None, -1))
                if id(weight) not in self._in_one_pass or (mask is not None and mask._version != version):
                    left.append(weight)
            self._project(left)
            for weight in self.sparse:
                if weight.layer is not None:
                    weight.layer.active, weight.layer.uses_packed = True, self.recipe.is_sparse
                for follow in weight.dependents:
                    follow(weight)
        self._in_one_pass = {}
        for weight in self.sparse:
            weight.version = weight.parameter._version

    def _project(self, weights: list[SparseWeight]) -> None:
        recipe = self.recipe
        if recipe.is_rule_alone and not recipe.chooses:
            weights = self._batch.project(recipe, weights)
        for weight in weights:
            recipe.project(weight, weight.weight)

    @torch.no_grad()
    def _notice_changes(self) -> None:
        """Weights that were written from outside become the new dense weights."""
        if self.recipe.dense_forward:
            return
        thorough = self.recipe.step % COMPARED_EVERY == COMPARED_EVERY - 1
        changed = []
        for weight in self.sparse:
            kept = weight.dense
            if kept.dtype != weight.weight.dtype or kept.device != weight.weight.device:
                weight.adopt("dense", kept)  # the model was moved or cast
            if (weight.moved() or thorough) and self._differs(weight):
                weight.begin_sparse()
                self.recipe.project(weight, weight.weight)  # by which the rule knows what is pruned
                changed.append(weight.name)
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self.recipe.say(f"{changed[0]}{more} changed outside the optimizer: the new values are the dense weights")

    def _differs(self, weight: SparseWeight) -> bool:
        """Whether the parameter is not the projection of the dense weight."""
        expected = torch.empty_like(weight.dense)
        self.recipe.project(weight, expected)
        return not torch.equal(expected, weight.weight)

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
        layers = [layer_report(w.name, w.whole(self.final_weight(w)), w.pattern, w.dim) for w in self.sparse]
        numel = sum(layer["numel"] for layer in layers)
        return {
            "pattern": str(self.recipe.pattern) if self.sparse else "dense",
            "density": sum(layer["nonzeros"] for layer in layers) / numel if numel else 1.0,
            "layers": layers,
            "left_dense": [{"name": d.name, "shape": list(d.shape), "reason": d.reason} for d in self.left_dense],
        }

    @contextlib.contextmanager
    def dense_weights(self) -> Iterator[None]:
        """While entered, the parameters are the dense weights: for averages (EMA), dense
        evaluation, dense checkpoints. Weights that are written inside are kept."""
        self._reshard()
        for weight in self.sparse:
            weight.expose()
        before = [weight.parameter._version for weight in self.sparse]
        try:
            yield
        finally:
            self._reshard()
            after = [weight.parameter._version for weight in self.sparse]
            for weight in self.sparse:
                weight.cover()
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
        return {"nmrun": self._resume.settings(), "weights": {w.name: w.saved() for w in self.sparse}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ConfigError: for the state of another recipe or ratio, or of an older nmrun.
        """
        self._resume.check(state.get("nmrun") or {})
        for weight in self.sparse:
            weight.forget()
            for key, value in state["weights"][weight.name].items():
                weight.adopt(key, value.clone())
        self._resume.restore(state["nmrun"])

    def make_room(self, metadata: Any) -> None:
        """Before files of ``torch.distributed.checkpoint`` are loaded: make room for what they have.

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
            weight.take(self._optimizer)
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
            dense = weight.of(own.detach().clone())
            self.recipe.project_final(dense, out)
            own.copy_(out + 0.0)


class _Batch:
    """Weights that a CUDA device projects in as few launches as it takes."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._launch: Any = None

    def project(self, recipe: Recipe, weights: list[SparseWeight]) -> list[SparseWeight]:
        """Project the N largest of the weights it can; returns the others."""
        rest: list[SparseWeight] = []
        chosen: list[SparseWeight] = []
        for weight in weights:
            rule = recipe.rule(weight)
            plain = rule.mask is None and rule.soft_threshold_scale is None
            plain = plain and rule.pattern is None and not rule.pruned_weight_factor
            takes = plain and projection.by_triton(weight.dense, weight.pattern)
            (chosen if takes else rest).append(weight)
        if not chosen:
            return rest
        from nmrun.kernels.triton_projection import Batch, fits

        tensors = [(w.dense, w.weight) for w in chosen]
        fit = [fits(d, p, w.pattern, w.dim) for w, (d, p) in zip(chosen, tensors, strict=True)]
        rest += [w for w, good in zip(chosen, fit, strict=True) if not good]
        members = [(w, *t) for w, t, good in zip(chosen, tensors, fit, strict=True) if good]
        key = [(d.data_ptr(), p.data_ptr()) for _, d, p in members]
        if key != self._key or self._launch is None:
            self._key = key
            self._launch = Batch(
                [d for _, d, _ in members],
                [p for _, _, p in members],
                [w.pattern for w, _, _ in members],
                [w.dim for w, _, _ in members],
            )
        self._launch.project()
        return rest


def _closure_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Evaluate a step's closure now, and hand its loss on: gradients are edited before the step."""
    closure = kwargs.get("closure")
    if closure is None:
        closure = next((a for a in args[1:] if callable(a)), None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    others = tuple(a for a in args[1:] if a is not closure)
    return (args[0], lambda: loss, *others), rest


def _ours(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that torch.compile does not look into, and that is known to be of a handle."""
    run = uncompiled(hook)
    run.nmrun = True  # type: ignore[attr-defined]
    return run
