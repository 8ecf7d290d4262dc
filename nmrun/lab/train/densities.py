"""Which shares of a layer's dense products are left to compute, by its weights and its activations."""

from __future__ import annotations

import math
from typing import NamedTuple

from nmrun.patterns import COLUMNS, Pattern
from nmrun.recipes.base import Recipe
from nmrun.sparsity.weight import SparseWeight

TILE = 16  # rows of the smallest product of a tensor core


class Densities(NamedTuple):
    """What the three products of a layer cost in a training step, as shares of the dense ones."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def weight_density(pattern: Pattern) -> float:
    """What 2:4 sparse tensor cores make of a product with a weight that is N:M along the dimension
    that is summed over.

    For an even M and N up to M - 2 (6:8, 4:8) it is at most (M - 2) / M. As in SlideSparse (Shao et al.
    2026, arXiv 2603.05232) the weights of a group are dealt to M / 2 - 1 windows of four that overlap
    by two, so that each window is 2:4; inputs are copied to match. Else as :func:`hardware_density`.
    """
    share, (groups, rest) = (
        hardware_density(pattern),
        divmod(pattern.length or pattern.m, pattern.m),
    )
    if pattern.m % 2 or pattern.n > pattern.m - 2:
        return share
    windows = groups * (pattern.m // 2 - 1) * 4
    return min(share, (windows / 2 + -(-rest // 4) * 4) / (pattern.length or pattern.m))


def hardware_density(pattern: Pattern) -> float:
    """What 2:4 sparse tensor cores make of a product with an operand that is N:M along the dimension
    that is summed over, as it lies.

    They halve it where the operand is 2:4 as well. All else they compute as dense: 1.0 for 4:8, 6:8
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
    :func:`weight_density`) only a sparse operand counts, so the weight's gradient is dense, and
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
        halved = weight_density(pattern)
        again = recipe.transposable or (
            weight.layer is not None and weight.layer.other_input_gradient
        )
        return Densities(halved, weight_density(pattern.by_rows) if again else 1.0)
    masked = rule.pruned_gradient_factor == 0 and not rule.pruned_gradient_decay
    return Densities(pattern.density, pattern.density, pattern.density if masked else 1.0)


def beside(pattern: Pattern, feeds: bool, reads: bool, hardware: bool = False) -> Densities:
    """Say what the products of a layer cost beside pruned activations Z = m * A, by the equations of
    ``nmrun.step.activations``.

    Arithmetically, Y = Z W^T and all gradients are left with N/M of their multiplications: their
    operand is Z or the gradient of what Z is made of, which is 0 where Z is, or m masks their result.
    In hardware only an operand that is N:M along the sum counts: in Y = Z W^T and in dX = dB V.

    Args:
        pattern: of the activations.
        feeds: the layer gives what A is made of.
        reads: the layer takes Z.
        hardware: count for 2:4 sparse tensor cores.
    """
    share = hardware_density(pattern) if hardware else pattern.density
    others = 1.0 if hardware else share
    found = [Densities(1.0, share, others)] if feeds else []
    found += [Densities(share, others, others)] if reads else []
    return both(*found, hardware=hardware)


def both(*shares: Densities, hardware: bool) -> Densities:
    """What is left by several sparse operands: arithmetically the product of the shares, as on
    average where zeros lie independently; hardware gains from one."""
    return Densities(
        *((min if hardware else math.prod)(each) for each in zip(*shares, strict=True))
    )
