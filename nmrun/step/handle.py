"""The handle of a model that trains with sparse weights: reports, saving and the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.kernels.layout import local
from nmrun.products import layer
from nmrun.recipes.base import Event, Recipe
from nmrun.sparsity.check import layer_report, weights_report
from nmrun.sparsity.layers import plain_name
from nmrun.sparsity.select import UNTRAINED, LeftDense, by_reason
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.stepper import REPLACED, Stepper


class Handle:
    """A model's sparse training: its phase, its dense and sparse weights, its end.

    :func:`nmrun.sparsify` returns it. It is neither copied nor pickled: a checkpoint of model and
    optimizer is complete.

    Attributes:
        recipe: the recipe, with its clock ``recipe.step``.
        left_dense: the parameters that are not sparse, each with ``name``, ``shape`` and
            ``reason``.
        finished: after :meth:`finalize`, what :attr:`sparse` was.
        stepper: carries out the recipe around each step.
        by_onednn: the layers without a sparse weight that :func:`nmrun.accelerate` gave to oneDNN.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        sparse: list[SparseWeight],
        left_dense: list[LeftDense],
        model: nn.Module,
    ) -> None:
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.left_dense = left_dense
        self.by_onednn: list[nn.Module] = []
        self.finished: list[SparseWeight] = []
        self._abandoned = False
        self.stepper = Stepper(optimizer, recipe, sparse)

    @property
    def sparse(self) -> list[SparseWeight]:
        """The sparse weights; none after :meth:`finalize`."""
        return self.stepper.sparse

    # --- what a loop reads -----------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Which weights the forward pass uses now: ``"dense"``, ``"sparse"`` (N:M), or
        ``"transition"``, something between both."""
        return self.recipe.phase if self.sparse else "dense"

    @property
    def is_sparse(self) -> bool:
        """Whether the forward pass uses N:M weights now; False without any sparse weight."""
        return bool(self.sparse) and self.recipe.is_sparse

    @property
    def evaluates_sparse(self) -> bool:
        """Whether :meth:`evaluation_weights` are N:M now; False without any sparse weight."""
        return bool(self.sparse) and (self.recipe.is_sparse or self.recipe.evaluates_final)

    @property
    def measure_flips(self) -> bool:
        """Set True before ``optimizer.step()`` to measure this step's mask changes."""
        return self.stepper.measure_flips

    @measure_flips.setter
    def measure_flips(self, measure: bool) -> None:
        self.stepper.measure_flips = measure

    def metrics(self) -> dict[str, float]:
        """Scalars for a log, by name: the recipe's own, and, after :attr:`measure_flips`, those of the
        last step (:meth:`nmrun.sparsity.metrics.MaskMetrics.after`). Empty after
        :meth:`finalize`."""
        return {**self.stepper.measured, **self.recipe.metrics()} if self.sparse else {}

    def pop_events(self) -> list[Event]:
        """Return the recipe's events since the last call, such as a change of phase: ``str(event)`` is
        a sentence, ``event.step``, ``kind`` and ``facts`` are for programs.
        Python's logger ``nmrun`` has them too, at level INFO."""
        events, self.recipe.events = self.recipe.events, []
        return events

    def refresh(self) -> None:
        """Write the projections of the dense weights into the parameters, as every step does, also
        after a step that failed half-way. Anything else that was written there since the last step
        is lost, except in a dense phase."""
        self.stepper.refresh()

    @torch.no_grad()
    def final_weight(self, weight: SparseWeight) -> Tensor:
        """The weight that a run ending now would leave, for one of :attr:`sparse`. It is a copy,
        without negative zeros; of a sharded weight it is this process's part."""
        if self.recipe.is_sparse:
            return weight.weight + 0.0
        out = torch.empty_like(weight.dense)
        self.recipe.project_final(weight, out)
        return out + 0.0

    def report(self) -> dict[str, Any]:
        """Describe the weights that a run ending now would leave, or that :meth:`finalize` has left.

        Returns:
            Plain data: ``pattern``; ``density``, the share of non-zeros in the sparse weights;
            ``layers``, each with ``name``, ``shape``, ``pattern``, ``dim``, ``numel``, ``nonzeros``
            and ``holds``; ``left_dense``, each with ``name``, ``shape`` and ``reason``.
        """
        layers = [
            layer_report(w.name, w.whole(self.final_weight(w)), w.pattern, w.dim)
            for w in self.sparse or self.finished
        ]
        return weights_report(str(self.recipe.pattern), layers, self.left_dense)

    @contextlib.contextmanager
    def dense_weights(self) -> Iterator[None]:
        """While entered, the parameters are the dense weights: for averages (EMA), dense evaluation and
        dense checkpoints. CAST computes with these weights times its scales, and here they are without.
        What is written into a parameter inside becomes its dense weight. Entered again inside, it
        changes nothing; inside :meth:`evaluation_weights` these come back after it."""
        if self._shows_dense:
            yield
            return
        evaluates = self.stepper.shows_final
        try:
            with self._shown(self._show_dense):
                yield
        finally:
            if evaluates and self.recipe.evaluates_final:  # unless another state was loaded inside
                self._show_final()

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """While entered, the parameters are the weights to evaluate with. These are the forward pass's,
        except where the recipe evaluates what a run ending now would leave (MaskLLM's likeliest
        masks). Entered again inside, or inside :meth:`dense_weights`, it changes nothing."""
        if self.stepper.shows_final or self._shows_dense or not self.recipe.evaluates_final:
            yield
            return
        with self._shown(self._show_final):
            yield

    @contextlib.contextmanager
    def _shown(self, show: Callable[[], None]) -> Iterator[None]:
        reshard(self.model)
        if not self.stepper.shows_final:  # what is written there must not become a dense weight
            self.stepper.notice_changes()
        show()
        try:
            yield
        finally:
            reshard(self.model)
            # a write through .data, as in many an EMA's copy_to, leaves no trace
            self.refresh()

    @property
    def _shows_dense(self) -> bool:
        return any(weight.shows_dense for weight in self.sparse)

    def _show_dense(self) -> None:
        # layers would compute with copies of the projected weights, packed or pruned again
        for weight in self.sparse:
            if weight.layer is not None:
                weight.layer.active = False
            weight.show_dense()
        torch.clear_autocast_cache()

    @torch.no_grad()
    def _show_final(self) -> None:
        for weight in self.sparse:
            weight.weight.copy_(self.final_weight(weight))
            weight.note()
        torch.clear_autocast_cache()
        self.stepper.shows_final = True

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Handle is neither copied nor pickled: save model and optimizer, or call sparsify on "
            "their copies"
        )

    def __repr__(self) -> str:
        recipe, weights = self.recipe, self.sparse or self.finished
        total = "" if recipe.total_steps is None else f" of {recipe.total_steps}"
        phase = "finished" if self.finished else f"{self.phase} phase"
        title = (
            f"nmrun.Handle: {recipe.name or type(recipe).__name__}, {phase}, step {recipe.step}"
            f"{total}; {len(weights)} sparse weight{'' if len(weights) == 1 else 's'}, "
            f"{len(self.left_dense)} left dense"
        )
        width = max((len(weight.name) for weight in weights), default=0)
        rows = [f"{w.name:{width}}  {w.pattern}  {' x '.join(map(str, w.shape))}" for w in weights]
        if self.left_dense:
            rows.append(f"dense: {by_reason(self.left_dense)}")
        return "\n  ".join([title, *rows])

    # --- saving and finishing --------------------------------------------------------------------

    def make_room(self, metadata: Any) -> None:
        """Prepare the optimizer's state for a load by ``torch.distributed.checkpoint``.

        ``dcp.load`` reads only what the given state dict has keys for. In a dense phase there are no
        keys for dense weights and masks, but files of a later step contain these. So call this with
        the files' metadata first. ::

            handle.make_room(dcp.FileSystemReader(path).read_metadata())
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(parts, checkpoint_id=path)
            set_state_dict(...)
        """
        self.stepper.resume.make_room(metadata)

    @torch.no_grad()
    def finalize(self, model: Average | None = None) -> None:
        """End the recipe: the weights are checked and stay exactly N:M, and nmrun leaves model and
        optimizer.

        Args:
            model: an average to make N:M instead of ending the recipe: a copy of the model with
                dense weights, or the list of its parameters, such as ``shadow_params`` of
                diffusers' ``EMAModel``. It gets the projections of its own weights. That may be
                before the end of the recipe or after it.

        Raises:
            RunError: where a weight does not hold its pattern, the optimizer never stepped,
                training ended in a dense phase, the weights changed without the optimizer, or
                after :meth:`abandon`. Nothing is changed then.
            ConfigError: for a ``model`` without the parameters of this one, and for this one itself.
        """
        if model is not None:
            for part, projected in self._projections(model):
                part.copy_(projected)
            return
        self._check_not_abandoned()
        reshard(self.model)
        if self.sparse:
            self.stepper.recover()
            check_finished(self.model, self.stepper)
            self.finished = self.sparse
            self._warn_of_late()
        for weight in self.sparse:
            weight.weight.add_(0.0)  # makes negative zeros positive
        self._leave()
        for weight in self.finished:
            weight.forget_dense()

    def _warn_of_late(self) -> None:
        """Warn of weights that stayed dense because they were trained only from a later step on."""
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trained = {
            n for n, p in self.model.named_parameters() if p.requires_grad and id(p) in owned
        }
        late = [
            each.name
            for each in self.left_dense
            if each.reason in UNTRAINED and each.name in trained
        ]
        if late:
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            self.stepper.warn(
                f"{late[0]}{more} stayed dense: frozen or not in the optimizer at first, and trained "
                "later. Make the optimizer with all weights that are to be sparse, and unfreeze them "
                "before sparsify"
            )

    @torch.no_grad()
    def abandon(self) -> None:
        """Take nmrun out of model and optimizer before the recipe's end. The weights become the dense
        ones, or stay what was loaded into them since the last step."""
        reshard(self.model)
        self.stepper.recover()
        for weight in self.sparse:
            if weight.moved():
                weight.forget_dense()
            weight.end_sparse()
        self._abandoned = self._abandoned or bool(self.sparse)
        self._leave()

    def _check_not_abandoned(self) -> None:
        if self._abandoned:
            raise RunError("abandon() took nmrun out of this training: call sparsify again")

    def _leave(self) -> None:
        self.stepper.leave()
        layer.restore_forward(self.by_onednn)

    @contextlib.contextmanager
    def projected(self, model: Average) -> Iterator[None]:
        """While entered, an average (the ``model`` of :meth:`finalize`) is N:M, to evaluate and to save
        it. Afterwards it has its own weights again.

        Raises:
            ConfigError: as :meth:`finalize`.
            RunError: after :meth:`abandon`.
        """
        with torch.no_grad():
            pairs = [
                (part, part.clone(), projection) for part, projection in self._projections(model)
            ]
            for part, _, projection in pairs:
                part.copy_(projection)
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            with torch.no_grad():
                reshard(model)
                for part, before, _ in pairs:
                    part.copy_(before)
            torch.clear_autocast_cache()

    def _projections(self, model: Average) -> Iterator[tuple[Tensor, Tensor]]:
        """For each sparse weight: this process's part of an average's, and the value that it is to
        get."""
        self._check_not_abandoned()
        reshard(model)
        weights = self.sparse or self.finished
        parameters = counterparts(model, self.model, [weight.name for weight in weights])
        for weight, parameter in zip(weights, parameters, strict=True):
            if self.sparse and parameter is weight.parameter:
                raise ConfigError(
                    "this is the model that trains, and not an average of it: finalize() without an "
                    "argument ends the recipe"
                )
            part = local(parameter.detach())
            dense = part.to(weight.weight.device, copy=True)
            out = torch.empty_like(dense)
            self.recipe.project_final(weight.with_dense(dense), out)
            yield part, out + 0.0


Average = nn.Module | Iterable[Tensor]  # a copy of the model, or its parameters in their order


def reshard(model: Average) -> None:
    """Let FSDP's modules gather their weights anew. The outermost module keeps its gathered weights
    after a forward pass without a backward one."""
    modules: Iterable[Any] = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def check_finished(model: nn.Module, stepper: Stepper) -> None:
    """Raise RunError with the reason why the weights cannot stay as they are."""
    recipe, weights = stepper.recipe, stepper.sparse
    modules, parameters = set(model.modules()), dict(model.named_parameters(remove_duplicate=False))
    others = {id(p) for p in parameters.values()} - {id(w.parameter) for w in weights}
    for weight in weights:
        # in a layer that is gone, with another one under its name
        gone = weight.module not in modules and id(parameters.get(weight.name)) in others
        if gone or weight.is_replaced():
            raise RunError(f"{weight.name} {REPLACED}")
    if recipe.step == 0:
        raise RunError(
            "the optimizer that was given to sparsify never stepped: give sparsify the optimizer "
            "that trains, or train before finalize()"
        )
    for weight in weights:
        if weight.weight.isnan().any():
            raise RunError(f"{weight.name} has NaN: a loss or gradient was not finite")
    if recipe.ends_dense:
        return
    at_step = f"after step {recipe.step} of total_steps={recipe.total_steps}"
    advice = (
        "Train on, or give sparsify the number of steps that you make, without those that a "
        "GradScaler skips"
    )
    if recipe.dense_forward:
        raise RunError(
            f"training ended in a dense phase of {recipe.name}, {at_step}: the weights are not "
            f"{recipe.pattern}. {advice}"
        )
    for weight in weights:
        if weight.holds():
            continue
        if weight.moved() and stepper.differs(weight):
            raise RunError(
                f"{weight.name} was changed, but not by the optimizer that sparsify got, and is not "
                f"{recipe.pattern}: step with that one, load weights of a sparse phase, or call "
                "handle.refresh() to return to those before the change"
            )
        too_early = "" if recipe.is_sparse else f". {advice}"
        raise RunError(f"{weight.name} is not {weight.pattern} {at_step}{too_early}")


def counterparts(average: Average, model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Find the parameters of these names in a copy of the model, which may be wrapped (EMA, DDP,
    compiled), or in the list of all its parameters or of those that are trained. Raises
    ConfigError if one is missing."""
    parameters: dict[str, Tensor] = {}
    if isinstance(average, nn.Module):
        parameters = {plain_name(name): p for name, p in average.named_parameters()}
    elif isinstance(average, Iterable):
        members, every = list(average), list(model.named_parameters())
        for named in (every, [(name, p) for name, p in every if p.requires_grad]):
            if [p.shape for _, p in named] == [getattr(p, "shape", None) for p in members]:
                parameters = {plain_name(n): p for (n, _), p in zip(named, members, strict=True)}
                break
    for name in map(plain_name, names):
        if name not in parameters:
            raise ConfigError(
                f"this {type(average).__name__} has no parameter {name}: it takes a copy of the model "
                "that was made sparse, or the list of all its parameters (an EMA's shadow_params)"
            )
    return [parameters[plain_name(name)] for name in names]
