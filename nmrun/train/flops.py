"""How much training and inference cost, dense and with the zeros of sparse weights left out.
Counted, not measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from nmrun.patterns import COLUMNS, Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight
from nmrun.tasks.base import Task

# Dense products of 16-bit numbers on tensor cores, as NVIDIA's data sheets have them, by part of
# the device's name; the first that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
# Parameters. Torch's Python for shapes on the meta device imports its compiler and sympy, 1.5 s, by
# when a smaller network has computed an item or two.
COMPUTED = 1_000_000
TILE = 16  # rows of the smallest product of a tensor core
# steps at most that a plan looks at, evenly spaced: a phase is then off by a ten-thousandth of the
# run
PLANNED = 10_000


class Densities(NamedTuple):
    """What the three products of a layer cost in a training step, as shares of the dense ones."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def hardware_density(pattern: Pattern) -> float:
    """What 2:4 sparse tensor cores make of a product with a weight that is N:M along the dimension
    that is summed over.

    They halve it where the weight is 2:4 as well. All else they compute as dense: 1.0 for 4:8, 6:8
    or 2:6. A dimension that four do not divide is filled up with zeros. Of a V:N:M weight, V a
    multiple of :data:`TILE`, they compute four of M columns (VENOM), halved where N is 2 or 1.
    """
    size = pattern.length or math.lcm(pattern.m, 4)
    if pattern.v % TILE == 0:
        columns, halved = COLUMNS * -(-size // pattern.m), pattern.n <= 2
    else:
        columns, halved = -(-size // 4) * 4, pattern.fits_2_4
    return min(1.0, (0.5 if halved else 1.0) * columns / size)


def densities(
    recipe: Recipe, weight: SparseWeight, step: int | None = None, hardware: bool = False
) -> Densities:
    """Say what the products of a sparse layer cost.

    Arithmetically, products with the weight have N/M of their multiplications once the weight is
    N:M, and so has the weight's gradient if the rule masks it. In hardware (see
    :func:`hardware_density`) only a sparse operand counts, so the weight's gradient is dense, and
    the input's, which sums over the outputs, as well unless its weight is N:M along those too.

    Args:
        recipe: the recipe.
        weight: of the layer.
        step: as planned, counted from 0; None: the next step.
        hardware: count for 2:4 sparse tensor cores.
    """
    if recipe.dense_forward if step is None else recipe.planned_dense(step):
        return Densities()
    with recipe.at(recipe.step if step is None else step):
        rule = recipe.rule(weight)
        if rule.pruned_weight_factor or (
            step is None and not recipe.is_sparse and rule.pattern is None
        ):
            return Densities()
    pattern = rule.pattern or weight.pattern
    if hardware:
        halved = hardware_density(pattern)
        again = recipe.transposable or (
            weight.layer is not None and weight.layer.other_input_gradient
        )
        return Densities(halved, hardware_density(pattern.by_rows) if again else 1.0)
    masked = rule.pruned_gradient_factor == 0 and not rule.pruned_gradient_decay
    return Densities(pattern.density, pattern.density, pattern.density if masked else 1.0)


class Products(NamedTuple):
    """Dense FLOPs of the three products of layers, for one item. The weight's gradient takes as
    many as the forward product.
    """

    forward: float
    input_gradient: float
    weight_gradient: float

    def saved(self, densities: Densities) -> float:
        """The FLOPs that these densities leave out."""
        return sum(flops * (1.0 - share) for flops, share in zip(self, densities, strict=True))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one training item (a multiplication and its addition are two),
    as a dense network.

    Matrix products, convolutions and attention are counted, by torch's formulas; activations,
    norms, the projection and the optimizer are not.

    Attributes:
        sparse: the part in layers with N:M weights: for each kind of them a weight that stands for
            all, and their products.
        teacher: the forward pass of a teacher, which training has besides.
    """

    forward: float
    backward: float
    sparse: list[tuple[SparseWeight, Products]]
    teacher: float = 0.0

    @property
    def dense(self) -> float:
        """Forward and backward pass of the dense network."""
        return self.forward + self.backward

    @property
    def forward_sparse(self) -> float:
        """Inference with the final weights: N/M of each product with a sparse weight, what leaving
        out every zero would reach.
        """
        return self.forward - sum(p.forward * (1.0 - w.pattern.density) for w, p in self.sparse)

    @property
    def forward_hardware(self) -> float:
        """Inference on 2:4 sparse tensor cores; see :func:`hardware_density`."""
        return self.forward - sum(
            p.forward * (1.0 - hardware_density(w.pattern)) for w, p in self.sparse
        )

    def training(self, recipe: Recipe, step: int | None = None, hardware: bool = False) -> float:
        """Count the forward and backward pass of one item, and a teacher's forward pass.

        Args:
            recipe: the recipe.
            step: as planned, counted from 0; None: the next step.
            hardware: count for 2:4 sparse tensor cores.
        """
        saved = sum(p.saved(densities(recipe, w, step, hardware)) for w, p in self.sparse)
        return self.dense + self.teacher - saved

    def planned(self, recipe: Recipe, total_steps: int, hardware: bool = False) -> float:
        """Compute the mean of :meth:`training` over a run as planned.

        A switch that is found on the way counts where it is at the latest.

        Args:
            recipe: the recipe.
            total_steps: of the run.
            hardware: count for 2:4 sparse tensor cores.
        """
        steps = range(0, total_steps, -(-total_steps // PLANNED))
        return sum(self.training(recipe, step, hardware) for step in steps) / len(steps)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Look up what a device can do in a second, dense.

    Args:
        device: the device.
        precision: fp32, bf16 or fp16.

    Returns:
        FLOPs a second, None if that is not known.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def steps_in(budget: str, cost: Flops, recipe: Recipe, total_steps: int, items: int) -> int:
    """Compute how many steps use up a budget, arithmetically.

    Args:
        budget: ``flops:<number>``, or ``flops:dense`` for what ``total_steps`` dense steps would
            use.
        cost: of one item.
        recipe: the one for ``total_steps``; its phases are taken as fractions of the run.
        total_steps: of the run without a budget.
        items: of a step.
    """
    target = budget.removeprefix("flops:")
    wanted = cost.dense * total_steps if target == "dense" else float(target) / items
    return round(wanted / cost.planned(recipe, total_steps))


def count(
    model: nn.Module, task: Task, weights: Sequence[SparseWeight] = (), taught: bool = False
) -> Flops:
    """Count one item through a copy of a model, so that no state changes.

    The copy is on the CPU where that is soon done or the task asks for it, else on the meta device,
    where nothing is computed.

    Args:
        model: the model.
        task: its ``example`` is counted.
        weights: the model's sparse ones.
        taught: whether a dense network like it is the teacher.
    """
    parameters = list(model.parameters())
    small = sum(p.numel() for p in parameters) < COMPUTED and all(p.is_cpu for p in parameters)
    computed = small or task.counted_with_values
    place = "cpu" if computed else "meta"
    twin = copy.deepcopy(model).to(place)
    batch = tuple(tensor.to(place) for tensor in task.example())
    twin.train()
    kinds: dict[tuple[Pattern, bool], SparseWeight] = {}
    places: dict[int, tuple[Pattern, bool]] = {}
    for weight in weights:
        kind = (weight.pattern, weight.layer is not None and weight.layer.other_input_gradient)
        kinds.setdefault(kind, weight)
        places[_storage(twin.get_parameter(weight.name))] = kind
    # attention as products, which are counted alike everywhere
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        with _Counter(places) as forward:
            loss = task.loss(twin, batch)
        with _Counter(places) as backward:
            loss.backward()
    items = task.size(batch)
    sparse = [
        (
            kinds[kind],
            Products(flops / items, backward.with_weight.get(kind, 0) / items, flops / items),
        )
        for kind, flops in forward.with_weight.items()
    ]
    passed = forward.total / items
    return Flops(passed, backward.total / items, sparse, teacher=passed if taught else 0.0)


class _Counter(TorchDispatchMode):
    """Adds up torch's own FLOP formulas: of all products, and of those with a weight at a known
    place as an operand.
    """

    def __init__(self, places: dict[int, tuple[Pattern, bool]]) -> None:
        super().__init__()
        self.places, self.total = places, 0
        self.with_weight: dict[tuple[Pattern, bool], int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to keep it out of the next method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return out
        if func._overloadpacket is torch.ops.aten.convolution_backward:
            # Two products in one call, of the same size. The formula for the weight's gradient is
            # too large for grouped convolutions.
            *others, wanted = args
            flops = formula(*others, [True, False, False], out_val=(args[1], None, None))
            self.total += flops * sum(wanted[:2])
            flops *= wanted[0]
        else:
            flops = formula(*args, **kwargs, out_val=out)
            self.total += flops
        for operand in tree_iter(args):
            if (
                isinstance(operand, Tensor)
                and (kind := self.places.get(_storage(operand))) is not None
            ):
                self.with_weight[kind] = self.with_weight.get(kind, 0) + flops
                break
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for a weight and its transpose
