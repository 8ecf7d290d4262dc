"""``nmrun.sparsify``: make the weights of a model N:M sparse inside any training loop."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nmrun import kernels, recipes
from nmrun.errors import ConfigError
from nmrun.kernels.adam import WorkingCopy
from nmrun.optim import Adam, skipped_by_loss_scaling
from nmrun.patterns import Pattern
from nmrun.products import simulated
from nmrun.ranges import INPUT_GRADIENTS
from nmrun.recipes.base import Recipe
from nmrun.sparsity.check import layer_report
from nmrun.sparsity.metrics import MaskMetrics
from nmrun.sparsity.select import LeftDense, candidates, select
from nmrun.sparsity.weight import SparseWeight, attach, attached, detach, release

if TYPE_CHECKING:
    from nmrun.kernels.triton_projection import Batch


class Handle:
    """What :func:`sparsify` returns: the sparse weights, the recipe's clock, and the way back to plain parameters.

    Attributes: ``recipe``, ``sparse`` (list of SparseWeight), ``left_dense`` (list of LeftDense with reasons),
    ``measure_flips`` (set True before ``optimizer.step()`` to have that step's ``flip_rate`` and its kin measured, for
    :meth:`metrics`), ``mask_metrics`` (how they are measured, with the run's first masks).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, recipe: Recipe, sparse: list[SparseWeight], left_dense: list[LeftDense]
    ) -> None:
        self.recipe, self.sparse, self.left_dense = recipe, sparse, left_dense
        self.measure_flips = False
        self.mask_metrics = MaskMetrics(sparse)
        recipe.followers.append(self.mask_metrics.reorder)
        self._measured: dict[str, float] = {}
        self._optimizer = optimizer
        self._skip = False
        # the weights, by id, that the optimizer's step projects itself, each with its mask then
        self._fused: dict[int, tuple[Tensor | None, int]] = {}
        self._batch: Batch | None = None  # and the tensors that a CUDA device projects together
        self._batched: list[tuple[int, ...]] = []
        self._hooks = []
        if sparse:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        self.refresh()

    # --- the clock ----------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise RuntimeError(
                "nmrun edits gradients just before the update, so they must exist: call loss.backward(), then optimizer.step() "
                "without a closure"
            )
        self._skip = skipped_by_loss_scaling(optimizer)
        if not self._skip:
            if self.measure_flips:
                self.mask_metrics.before()
            self.recipe.edit_gradients(self._not_fused(optimizer), optimizer)

    def _not_fused(self, optimizer: torch.optim.Optimizer) -> list[SparseWeight]:
        """Have the optimizer do in one pass what it can of the recipe's part and the step; returns the weights for which it cannot."""
        self._fused = {}
        if not isinstance(optimizer, Adam) or not self.recipe.fusable:
            return self.sparse
        copies: dict[Tensor, WorkingCopy] = {}
        parts = [w.parts for w in self.sparse]
        for projection, dense in parts:
            around = None if projection.shard is not None else self.recipe.around(projection)
            if around is not None:
                projection.refresh_if_stale(dense)
                copies[dense] = WorkingCopy(projection.projected, projection.dim, around)
        for p in optimizer.project_with(copies):
            mask = copies[p].around.mask
            self._fused[id(p)] = mask, 0 if mask is None else mask._version
        return [w for w, (_, dense) in zip(self.sparse, parts, strict=True) if id(dense) not in self._fused]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skip:
            return
        self.recipe.step += 1
        self.recipe.after_step(self.sparse, optimizer)
        self.refresh()
        self._measured = self.mask_metrics.after(optimizer) if self.measure_flips else {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Rewrite the working copies, as after every optimizer step."""
        # what the optimizer has just written, but where the recipe has changed the mask since then
        written = {p for p, (mask, version) in self._fused.items() if mask is None or mask._version == version}
        parts = [(w, *w.parts) for w in self.sparse]
        together = set(map(id, self._projected_together([w for w, _, dense in parts if id(dense) not in written])))
        for weight, projection, dense in parts:
            if id(dense) in written or id(weight) in together:
                projection.follow(dense)
            elif not self.recipe.dense_forward or projection.shard is not None:
                projection.refresh(dense)
        self._fused = {}

    def _projected_together(self, weights: list[SparseWeight]) -> list[SparseWeight]:
        """Those of the weights whose N-largest projections a CUDA device has just written in as few launches as it takes."""
        if not self.recipe.keeps_largest or self.recipe.dense_forward:
            return []
        chosen = [w for w in weights if w.projection.shard is None and kernels.by_triton(w.dense, w.pattern)]
        if not chosen:
            return []
        from nmrun.kernels.triton_projection import Batch, fits

        chosen = [w for w in chosen if fits(w.dense, w.projection.projected, w.pattern, w.dim)]
        tensors = [(w.dense, w.projection.projected) for w in chosen]
        if [tuple(map(id, pair)) for pair in tensors] != self._batched or self._batch is None:
            self._batched = [tuple(map(id, pair)) for pair in tensors]
            dense, projected = zip(*tensors, strict=True) if tensors else ((), ())
            self._batch = Batch(dense, projected, [w.pattern for w in chosen], [w.dim for w in chosen])
        self._batch.project()
        return chosen

    # --- what a loop asks ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Which weights the forward pass uses now: ``"dense"``, ``"sparse"``, or in ``"transition"`` something between."""
        return self.recipe.phase if self.sparse else "dense"

    @property
    def is_sparse(self) -> bool:
        """Whether the forward pass uses N:M weights now. False with no sparse weight at all."""
        return bool(self.sparse) and self.recipe.is_sparse

    def pop_events(self) -> list[str]:
        """Sentences about what the recipe did since the last call (STEP's switch and its reason, ASP's pruning)."""
        events, self.recipe.events[:] = list(self.recipe.events), []
        return events

    @property
    def flip_rate(self) -> float | None:
        """Share of mask entries that changed in the last step, if it was measured."""
        return self._measured.get("sparsity/flip_rate")

    def metrics(self) -> dict[str, float]:
        """The recipe's scalars for a log, and if it was measured, what the last step did (``nmrun.sparsity.metrics.MaskMetrics.after``)."""
        return {**self._measured, **self.recipe.metrics()} if self.sparse else {}

    def report(self) -> dict[str, Any]:
        """Plain data on the projected weights: ``pattern``, ``density`` over the sparse weights, ``layers`` (``name``, ``shape``,
        ``nonzeros``, ``numel``, ``holds``: at most N of every M), ``left_dense`` (``name``, ``shape``, ``reason``)."""
        layers = [layer_report(w.name, w.whole(w.projected), w.pattern, w.dim) for w in self.sparse]
        numel = sum(layer["numel"] for layer in layers)
        return {
            "pattern": str(self.recipe.pattern) if self.sparse else "dense",
            "density": sum(layer["nonzeros"] for layer in layers) / numel if numel else 1.0,
            "layers": layers,
            "left_dense": [{"name": d.name, "shape": list(d.shape), "reason": d.reason} for d in self.left_dense],
        }

    # --- saving and finishing -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The recipe's clock: tensors and plain numbers. Save it beside the model's and the optimizer's state dicts."""
        return {"recipe": self.recipe.name, **self.recipe.state_dict(), "first_masks": self.mask_metrics.first_masks()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; call it after loading the model's and the optimizer's, since it rewrites the working copies."""
        if state.get("recipe") != self.recipe.name:
            raise ValueError(f"this state is of recipe {state.get('recipe')!r}, the handle's recipe is {self.recipe.name!r}")
        self.recipe.load_state_dict(state)
        if first := state.get("first_masks"):
            self.mask_metrics.load_first_masks(first)
        self.refresh()

    def finalize(self, model: nn.Module | None = None) -> None:
        """Make every sparse weight a plain ``nn.Parameter`` again, exactly N:M, with plain state-dict keys; the recipe ends.

        The parameter objects stay the same, so optimizers and references to them stay valid. With ``model``, a deep copy of the
        model (an EMA) is finished instead and the handle goes on.
        """
        for weight in self.sparse if model is None else attached(model):
            detach(weight)
        if model is None:
            for hook in self._hooks:
                hook.remove()
            self.sparse, self._hooks = [], []


def sparsify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str = "sr_ste",
    pattern: str | Pattern = "2:4",
    total_steps: int | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    overrides: Mapping[str, str | Pattern] | None = None,
    mvue: str | Pattern | None = None,
    fp8: bool = False,
    pad: bool = False,
    input_gradient: str = "exact",
    **hyperparameters: Any,
) -> Handle:
    """Train ``model`` with N:M sparse weights: call this once, then train as always.

    ::

        optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-3)
        handle = nmrun.sparsify(model, optimizer, recipe="step", pattern="2:4", total_steps=T)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.finalize()   # plain parameters, exactly 2:4

    Gradient accumulation, clipping and ``torch.amp.GradScaler`` need no change: everything happens in hooks of ``optimizer.step``.

    recipe: ``dense``, ``asp``, ``ste``, ``sr_ste``, ``step``, ``s_ste``, or the dotted path of a subclass of ``nmrun.recipes.base.Recipe``.
    pattern: at most N non-zeros in every M consecutive weights along the input dimension, any 1 <= N <= M.
    total_steps: optimizer steps of the whole run; ``step`` and ``asp`` need it for their switch points.
    include, exclude: regular expressions for whole module names. By default every linear layer, convolution and attention projection
    whose inputs are a multiple of M is sparse; tied, frozen and foreign parameters stay dense (``handle.left_dense`` says why).
    overrides: other patterns for some layers, by such expressions: ``{"layer3\\..*": "1:8", "fc": "dense"}``; the first match counts,
    and more than exclude.
    mvue: N:M for the gradient of the sparse linear layers' weights: from an unbiased estimate of the output gradient with at most N non-zeros
    in every M consecutive tokens. fp8: round the operands of their three products to FP8 (simulated). Both are S-STE's, work with
    any recipe, and act in training mode outside dense phases; see ``nmrun.products.simulated``.
    pad: make layers sparse too whose inputs are not a multiple of M. Their last group is short, as if zeros filled it up: at most N of its
    weights are kept, all of them if there are no more. What they save is counted by what is really pruned.
    input_gradient: ``exact``; or a sparse product as the forward one, by weights that are N:M along the outputs as well: ``transposable``, with
    masks that every recipe that keeps the largest weights then chooses so (layers whose outputs M does not divide stay dense); or
    ``double_prune``, by the weight pruned once more (SLoPe, Mozaffari et al. 2025, arXiv 2405.16325), which changes this gradient alone.
    hyperparameters: the recipe's own, under the names of its paper, such as ``decay=2e-4`` for ``sr_ste``.

    Raises ValueError for an unknown recipe or pattern, a model without a single eligible weight, a model that is sparse already,
    or an optimizer the recipe cannot work with; TypeError for an unknown hyperparameter.
    """
    pattern = Pattern.parse(pattern)
    kind = recipes.find(recipe)
    rule = _build(kind, recipe, pattern, total_steps, hyperparameters)
    if input_gradient not in INPUT_GRADIENTS:
        raise ConfigError(f"input_gradient={input_gradient!r}: it takes {', '.join(INPUT_GRADIENTS)}")
    if attached(model):
        raise ValueError("this model is sparse already: call finalize() on its handle first")
    if rule.name == "dense":
        return Handle(
            optimizer, rule, [], [LeftDense(c.name, tuple(c.tensor.shape), "recipe dense") for c in candidates(model)]
        )
    if input_gradient == "transposable":
        rule.make_transposable()
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    chosen, left_dense = select(model, pattern, include, exclude, owned, overrides, rule.refuses, pad)
    if not chosen:
        reasons = "; ".join(f"{d.name} {list(d.shape)}: {d.reason}" for d in left_dense[:8]) or "it has no such layer"
        raise ValueError(f"no weight of this model can be {pattern} sparse ({reasons})")
    rule.prepare(model)
    sparse = [attach(c.module_name, c.module, c.attribute, c.pattern or pattern, c.dim, rule) for c in chosen]
    try:
        rule.attach(sparse, optimizer)
        if mvue is not None or fp8:
            exact = simulated.install(sparse, None if mvue is None else Pattern.parse(mvue), fp8)
            if len(exact) == len(sparse):
                raise ConfigError(f"mvue and fp8 are for sparse linear layers; the sparse ones here are {', '.join(exact)}")
            if exact:
                rule.events.append(f"mvue and fp8 do not apply to {', '.join(exact)}: not linear layers that are called")
        if input_gradient == "double_prune":
            exact = simulated.prune_again(sparse, rule)
            if exact:
                rule.events.append(f"double pruning does not apply to {', '.join(exact)}: their input gradient is exact")
    except ValueError:
        for weight in sparse:  # leave the model as it was
            release(weight)
        raise
    return Handle(optimizer, rule, sparse, left_dense)


def _build(kind: type[Recipe], name: str, pattern: Pattern, total_steps: int | None, hyperparameters: dict[str, Any]) -> Recipe:
    known = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for key in hyperparameters:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{name} has no hyperparameter {key!r}; {hint}It has {', '.join(known) or 'none'}")
    return kind(pattern, total_steps, **hyperparameters)
