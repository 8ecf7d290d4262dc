"""N:M activations: the projection against brute force, the gradient against finite differences and
the closed form.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nmrun.patterns import Pattern
from nmrun.step.activations import SquaredReLU, keep_largest


def best_of_each_group(tokens: Tensor, pattern: Pattern) -> Tensor:
    """Of all choices of N of M features of a token, the one with the most energy."""
    result = torch.zeros_like(tokens)
    for row, token in enumerate(tokens):
        for start in range(0, len(token), pattern.m):
            choices = itertools.combinations(range(start, start + pattern.m), pattern.n)
            best = max(choices, key=lambda at: float(token[list(at)].square().sum()))
            result[row, list(best)] = token[list(best)]
    return result


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 24), (0, 8)])
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "3:8", "1:2", "4:4"])
def test_each_token_keeps_the_most_energy_that_the_pattern_allows(shape, pattern):
    activations, parsed = torch.randn(shape, dtype=torch.float64), Pattern.parse(pattern)
    expected = best_of_each_group(activations.reshape(-1, shape[-1]), parsed).reshape(shape)
    assert torch.equal(keep_largest(activations, parsed), expected)


@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_blocks_of_tokens_share_four_features(tokens):
    """4:2:8, the last block short: the four columns with the largest sums, then two a token."""
    torch.manual_seed(1)
    activations = torch.randn(tokens, 16)
    expected = torch.zeros_like(activations)
    for first, start in itertools.product(range(0, tokens, 4), (0, 8)):
        block = activations[first : first + 4, start : start + 8]
        sums = [float(column.abs().sum()) for column in block.T]
        columns = sorted(range(8), key=lambda c: -sums[c])[:4]
        for row, token in enumerate(block):
            for c in sorted(columns, key=lambda c: -abs(float(token[c])))[:2]:
                expected[first + row, start + c] = token[c]
    actual = keep_largest(activations, Pattern(2, 8, v=4))
    assert torch.equal(actual, expected)
    assert torch.equal(keep_largest(activations[None], Pattern(2, 8, v=4))[0], expected)


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 8, v=2)])
def test_the_gradient_is_that_of_the_function(pattern):
    """Finite differences, at points where no magnitude is near another."""
    torch.manual_seed(2)
    x = torch.randperm(96).view(6, 16).double().div(10).sub(2.05).requires_grad_()
    weight = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)

    def layer(x, weight):
        return functional.linear(keep_largest(SquaredReLU()(x), pattern), weight)

    assert torch.autograd.gradcheck(layer, (x, weight), eps=1e-4, atol=1e-3)


def test_bfloat16_and_other_strides():
    torch.manual_seed(4)
    activations = torch.randn(8, 6, 3).bfloat16().permute(2, 1, 0)
    result = keep_largest(activations, Pattern(2, 4))
    expected = best_of_each_group(activations.reshape(-1, 8).float(), Pattern(2, 4))
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.float(), expected.view(3, 6, 8))
