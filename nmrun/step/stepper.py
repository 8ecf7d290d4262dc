"""What happens around ``optimizer.step()``, by hooks of the optimizer.

In this order::

    before    after a step that failed, the parameters point at the projected weights again
              a closure is evaluated; the weights' tensors leave the optimizer's state
              weights that were written from outside become the new dense weights
              recipe.before_step; the rule edits the gradients
              the parameters point at the dense weights
    step      the optimizer moves the dense weights (nmrun.optim: rule and step in one pass)
    after     the parameters point at the projected weights again; the clock moves on
              recipe.after_step; the rule projects the dense weights into the parameters
              packed copies are made anew; the tensors return to the optimizer's state
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import RunError
from nmrun.kernels.layout import Update
from nmrun.optim.adam import Adam, skipped_by_loss_scaling
from nmrun.optim.stock import breaks_graph
from nmrun.products import layer
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.metrics import MaskMetrics
from nmrun.sparsity.processes import agree_over_ranks
from nmrun.sparsity.projections import WeightBatch, edit_gradients
from nmrun.sparsity.weight import LIVE, SparseWeight
from nmrun.step.resume import KEY, Resume, makes_state

# every so many steps all values are compared, which finds writes into ``.data``; also at first
COMPARED_EVERY = 500
WRITTEN_AT_MOST = 2  # steps in a row before which others may write into the weights
REPLACED = (
    "is no longer the parameter that was made sparse (a new layer, load_state_dict(assign=True), "
    "to_empty or fully_shard after sparsify?): make the optimizer and call sparsify after that"
)
# the code of the wrapper that torch puts around ``step`` to run hooks
HOOKED = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


@dataclass
class OpenStep:
    """A step of the optimizer that has begun and not ended.

    Attributes:
        skipped: whether it changes nothing (loss scaling overflowed).
        takes_state: whether it found the weights' tensors in the optimizer's state.
        calls: of the optimizer's ``step``; two where one calls another.
        in_one_pass: the weights that the optimizer projects, with the rule of each.
    """

    skipped: bool
    takes_state: bool
    calls: int = 1
    in_one_pass: dict[SparseWeight, Rule] = field(default_factory=dict)


@dataclass
class OutsideWrites:
    """The writes into the weights by others than the optimizer.

    Attributes:
        last: the step before which the last was found.
        in_a_row: how many steps in a row had one.
        warned: whether the user was.
    """

    last: int | None = None
    in_a_row: int = 0
    warned: bool = False

    def need_comparison_before(self, step: int) -> bool:
        """Whether all values are compared before this step, since a write into ``.data`` leaves no
        other trace."""
        return (
            step <= WRITTEN_AT_MOST
            or self.last in (step - 1, step)
            or step % COMPARED_EVERY == COMPARED_EVERY - 1
        )

    def note(self, step: int) -> None:
        if self.last != step:
            self.in_a_row = self.in_a_row + 1 if self.last == step - 1 else 1
            self.last = step


class Stepper:
    """Carries out a recipe around the steps of an optimizer.

    Attributes:
        sparse: the sparse weights; empty after :meth:`leave`.
        measure_flips: whether the next step's mask changes are measured.
        shows_final: whether the parameters are the weights that a run ending now would leave, until
            the next :meth:`refresh`.
        measured: what was measured in the last step, by name.
        followers: are called with (parameter name, dim, index) when channel permutation made a
            parameter ``p.index_select(dim, index)``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        sparse: list[SparseWeight],
    ) -> None:
        self.recipe, self.sparse = recipe, sparse
        self.measure_flips = self.shows_final = False
        self.mask_metrics = MaskMetrics(recipe, sparse)
        self.followers: list[Callable[[str, int, Tensor], None]] = [self.mask_metrics.reorder]
        self.optimizer = optimizer
        self.measured: dict[str, float] = {}
        self._step: OpenStep | None = None  # stays after a step that failed
        self._outside = OutsideWrites()
        self._batch = WeightBatch()
        self._begun = False
        self._hooks: list[Any] = []
        self.resume = Resume(optimizer, recipe, sparse, self.refresh)
        captured = any(group.get("capturable") for group in optimizer.param_groups)
        for weight in sparse:
            weight.copies = captured or not _owns_its_storage(weight.parameter)
        self.refresh()  # first: where a recipe's mask is refused, the optimizer has no hooks
        for weight in sparse:
            LIVE[id(weight.parameter)] = weight.parameter
        if sparse:
            self._hooks = [
                optimizer.register_step_pre_hook(_hook(self._before_step)),
                optimizer.register_step_post_hook(_hook(self._after_step)),
                *self.resume.hooks(),
            ]
            self.resume.put_clock()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # where a step calls super().step(), torch may run the hooks of both
        if self._step is not None and _is_nested(optimizer):
            self._step.calls += 1
            return None
        self.recover()
        answer = closure_first(args, kwargs)
        self._step = step = OpenStep(
            skipped=skipped_by_loss_scaling(optimizer) or makes_state(optimizer, self.sparse),
            takes_state=any(optimizer.state.get(weight.parameter) for weight in self.sparse),
        )
        for weight in self.sparse:  # also where it is skipped: torch's fused Adam reads its state
            weight.pop_state(optimizer)
        if step.skipped:
            return answer
        first = not self._begun
        if first:
            self._check_places()
        self.notice_changes()
        self._warn_if_evaluated()
        if first and self.recipe.step == 0:
            self._warn_if_pruned()
        if self.measure_flips:
            self.mask_metrics.before()
        self.recipe.before_step(self.sparse, optimizer)
        if not self.recipe.dense_forward:
            step.in_one_pass = self._plan(optimizer)
            rest = [weight for weight in self.sparse if weight not in step.in_one_pass]
            self._edit_gradients([weight for weight in rest if weight.grad is not None])
            for weight in rest:
                weight.show_dense()
        return answer

    def _check_places(self) -> None:
        """Raise RunError where a parameter was replaced since; make the ranks agree."""
        if replaced := next((w.name for w in self.sparse if w.is_replaced()), ""):
            raise RunError(f"{replaced} {REPLACED}")
        self._begun = True
        if agree_over_ranks(self.recipe, self.sparse):
            self.refresh()

    def _warn_if_pruned(self) -> None:
        """Warn where a recipe that moves pruned weights begins with none but zeros there: a model was
        loaded, and the optimizer's state was not, or it was pruned in one shot."""
        rules = [self.recipe.rule(w) for w in self.sparse]
        stays = any(r.mask is not None and r.pruned_gradient_factor == 0 for r in rules)
        if stays or any(_hidden(w.dense) for w in self.sparse):
            return
        if all(w.is_pruned() for w in self.sparse) and any(w.dense.any() for w in self.sparse):
            self.warn(
                f"the weights are {self.recipe.pattern} before the first step, so the pruned ones begin "
                "at 0. After nmrun.prune this is meant; to go on with a training, load the state of its "
                "optimizer too"
            )

    def _warn_if_evaluated(self) -> None:
        """Warn of a step with the gradients of a model that was loaded as it is evaluated, after the
        optimizer: the dense weights are right, and the forward pass was with others."""
        if not self.recipe.evaluates_final:
            return
        moved = [w for w in self.sparse if w.moved() and not _hidden(w.dense)]
        loaded = [w.name for w in moved if not self._is(w, self.recipe.project)]
        if loaded:
            self.warn(
                f"{loaded[0]} was loaded as it is evaluated, and this step's gradients are of that: of "
                "such a checkpoint load the model before the optimizer"
            )

    def recover(self) -> None:
        """After a step that failed half-way, let the parameters be the projected weights again."""
        if any(weight.shows_dense for weight in self.sparse):
            self.refresh()

    def _plan(self, optimizer: torch.optim.Optimizer) -> dict[SparseWeight, Rule]:
        """Let the optimizer carry out the rule inside its step; returns the weights that
        it projects, with the rule of each."""
        recipe = self.recipe
        if not isinstance(optimizer, Adam) or not recipe.is_rule_alone:
            return {}
        rules = [recipe.rule(weight) for weight in self.sparse]
        with recipe.at(recipe.step + 1):
            after = [recipe.rule(weight) for weight in self.sparse]
        updates, planned = {}, {}
        for weight, now, then in zip(self.sparse, rules, after, strict=True):
            if then.mask is None and recipe.chooses:
                continue
            if now.pruned_gradient_factor != 1 and now.mask is not then.mask:
                continue  # a kernel edits and projects by one mask
            pattern = then.pattern or weight.pattern
            updates[weight.parameter] = Update(
                weight.dense, weight.weight, weight.dim, pattern, now.then(then)
            )
            planned[id(weight.parameter)] = weight, then
        return dict(planned[id(p)] for p in optimizer.plan(updates))

    @torch.no_grad()
    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        step = self._step
        if step is None:  # made sparse inside this step
            return
        step.calls -= 1
        if step.calls:
            return
        self._step = None
        if step.skipped:
            if step.takes_state:
                self.resume.put()
            return
        for weight in self.sparse:
            weight.show_projected()
        versions = {weight: _versions(weight, rule) for weight, rule in step.in_one_pass.items()}
        self.recipe.step += 1
        if self.recipe.step - 1 == self.recipe.total_steps:
            self.warn(
                f"this is one step more than total_steps={self.recipe.total_steps}, by which the recipe "
                "planned its run: give sparsify the number of steps that you make"
            )
        self.recipe.after_step(self.sparse, optimizer)
        for name, dim, index in self.recipe.reordered:
            for follow in self.followers:
                follow(name, dim, index)
        self.recipe.reordered.clear()
        # the recipe may have changed the weight, the mask or anything else since it was projected
        unchanged = {
            weight
            for weight, rule in step.in_one_pass.items()
            if not self.recipe.dense_forward
            and _versions(weight, rule) == versions[weight]
            and rule.projects_as(self.recipe.rule(weight))
        }
        self.refresh(unchanged)
        self.measured = self.mask_metrics.after(optimizer) if self.measure_flips else {}
        self.resume.put()
        self.resume.loaded = False

    def warn(self, sentence: str, kind: str = "") -> None:
        """Note an unexpected event, and warn of it."""
        self.recipe.say(sentence, kind)
        warnings.warn(f"nmrun: {self.recipe.events[-1]}", stacklevel=2)

    @torch.no_grad()
    def refresh(self, projected: Collection[SparseWeight] = ()) -> None:
        """Write the projections of the dense weights into the parameters, as after every step. The
        weights ``projected`` have theirs already."""
        self.shows_final, dense = False, self.recipe.dense_forward
        for weight in self.sparse:
            weight.show_projected()
            if dense:
                weight.end_sparse()
            elif not weight.has_dense:
                weight.begin_sparse()
        if not dense:
            self._project([weight for weight in self.sparse if weight not in projected])
        for weight in self.sparse:
            if weight.layer is not None:
                weight.layer.enter(self.recipe)
            if not dense:
                for follow in weight.dependents:
                    follow(weight)
            if weight.layer is not None:
                weight.layer.pack()
        torch.clear_autocast_cache()  # it still has the old weights
        for weight in self.sparse:
            weight.note()

    def _edit_gradients(self, weights: list[SparseWeight]) -> None:
        if self.recipe.is_rule_alone:
            edit_gradients(weights, [self.recipe.rule(weight) for weight in weights])
            return
        for weight in weights:
            assert weight.grad is not None
            self.recipe.edit_gradient(weight, weight.grad)

    def _project(self, weights: list[SparseWeight]) -> None:
        recipe = self.recipe
        if recipe.is_rule_alone and not recipe.chooses:
            rules = [recipe.rule(weight) for weight in weights]
            weights = self._batch.project(weights, rules)
        for weight in weights:
            recipe.project(weight, weight.weight)

    @torch.no_grad()
    def notice_changes(self) -> None:
        """Make weights that were written from outside the new dense weights, with an event. Raises
        RunError where that happens step after step: nothing is left of the dense weights then."""
        if self.recipe.dense_forward:
            return
        step = self.recipe.step
        thorough = self._outside.need_comparison_before(step)
        changed: list[SparseWeight] = []
        for weight in self.sparse:
            elsewhere = weight.dense.device != weight.weight.device
            if weight.is_cast() or elsewhere or weight.is_stored_otherwise(weight.dense):
                weight.restore("dense", weight.dense)
                if not weight.moved():  # rounding can make weights equal, and so change the mask
                    self.recipe.project(weight, weight.weight)
            if (weight.moved() or weight.is_elsewhere() or thorough) and self.differs(weight):
                changed.append(weight)
        if not changed:
            return
        self._outside.note(step)
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        subject = f"{changed[0].name}{more} changed outside the optimizer"
        if self._outside.in_a_row > WRITTEN_AT_MOST:
            raise RunError(
                f"step {step}: {subject} before each of {self._outside.in_a_row} steps, and each time "
                "the dense weights are lost. Give sparsify the optimizer that moves the weights (it "
                "may not step in the backward pass). Write weights inside handle.dense_weights()"
            )
        for weight in changed:
            weight.dense.copy_(weight.weight)  # the tensor that the optimizer's state has
            self.recipe.project(weight, weight.weight)  # the rule reads what is pruned from it
        sentence = f"{subject}: the new values are the dense weights"
        if self._outside.warned or step == 0:  # before the first step they are loaded
            self.recipe.say(sentence, "outside")
        else:
            self._outside.warned = True
            self.warn(sentence, "outside")

    def differs(self, weight: SparseWeight) -> bool:
        """Whether the parameter is not the projection of the dense weight, nor what evaluation shows,
        of which a loaded model may have been saved; never where that cannot be asked."""
        if _hidden(weight.dense) or self._is(weight, self.recipe.project):
            return False
        return not (self.recipe.evaluates_final and self._is(weight, self.recipe.project_final))

    def _is(self, weight: SparseWeight, project: Callable[[SparseWeight, Tensor], None]) -> bool:
        """Whether the parameter is this projection of the dense weight."""
        used, expected = weight.weight, torch.empty_like(weight.dense)
        project(weight, expected)
        return torch.equal(expected, used) or torch.equal(expected.nan_to_num(), used.nan_to_num())

    def leave(self) -> None:
        """Take hooks and tensors out of the optimizer; the parameters stay as they are. A second
        call does nothing: by then the optimizer may belong to another training."""
        if not self.sparse:
            return
        for weight in self.sparse:
            weight.pop_state(self.optimizer)
            layer.uninstall(weight)
            LIVE.pop(id(weight.parameter), None)
        self.recipe.clean(self.optimizer)
        self.recipe.detach(self.optimizer)
        for hook in self._hooks:
            hook.remove()
        self.optimizer.param_groups[0].pop(KEY, None)
        self.sparse, self._hooks = [], []


def closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Evaluate the closure of a step now, since gradients are edited before the step. ``args`` and
    ``kwargs`` are those of ``step``, the optimizer first. Returns them with a closure that only
    returns the loss, or None if there was no closure."""
    closure = kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    others = tuple(a for a in args[1:] if a is not closure)
    return (args[0], lambda: loss, *others), rest


def _hidden(tensor: Tensor) -> bool:
    """Whether no value can be read: on meta, and while a CUDA graph is captured."""
    return tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _versions(weight: SparseWeight, rule: Rule) -> list[int]:
    """How often the tensors that the projection depends on were written."""
    tensors = (weight.dense, rule.mask, rule.soft_threshold_scale)
    return [tensor._version for tensor in tensors if tensor is not None]


def _hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook, and mark the hook as nmrun's."""
    run = breaks_graph(hook)
    run.nmrun = True  # type: ignore[attr-defined]
    return run


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer was called by another step of it, by the calls on the stack.
    A count of hooks would mistake the step after a failed one for such a step."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        if frame.f_code is HOOKED and frame.f_locals["args"][0] is optimizer:
            depth += 1
        frame = frame.f_back
    return depth > 1


def _owns_its_storage(parameter: Tensor) -> bool:
    """Whether a parameter is a plain tensor that alone uses its whole storage, unlike sharded ones
    and those of flattened recurrent layers."""
    if type(parameter) is not nn.Parameter or hasattr(parameter, "_local_tensor"):
        return False
    size = parameter.numel() * parameter.element_size()
    return parameter.storage_offset() == 0 and parameter.untyped_storage().nbytes() == size
