"""One-shot methods against their papers' equations, and SparseGPT against the optimal brain surgeon
column by column, with the exact inverse of the Hessian that remains.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from nmrun import oneshot
from nmrun.errors import ConfigError
from nmrun.oneshot.inputs import output_error
from nmrun.patterns import Pattern


def problem(rows: int, columns: int, seed: int = 0, tokens: int = 400):
    """A weight and correlated inputs of very different sizes, in float64."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g, dtype=torch.float64)
    sizes = torch.rand(columns, generator=g, dtype=torch.float64) * 3 + 0.1
    x = torch.randn(tokens, columns, generator=g, dtype=torch.float64) @ mix * sizes
    return torch.randn(rows, columns, generator=g, dtype=torch.float64), x


def groups(columns: int, pattern: Pattern) -> list[range]:
    run = pattern.length or columns
    return [
        range(run * k + i, min(run * k + i + pattern.m, run * (k + 1)))
        for k in range(columns // run)
        for i in range(0, run, pattern.m)
    ]


def keep_best(scores: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The N largest scores of every group, group by group and row by row."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for row, group in itertools.product(range(len(scores)), groups(scores.shape[1], pattern)):
        for j in sorted(group, key=lambda j: -float(scores[row, j]))[: pattern.n]:
            mask[row, j] = True
    return mask


PATTERNS = [
    (Pattern(2, 4), 16),
    (Pattern(1, 4), 16),
    (Pattern(4, 8), 24),
    (Pattern(3, 5), 20),
    (Pattern(2, 4).over(10), 10),  # a short last group
    (Pattern(2, 4).over(6), 18),  # a convolution's three positions, each with one
    (Pattern(2, 4), 272),  # more than two blocks of columns
]


@pytest.mark.parametrize(("pattern", "columns"), PATTERNS, ids=str)
def test_scores_are_those_of_the_papers(pattern, columns):
    weight, x = problem(5, columns)
    norms = [float(sum(v * v for v in column) ** 0.5) for column in x.T.tolist()]
    size = weight.abs().tolist()
    by_row = [sum(row) for row in size]
    by_column = [sum(column) for column in zip(*size, strict=True)]
    expected = {
        "magnitude": weight.abs(),
        "wanda": torch.tensor([[w * n for w, n in zip(row, norms, strict=True)] for row in size]),
        "ria": torch.tensor(
            [
                [(w / by_column[j] + w / by_row[i]) * norms[j] ** 0.5 for j, w in enumerate(row)]
                for i, row in enumerate(size)
            ]
        ),
    }
    for name, scores in expected.items():
        pruned = oneshot.build(name, {}).prune(weight, x.T @ x, pattern)
        assert torch.equal(pruned, torch.where(keep_best(scores, pattern), weight, 0.0)), name
        assert not torch.signbit(pruned[pruned == 0]).any(), name


def blocks_best(scores: torch.Tensor, n: int, group: range, rows: range) -> list[list[int]]:
    """Of V rows, the N best of each among the four columns with the largest sum."""
    total = {j: float(sum(scores[i, j] for i in rows)) for j in group}
    four = sorted(group, key=lambda j: -total[j])[:4]
    return [sorted(sorted(four, key=lambda j: -float(scores[i, j]))[:n]) for i in rows]


@pytest.mark.parametrize(
    ("pattern", "columns"),
    [
        (Pattern(2, 8, v=4), 24),
        (Pattern(1, 5, v=2), 20),
        (Pattern(2, 8, v=4).over(11), 22),  # short last groups of three
        (Pattern(2, 6, v=8).over(11), 22),  # of five
    ],
    ids=str,
)
def test_blocks_of_rows(pattern, columns):
    """Scores add up over the rows of a block; so do SparseGPT's costs, when a group is reached."""
    weight, x = problem(8, columns)
    norms = (x.T @ x).diagonal().sqrt()
    size = weight.abs()
    scored = {
        "magnitude": size,
        "wanda": size * norms,
        "ria": (size / size.sum(0) + size / size.sum(1, keepdim=True)) * norms**0.5,
    }
    blocks = [range(i, i + pattern.v) for i in range(0, 8, pattern.v)]
    for name, scores in scored.items():
        mask = torch.zeros_like(weight, dtype=torch.bool)
        for rows, group in itertools.product(blocks, groups(columns, pattern)):
            best = blocks_best(scores, pattern.n, group, rows)
            for i, chosen in zip(rows, best, strict=True):
                mask[i, chosen] = True
        pruned = oneshot.build(name, {}).prune(weight, x.T @ x, pattern)
        assert torch.equal(pruned, torch.where(mask, weight, 0.0)), name
    expected = by_surgeon_in_blocks(weight, x, pattern, blocks)
    actual = oneshot.build("sparsegpt", {}).prune(weight, x.T @ x, pattern)
    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


def by_surgeon_in_blocks(weight, x, pattern, blocks, damping=0.01):
    """Group by group, as :func:`by_surgeon`."""
    hessian = x.T @ x
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=x.dtype)
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(len(hessian))]
    result = weight.clone()
    for group, rows in itertools.product(groups(weight.shape[1], pattern), blocks):
        costs = torch.zeros_like(weight)
        for i, j in itertools.product(rows, group):
            costs[i, j] = result[i, j] ** 2 / inverses[j][0, 0]
        best = blocks_best(costs, pattern.n, group, rows)
        for i, chosen in zip(rows, best, strict=True):
            for j in group:
                if j not in chosen:
                    result[i, j:] -= result[i, j] / inverses[j][0, 0] * inverses[j][:, 0]
                    result[i, j] = 0.0
    return result


def test_ria_takes_the_power_of_activations():
    weight, x = problem(6, 16)
    rules = (oneshot.build("ria", {"a": a}) for a in (0.0, 1))
    results = [rule.prune(weight, x.T @ x, Pattern(2, 4)) for rule in rules]
    shares = weight.abs() / weight.abs().sum(0) + weight.abs() / weight.abs().sum(1, keepdim=True)
    mask = keep_best(shares, Pattern(2, 4))
    assert torch.equal(results[0], torch.where(mask, weight, 0.0))
    assert not torch.equal(*results)


def by_surgeon(weight, x, pattern, damping=0.01):
    """Row by row, column by column, each time with the inverse of the Hessian that is left."""
    hessian = x.T @ x
    dead = hessian.diagonal() == 0
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=x.dtype)
    hessian[dead, dead] = 1.0
    # [H_{j:}^-1]_jj: what pruning j costs once all columns before it are passed
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(len(hessian))]
    result = weight.clone()
    result[:, dead] = 0.0
    for row in result:
        for group in groups(len(row), pattern):
            costs = {j: float(row[j] ** 2 / inverses[j][0, 0]) for j in group}
            pruned = sorted(group, key=costs.__getitem__)[: max(0, len(group) - pattern.n)]
            for j in sorted(pruned):
                row[j:] -= row[j] / inverses[j][0, 0] * inverses[j][:, 0]
                row[j] = 0.0
    return result


@pytest.mark.parametrize(("pattern", "columns"), PATTERNS, ids=str)
def test_sparsegpt_is_the_surgeon_with_exact_inverses(pattern, columns):
    weight, x = problem(4, columns)
    expected = by_surgeon(weight, x, pattern)
    actual = oneshot.build("sparsegpt", {}).prune(weight, x.T @ x, pattern)
    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
    assert not torch.signbit(actual[actual == 0]).any()


@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_sparsegpt_prunes_inputs_that_are_always_0_first(damping):
    weight, x = problem(8, 32)
    dead = torch.zeros(32, dtype=torch.bool)
    dead[[1, 5, 6, 9, 10, 11, 16, 17, 18, 19, 31]] = True
    x = x.masked_fill(dead, 0.0)
    actual = oneshot.build("sparsegpt", {"damping": damping}).prune(weight, x.T @ x, Pattern(2, 4))
    expected = by_surgeon(weight, x, Pattern(2, 4), damping)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
    assert (actual[:, dead] == 0).all()
    # none of a live input is pruned where two of the group are dead
    assert (actual[:, [4, 7]] != 0).all()


def test_the_output_error_is_that_of_the_outputs():
    weight, x = problem(3, 8)
    pruned = oneshot.build("magnitude", {}).prune(weight, x.T @ x, Pattern(2, 4))
    change, before = x @ (pruned - weight).T, x @ weight.T
    expected = float(change.square().sum() / before.square().sum())
    assert output_error(weight, pruned, x.T @ x) == pytest.approx(expected, rel=1e-12)
    assert output_error(weight, pruned, torch.zeros(8, 8, dtype=x.dtype)) == 0.0


@pytest.mark.parametrize("method", oneshot.METHODS)
def test_inputs_that_are_always_zero_are_pruned_first_and_break_nothing(method):
    weight, x = problem(4, 8)
    x[:, [0, 5]] = 0.0
    weight[:, 0] = weight[:, 5] = 1e-9
    weight[2] = 0.0  # RIA divides by the sum of a row
    pruned = oneshot.build(method, {}).prune(weight, x.T @ x, Pattern(2, 4))
    assert pruned.isfinite().all()
    assert (pruned[[0, 1, 3]][:, [0, 5]] == 0).all()


def test_a_hessian_without_an_inverse_is_said():
    weight, x = problem(2, 8, tokens=4)
    method = oneshot.build("sparsegpt", {"damping": 0.0})
    gram = torch.ones(8, 8, dtype=x.dtype)  # eight times the same input
    with pytest.raises(ValueError, match="no inverse: more samples or a larger damping"):
        method.prune(weight, gram, Pattern(2, 4))
    assert oneshot.build("sparsegpt", {}).prune(weight, x.T @ x, Pattern(2, 4)).isfinite().all()


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        ("wander", {}, "method=wander: no such method; did you mean wanda? (there are magnitude, wanda, ria, sparsegpt)"),
        ("my.method", {}, "method=my.method cannot be imported: No module named 'my'"),
        ("wanda", {"a": 1}, "wanda: a: no such hyperparameter (there are permute)"),
        ("sparsegpt", {"damp": 1}, "sparsegpt: damp: no such hyperparameter; did you mean damping? (there are damping)"),
        ("sparsegpt", {"damping": -1}, "sparsegpt.damping=-1: it takes a number at least 0"),
    ],
)  # fmt: skip
def test_mistakes_get_a_line(method, options, line):
    with pytest.raises(ConfigError) as caught:
        oneshot.build(method, options)
    assert caught.value.problems == [line]
