"""How much training and inference cost, dense and with the zeros of sparse weights left out. Counted, not measured."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from nmrun.patterns import Pattern
from nmrun.products import simulated
from nmrun.recipes.base import Densities, Recipe, hardware_density
from nmrun.sparsity.weight import attached
from nmrun.tasks.base import Task

# Dense products of 16-bit numbers on tensor cores, as NVIDIA's data sheets have them, by part of the device's name; the first that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
PLANNED = 10_000  # steps at most that a plan looks at, evenly spaced: a phase is then off by a ten-thousandth of the run


class Products(NamedTuple):
    """Dense FLOPs of the three products of layers, for one item. The weight's gradient takes as many as the forward product."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def saved(self, densities: Densities) -> float:
        """The FLOPs that these densities leave out."""
        return sum(flops * (1.0 - share) for flops, share in zip(self, densities, strict=True))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one training item (a multiplication and its addition are two), as a dense network.

    Matrix products, convolutions and attention are counted, by torch's formulas; activations, norms, the projection and the
    optimizer are not. ``sparse`` is the part in layers with N:M weights, by pattern: what a recipe's ``densities`` apply to.
    """

    forward: float
    backward: float
    sparse: dict[Pattern, Products]

    @property
    def dense(self) -> float:
        """Forward and backward pass of the dense network."""
        return self.forward + self.backward

    @property
    def forward_sparse(self) -> float:
        """Inference with the final weights: N/M of each product with a sparse weight, what leaving out every zero would reach."""
        return self.forward - sum(p.forward * (1.0 - pattern.density) for pattern, p in self.sparse.items())

    @property
    def forward_hardware(self) -> float:
        """Inference on 2:4 sparse tensor cores; see ``nmrun.recipes.base.hardware_density``."""
        return self.forward - sum(p.forward * (1.0 - hardware_density(pattern)) for pattern, p in self.sparse.items())

    def training(self, recipe: Recipe, step: int | None = None, hardware: bool = False) -> float:
        """Forward and backward pass in the recipe's next step, or in step ``step`` (from 0) as planned."""
        saved = sum(p.saved(recipe.densities(pattern, step, hardware)) for pattern, p in self.sparse.items())
        return self.dense - saved

    def planned(self, recipe: Recipe, total_steps: int, hardware: bool = False) -> float:
        """The mean of :meth:`training` over a run as planned; a switch that is found on the way counts where it is at the latest."""
        steps = range(0, total_steps, -(-total_steps // PLANNED))
        return sum(self.training(recipe, step, hardware) for step in steps) / len(steps)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What a device can do in a second at ``bf16`` or ``fp16``, dense; None if that is not known."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def steps_in(budget: str, cost: Flops, recipe: Recipe, total_steps: int, items: int) -> int:
    """How many steps of ``items`` each use up the budget, arithmetically: ``flops:<number>``, or ``flops:dense`` for what
    ``total_steps`` dense steps would use. ``recipe`` is the one for ``total_steps``; its phases are taken as fractions of the run."""
    target = budget.removeprefix("flops:")
    wanted = cost.dense * total_steps if target == "dense" else float(target) / items
    return round(wanted / cost.planned(recipe, total_steps))


def count(model: nn.Module, task: Task) -> Flops:
    """Count one item of ``task`` through a copy of ``model`` on the meta device: nothing is computed, and no state changes."""
    twin = copy.deepcopy(model).to("meta")
    batch = tuple(tensor.to("meta") for tensor in task.example())
    twin.train()
    patterns: dict[int, Pattern] = {}
    with torch.random.fork_rng(devices=[]):
        for weight in attached(twin):
            weight.projection._seen = weight.projection._stamp(weight.dense)  # no projection: finding masks is not counted
            simulated.uninstall(weight)  # what it simulates is of the same size
            for tensor in (weight.dense, weight.projection.projected):
                patterns[_storage(tensor)] = weight.pattern
        with _Counter(patterns) as forward:
            loss = task.loss(twin, batch)
        with _Counter(patterns) as backward:
            loss.backward()
    items = task.size(batch)
    sparse = {
        pattern: Products(flops / items, backward.with_weight.get(pattern, 0) / items, flops / items)
        for pattern, flops in forward.with_weight.items()
    }
    return Flops(forward.total / items, backward.total / items, sparse)


class _Counter(TorchDispatchMode):
    """Adds up torch's own FLOP formulas: of all products, and of those with a weight of known pattern as an operand."""

    def __init__(self, patterns: dict[int, Pattern]) -> None:
        super().__init__()
        self.patterns, self.total = patterns, 0
        self.with_weight: dict[Pattern, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return out
        if func._overloadpacket is torch.ops.aten.convolution_backward:
            # Two products in one call, of the same size. The formula for the weight's gradient is too large for grouped convolutions.
            *others, wanted = args
            flops = formula(*others, [True, False, False], out_val=(args[1], None, None))
            self.total += flops * sum(wanted[:2])
            flops *= wanted[0]
        else:
            flops = formula(*args, **kwargs, out_val=out)
            self.total += flops
        for operand in tree_iter(args):
            if isinstance(operand, Tensor) and (pattern := self.patterns.get(_storage(operand))) is not None:
                self.with_weight[pattern] = self.with_weight.get(pattern, 0) + flops
                break
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for a weight and its transpose
