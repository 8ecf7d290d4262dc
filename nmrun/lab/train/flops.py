"""FLOPs of inference and training: dense, without multiplications by zero, and without those that
sparse tensor cores skip."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, shape_wrapper

from nmrun.lab.tasks.base import Task
from nmrun.patterns import COLUMNS, Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight
from nmrun.step.activations import SparseActivations

TILE = 16  # rows of the smallest product of a tensor core


class Products(NamedTuple):
    """A number for each of the three products of a layer in a training step: its FLOPs for one item,
    or their share in the dense ones."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def weight_density(pattern: Pattern) -> float:
    """The share of a dense product's cost that 2:4 sparse tensor cores need with a weight that is
    N:M along the sum.

    For an even M and N up to M - 2 (6:8, 4:8) it is at most (M - 2) / M. SlideSparse (Shao et al.
    2026, arXiv 2603.05232) deals the weights of a group to M / 2 - 1 windows of four that overlap
    by two. Each window is then 2:4, and inputs are copied to match. Else as
    :func:`hardware_density`.
    """
    share, size = hardware_density(pattern), pattern.length or pattern.m
    if pattern.m % 2 or pattern.n > pattern.m - 2:
        return share
    groups, rest = divmod(size, pattern.m)
    windows = groups * (pattern.m // 2 - 1) * 4
    return min(share, (windows / 2 + -(-rest // 4) * 4) / size)


def hardware_density(pattern: Pattern) -> float:
    """The share of a dense product's cost that 2:4 sparse tensor cores need with an operand that is
    N:M along the sum, without rearranging it.

    They halve it where the operand is 2:4 as well; all else is dense to them: 1.0 for 4:8 or 2:6. A
    dimension that four do not divide is filled up with zeros. Of a V:N:M weight, V a multiple of
    :data:`TILE`, they compute four of M columns (VENOM), halved where N is 2 or 1.
    """
    size = pattern.length or math.lcm(pattern.m, 4)
    if pattern.v % TILE == 0:
        columns, halved = COLUMNS * -(-size // pattern.m), pattern.n <= 2
    else:
        columns, halved = -(-size // 4) * 4, pattern.fits_2_4
    return min(1.0, (0.5 if halved else 1.0) * columns / size)


def densities(
    recipe: Recipe, weight: SparseWeight, step: int | None = None, hardware: bool = False
) -> Products:
    """What the products of a sparse layer cost at a planned step, counted from 0; None: at the next
    one.

    Arithmetically, products with the weight have N/M of their multiplications once the weight is
    N:M, and so has the weight's gradient if the rule masks it. In hardware (see
    :func:`weight_density`) only a sparse operand counts. So the weight's gradient is dense, and the
    input's, which sums over the outputs, unless its weight is N:M along those too.
    """
    if recipe.dense_forward if step is None else recipe.planned_dense(step):
        return Products()
    with recipe.at(recipe.step if step is None else step):
        rule = recipe.rule(weight)
        if rule.pruned_weight_factor or (
            step is None and not recipe.is_sparse and rule.pattern is None
        ):
            return Products()
    pattern = rule.pattern or weight.pattern
    if hardware:
        halved = weight_density(pattern)
        again = recipe.transposable or _has_other_input_gradient(weight)
        return Products(halved, weight_density(pattern.by_rows) if again else 1.0)
    masked = rule.pruned_gradient_factor == 0
    return Products(pattern.density, pattern.density, pattern.density if masked else 1.0)


def _has_other_input_gradient(weight: SparseWeight) -> bool:
    return weight.layer is not None and weight.layer.other_input_gradient


# Parameters. Torch's Python for shapes on the meta device imports its compiler and sympy, 1.5 s, by
# when a smaller network has computed an item or two.
COMPUTED = 1_000_000
# at most so many steps of a plan are sampled, evenly spaced: a phase is off by a ten-thousandth of
# the run
PLANNED = 10_000


class LayerFlops(NamedTuple):
    """Layers with the same products. ``weight`` is one of their weights. They may feed or read
    activations that are pruned."""

    weight: SparseWeight | None
    feeds: bool
    reads: bool
    products: Products

    def densities(self, by_weight: Products, pruned: Pattern | None, hardware: bool) -> Products:
        """What the products cost by the weight, and by activations Z = m * A that are ``pruned``, by
        the equations of ``nmrun.step.activations``.

        Arithmetically, Y = Z W^T and all gradients are left with N/M of their multiplications: their
        operand is Z or the gradient of what Z is made of, which is 0 where Z is, or m masks their
        result. In hardware only an operand that is N:M along the sum counts: in Y = Z W^T and in dX =
        dB V. With several sparse operands the share is their product, which is the mean for
        independent zeros; hardware gains from one alone.
        """
        if pruned is None:
            return by_weight
        share = hardware_density(pruned) if hardware else pruned.density
        others = 1.0 if hardware else share
        costs = []
        if self.feeds:
            costs.append(Products(1.0, share, others))
        if self.reads:
            costs.append(Products(share, others, others))
        joint = min if hardware else math.prod
        return Products(*map(joint, zip(*costs, by_weight, strict=True)))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one training item, as a dense network; a multiplication and its
    addition are two.

    Matrix products, convolutions and attention are counted, by torch's formulas; activations,
    norms, the projection and the optimizer are not. ``sparse`` is the part in layers with N:M
    weights or activations, ``teacher`` the forward pass that training has besides.
    """

    forward: float
    backward: float
    sparse: list[LayerFlops]
    teacher: float = 0.0
    activations: SparseActivations | None = None

    @property
    def dense(self) -> float:
        return self.forward + self.backward

    def inference(self, hardware: bool = False, ends_dense: bool = False) -> float:
        """Inference with the final weights, and activations as in the last step, without
        multiplications by 0, or those that 2:4 tensor cores skip (see :func:`weight_density`).
        ``ends_dense``: the recipe leaves the weights dense."""
        at_end = self.activations
        pruned = at_end.pattern if at_end is not None and at_end.ends_sparse else None
        total = self.forward
        for part in self.sparse:
            shares = Products()
            if part.weight is not None and not ends_dense:
                pattern = part.weight.pattern
                shares = Products(weight_density(pattern) if hardware else pattern.density)
            share = part.densities(shares, pruned, hardware).forward
            total -= part.products.forward * (1.0 - share)
        return total

    def training(self, recipe: Recipe, step: int | None = None, hardware: bool = False) -> float:
        """Forward and backward pass of one item, and a teacher's forward pass, at a planned step or
        the next."""
        now, pruned = self.activations, None
        if now is not None and (now.sparse if step is None else now.sparse_at(step)):
            pruned = now.pattern
        saved = 0.0
        for part in self.sparse:
            shares = Products()
            if part.weight is not None:
                shares = densities(recipe, part.weight, step, hardware)
            shares = part.densities(shares, pruned, hardware)
            saved += sum(p * (1.0 - share) for p, share in zip(part.products, shares, strict=True))
        return self.dense + self.teacher - saved

    def planned(self, recipe: Recipe, total_steps: int, hardware: bool = False) -> float:
        """The mean of :meth:`training` over a run as planned. A switch that is decided during the
        run counts at its latest step."""
        steps = range(0, total_steps, -(-total_steps // PLANNED))
        return sum(self.training(recipe, step, hardware) for step in steps) / len(steps)


def steps_in(budget: str, cost: Flops, recipe: Recipe, total_steps: int, items: float) -> int:
    """How many steps use up a budget of FLOPs: ``flops:<number>`` leaves multiplications by zero out,
    ``hardware_flops:<number>`` those that 2:4 tensor cores skip. ``dense`` in place of the number:
    those of ``total_steps`` dense steps.

    ``recipe`` has begun for ``total_steps``; its phases keep their shares of the run."""
    count, _, target = budget.partition(":")
    per_item = cost.dense * total_steps if target == "dense" else float(target) / items
    return round(per_item / cost.planned(recipe, total_steps, hardware=count == "hardware_flops"))


def count(
    model: nn.Module,
    task: Task,
    weights: Sequence[SparseWeight] = (),
    taught: bool = False,
    activations: SparseActivations | None = None,
) -> Flops:
    """Count one item, the task's ``example``, through a copy of a model, so that no state changes.

    The copy is on the CPU if that is quick, or if values decide what is computed, as in a router of
    experts. Else it is on the meta device, where nothing is computed.
    ``taught``: the teacher is a dense network of this kind. The last layer before ``activations``
    feeds them, the next reads them."""
    parameters = list(model.parameters())
    small = sum(p.numel() for p in parameters) < COMPUTED and all(p.is_cpu for p in parameters)
    pruned = activations.modules if activations is not None and activations.pattern else ()
    try:
        counted = _counted(model, task, pruned, "cpu" if small else "meta")
    except RuntimeError:  # the forward pass needed a value
        if small:
            raise
        counted = _counted(model, task, pruned, "cpu")
    twin, forward, backward, items = counted
    sparse = {_storage(twin.get_parameter(weight.name)): weight for weight in weights}
    feeds = {before for before, after in pairwise(forward.order) if after is None}
    reads = {after for before, after in pairwise(forward.order) if before is None}
    parts: dict[Hashable, LayerFlops] = {}
    for where, flops in forward.by_weight.items():
        weight, roles = sparse.get(where), (where in feeds, where in reads)
        if weight is None and not any(roles):
            continue
        kind = (weight and weight.pattern, weight and _has_other_input_gradient(weight), *roles)
        products = (flops, backward.by_weight.get(where, 0), flops)
        part = parts.get(kind, LayerFlops(weight, *roles, Products(0, 0, 0)))
        summed = (a + b for a, b in zip(part.products, products, strict=True))
        parts[kind] = part._replace(products=Products(*summed))
    per_item = [
        part._replace(products=Products(*(flops / items for flops in part.products)))
        for part in parts.values()
    ]
    passed = forward.total / items
    return Flops(passed, backward.total / items, per_item, passed if taught else 0.0, activations)


def _counted(
    model: nn.Module, task: Task, pruned: Iterable[str], place: str
) -> tuple[nn.Module, _Counter, _Counter, int]:
    """A copy of a model, the costs of a forward and a backward pass of the example, and its number
    of items. ``pruned``: the modules whose outputs are N:M."""
    twin = copy.deepcopy(model).to(place)
    batch = tuple(tensor.to(place) for tensor in task.example())
    twin.train()
    forward, backward = (_Counter(twin) for _ in range(2))
    for name in pruned:
        twin.get_submodule(name).register_forward_pre_hook(lambda *_: forward.order.append(None))
    # attention and LSTMs as products, which are counted alike everywhere
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), _lstms_in_products(twin):
        with forward:
            loss = task.loss(twin, batch)
        with backward:
            loss.backward()
    return twin, forward, backward, task.size(batch)


@contextlib.contextmanager
def _lstms_in_products(model: nn.Module) -> Iterator[None]:
    """Keep torch from using oneDNN's single operator for an LSTM, which has no formula; convolutions
    keep oneDNN, which is faster."""
    onednn: Any = torch.backends.mkldnn  # its flags() sets others too, and warns of one
    before = onednn.enabled
    if any(isinstance(module, nn.LSTM) for module in model.modules()):
        onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = before


def _grouped_flops(
    a: Sequence[int], b: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any
) -> int:
    """The FLOPs of a product for each group of rows or columns, as in experts, for which torch has
    no formula. The shapes are those of the operands. Of two matrices the groups divide the sum."""
    outputs = math.prod(out_shape if len(a) + len(b) > 4 else out_shape[1:])
    return 2 * outputs * a[-1]


# older versions of torch have no such product
FORMULAS = {getattr(torch.ops.aten, "_grouped_mm", None): shape_wrapper(_grouped_flops)}
FORMULAS |= flop_registry


class _Counter(TorchDispatchMode):
    """Adds up torch's own FLOP formulas: of all products, and of those with a weight as an operand,
    by its place. ``order``: these places as they come, and what others write between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # biases are operands too
        self.places = {_storage(p) for p in model.parameters() if p.dim() > 1}
        self.total, self.by_weight = 0, dict[int, int]()
        self.order: list[int | None] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to keep it out of the next method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:
            return out
        if func._overloadpacket is torch.ops.aten.convolution_backward:
            # Two products in one call, of the same size. The formula for the weight's gradient is
            # too large for grouped convolutions.
            *others, output_mask = args
            flops = formula(*others, [True, False, False], out_val=(args[1], None, None))
            self.total += flops * sum(output_mask[:2])
            flops *= output_mask[0]
        else:
            flops = formula(*args, **kwargs, out_val=out)
            self.total += flops
        operands = (_storage(each) for each in tree_iter(args) if isinstance(each, Tensor))
        if (place := next((each for each in operands if each in self.places), None)) is not None:
            self.by_weight[place] = self.by_weight.get(place, 0) + flops
            self.order.append(place)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for a weight and its transpose
