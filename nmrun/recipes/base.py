"""What a recipe is: a rule, a clock, and at most a mask of its own.

The parameter of a sparse weight holds its projection; its gradient is the gradient at the projected
weight and reaches the dense weight unchanged (straight-through). ``nmrun.step.stepper`` says when
each method is called around an optimizer step.

A subclass is a dataclass: its fields are the hyperparameters, under the names of its paper.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmrun.errors import ConfigError, raise_all
from nmrun.patterns import Pattern
from nmrun.ranges import checks, plain, wrong_values
from nmrun.rule import Rule
from nmrun.sparsity import masks, projections
from nmrun.sparsity.transposable import transposable_mask
from nmrun.sparsity.weight import SparseWeight


@dataclass(frozen=True)
class Event:
    """What happened after a step (0: before the first). Readers take ``str(event)``, a sentence;
    programs its ``kind`` and ``facts``.
    """

    step: int
    text: str
    kind: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}" if self.step else self.text

    @property
    def record(self) -> dict[str, Any]:
        """As plain data, which has the sentence too."""
        facts = {name: plain(value) for name, value in self.facts.items()}
        return {"kind": self.kind, "step": self.step, **facts, "sentence": str(self)}


@dataclass
class Recipe:
    """Base of all recipes: what each optimizer step does to the sparse weights. By itself it is STE, the
    hard threshold with the straight-through gradient.

    A subclass overrides the methods that differ, mostly :meth:`rule`. Its dataclass fields are its
    hyperparameters.

    Attributes:
        name: what ``recipe=`` takes.
        title: how its paper and tables write it; the name, where a class has none of its own.
        needs_total_steps: why the recipe has to know ``total_steps``; empty if it has not.
        masks_are_largest: its masks keep the largest weights, by :meth:`choose`. So they can be
            transposable or V:N:M as well.
        always_transposable: its masks are so without being asked, and cannot be V:N:M.
        pattern: the target, set by :meth:`begin`.
        total_steps: the optimizer steps of the whole run, set by :meth:`begin`; None where unknown.
        step: the optimizer steps done.
        dense_forward: whether the forward pass uses the dense weights.
        dense_steps: how many steps at the beginning are planned to be dense, at most.
        transposable: whether masks are N:M along the outputs as well.
        events: what happened (:meth:`say`).
        reordered: what channel permutation did in this step: (parameter name, dim, index) where the
            parameter became ``parameter.index_select(dim, index)``.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    needs_total_steps: ClassVar[str] = ""
    masks_are_largest: ClassVar[bool] = False
    always_transposable: ClassVar[bool] = False

    pattern: Pattern = field(init=False, repr=False, default=Pattern(2, 4))
    total_steps: int | None = field(init=False, repr=False, default=None)
    step: int = field(init=False, repr=False, default=0)
    dense_forward: bool = field(init=False, repr=False, default=False)
    dense_steps: int = field(init=False, repr=False, default=0)
    transposable: bool = field(init=False, repr=False, default=False)
    events: list[Event] = field(init=False, repr=False, default_factory=list)
    reordered: list[tuple[str, int, Tensor]] = field(init=False, repr=False, default_factory=list)

    # --- what a recipe may override --------------------------------------------------------------

    def begin(self, pattern: Pattern, total_steps: int | None) -> None:
        """Called once, first of all: take the target and the length of the run, and lay out phases.
        Raises ConfigError for hyperparameters that do not fit the run."""
        self.pattern, self.total_steps = pattern, total_steps
        # another training may have left these
        self.step, self.dense_steps, self.dense_forward = 0, 0, False
        self.transposable = self.always_transposable
        self.events, self.reordered = [], []
        if self.needs_total_steps:
            self.need_total_steps(self.needs_total_steps)

    def refuses(self, shape: Sequence[int], outputs: int, pattern: Pattern) -> str:
        """Say why this recipe cannot make a weight of this shape sparse; empty where it can.
        ``outputs``: the dimension of the outputs; a convolution's are those of one group."""
        if self.transposable and shape[outputs] % pattern.m:
            return f"{shape[outputs]} outputs are not a multiple of {pattern.m}, which a transposable mask needs"
        return ""

    def prepare(self, model: nn.Module) -> None:
        """Called once, before :meth:`attach`: for a recipe that needs the network around its
        weights."""

    def attach(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called once, while all weights are dense: check the optimizer, and keep tensors by
        ``weight[key]``, which are saved with the optimizer's state. Raises ConfigError for an
        optimizer or a weight that the recipe cannot work with."""

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once, at the end: take from the optimizer what :meth:`attach` gave it."""

    def rule(self, weight: SparseWeight) -> Rule:
        """What a step does to this weight when ``self.step`` steps are done. Default: STE."""
        return Rule()

    def choose(self, weight: SparseWeight) -> Tensor:
        """Choose the mask of ``weight.dense``: bool, its shape, True = kept. Default: the largest
        magnitudes. A choice of its own keeps kernels from finding the mask."""
        return self.largest_mask(weight)

    def before_step(
        self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer
    ) -> None:
        """Look at ``weight.grad`` just before the update, before the rule edits it."""

    def clean(self, optimizer: torch.optim.Optimizer) -> None:
        """Take from the optimizer what :meth:`before_step` gave it for a step that has failed since."""

    def after_step(self, weights: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        """Called after each step, when ``self.step`` counts it, and before the projection: the place to
        change phase."""

    def project(self, weight: SparseWeight, out: Tensor) -> None:
        """Write the forward weight into ``out``. Default: by the rule, with the mask of :meth:`choose`
        where a subclass has one."""
        rule = self.rule(weight)
        pattern = rule.pattern or weight.pattern
        if rule.mask is None and self.chooses and rule.soft_threshold_scale is None:
            mask = check_mask(self, weight, self.choose(weight))
            rule = Rule(mask=mask, pruned_weight_factor=rule.pruned_weight_factor)
        projections.project(weight.dense, out, pattern, weight.dim, rule)

    def edit_gradient(self, weight: SparseWeight, grad: Tensor) -> None:
        """Change ``grad`` in place, just before the update. Default: by the rule."""
        projections.edit_gradient(grad, weight.dense, weight.weight, self.rule(weight))

    def project_final(self, weight: SparseWeight, out: Tensor) -> None:
        """Write the weight that the run would leave, were it to end now, into ``out``."""
        write = self.project if self.is_sparse else self.largest
        write(weight, out)

    def metrics(self) -> dict[str, float]:
        """Scalars for the log, read now and then."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights' tensors, as plain data (numbers and texts)."""
        return {"step": self.step, "dense_forward": self.dense_forward}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.step, self.dense_forward = int(state["step"]), bool(state["dense_forward"])

    @property
    def is_sparse(self) -> bool:
        """Whether the forward weights hold the target pattern now. Default: outside dense phases."""
        return not self.dense_forward

    @property
    def evaluates_final(self) -> bool:
        """Whether evaluation is by the weights that the run would leave now, not by those of the
        forward pass."""
        return False

    @property
    def ends_dense(self) -> str:
        """Why the result is meant to be dense, or an empty string."""
        return ""

    @property
    def planned_dense_end(self) -> bool:
        """Whether the result is planned to be dense, which is known from :meth:`begin` on."""
        return False

    @property
    def looks_across_rows(self) -> bool:
        """Whether the recipe needs all rows of a weight at once, so that it cannot be sharded."""
        return self.transposable

    def planned_dense(self, step: int) -> bool:
        """Whether step ``step``, counted from 0, is planned to have dense products: to count FLOPs."""
        return step < self.dense_steps

    # --- what follows from it --------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Which weights the forward pass uses now: ``"dense"``, ``"sparse"`` (N:M), or
        ``"transition"``, something between both."""
        return "dense" if self.dense_forward else "sparse" if self.is_sparse else "transition"

    @property
    def chooses(self) -> bool:
        """Whether masks come from :meth:`choose`; else kernels find the N largest themselves."""
        return self.transposable or type(self).choose is not Recipe.choose

    @property
    def is_rule_alone(self) -> bool:
        """Whether the rule says all that happens around a step, so that kernels can do it."""
        kind = type(self)
        return kind.project is Recipe.project and kind.edit_gradient is Recipe.edit_gradient

    def masks_gradient(self, weight: SparseWeight) -> bool:
        """Whether the gradients of pruned weights are not needed now: the rule masks them, and nothing
        else looks at them."""
        looks = type(self).before_step is not Recipe.before_step
        return self.is_rule_alone and not looks and self.rule(weight).pruned_gradient_factor == 0

    def largest_mask(self, weight: SparseWeight) -> Tensor:
        """The N largest magnitudes of every M, or the best transposable mask: bool, shape of the
        weight, True = kept."""
        if not self.transposable:
            return masks.nm_mask(weight.dense, weight.pattern, weight.dim)
        sides = (weight.outputs, weight.dim)
        # a convolution has one matrix (out, in) for each kernel position
        at_each_position = weight.dense.movedim(sides, (-2, -1))
        matrix = at_each_position.reshape(-1, weight.dense.shape[weight.dim])
        mask = transposable_mask(matrix, weight.pattern)
        return mask.reshape(at_each_position.shape).movedim((-2, -1), sides)

    def largest(self, weight: SparseWeight, out: Tensor) -> None:
        """Write the projection that keeps the largest magnitudes into ``out``."""
        if self.transposable:
            torch.mul(weight.dense, self.largest_mask(weight), out=out)
        else:
            projections.keep_largest(weight.dense, out, weight.pattern, weight.dim)

    def need_total_steps(self, why: str) -> int:
        """``total_steps``. Raises ConfigError, with the reason, where nobody has said it."""
        if self.total_steps is None:
            raise ConfigError(f"{self.name} needs total_steps: {why}")
        return self.total_steps

    def make_transposable(self) -> None:
        """Choose transposable masks from now on. Raises ConfigError for a recipe that does not keep the
        largest weights."""
        self._need_largest("transposable")
        self.transposable = True

    def check_blocks(self, pattern: Pattern) -> None:
        """Raise ConfigError where the masks cannot be those of a V:N:M pattern."""
        if self.transposable:
            pattern.without_blocks("a transposable mask")
        self._need_largest(pattern)

    def _need_largest(self, masks: object) -> None:
        if not self.masks_are_largest:
            raise ConfigError(
                f"{self.name} has masks of its own: {masks} ones are for recipes that keep the largest "
                "weights, such as sr_ste"
            )

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """While entered, ``self.step`` is ``step``: to ask what :meth:`rule` says there."""
        now, self.step = self.step, step
        try:
            yield
        finally:
            self.step = now

    def say(self, text: str, kind: str = "", **facts: Any) -> None:
        """Note an event of this step: a sentence for readers, a ``kind`` and ``facts`` for programs.
        Python's logger ``nmrun`` has the sentence too."""
        event = Event(self.step, text, kind, facts)
        self.events.append(event)
        logging.getLogger("nmrun").info(str(event))


def check_hyperparameters(recipe: Recipe) -> None:
    """Raise ConfigError with a line for each field out of its range; the others become plain."""
    ranges, values = checks(type(recipe)), dict[str, Any]()
    for key in ranges:
        value = plain(getattr(recipe, key))
        setattr(recipe, key, value)
        values[key] = list(value) if isinstance(value, tuple) else value
    raise_all(f"{recipe.name}: {line}" for line, _ in wrong_values(ranges, values, ""))


def check_mask(recipe: Recipe, weight: SparseWeight, mask: Any) -> Tensor:
    """Return what :meth:`Recipe.choose` gave. ConfigError where it is no mask of this weight."""
    given = getattr(mask, "dtype", type(mask)), tuple(getattr(mask, "shape", ()))
    if given != (torch.bool, tuple(weight.dense.shape)):
        raise ConfigError(
            f"{type(recipe).__name__}.choose gave {given} for {weight.name}: it takes a tensor of bool "
            f"{tuple(weight.dense.shape)}, True = kept"
        )
    chosen: Tensor = mask
    return chosen


@torch.no_grad()
def keep_mask(weight: SparseWeight, mask: Tensor) -> None:
    """Keep a mask for a weight, stored as the weight is."""
    if "mask" not in weight:
        weight["mask"] = torch.empty_like(weight.dense, dtype=torch.bool)
    weight["mask"].copy_(mask)


def drawn_seed() -> int:
    """A seed below 2**31 from torch's generator, which stays where it is; replicas all get rank
    0's."""
    with torch.random.fork_rng(devices=[]):
        seeds = [int(torch.randint(2**31, (), device="cpu"))]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0]


def generator_of(*words: object) -> torch.Generator:
    """A generator on the CPU that depends on these words alone: a seed, the place of a weight among
    all (names differ within DDP), a step."""
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, words)).encode()))
