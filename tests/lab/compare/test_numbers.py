"""Which digits of a number are shown."""

import pytest

from nmrun.lab.compare.notation import places, printed, signed, unit


@pytest.mark.parametrize(
    ("value", "spread", "metric", "text", "of_spread"),
    [
        (0.98712, 0.0021, "test/accuracy", "98.7", "0.2"),
        (0.98712, 0.0012, "test/accuracy", "98.71", "0.12"),
        (0.98712, 0.000996, "test/accuracy", "98.71", "0.10"),
        (0.858, 0.028, "test/accuracy", "86", "3"),
        (0.858, 0.28, "test/accuracy", "90", "30"),
        (12345.6, 220.0, "test/perplexity", "12300", "200"),
        (0.000123, 0.0000142, "mean/sparsity/flip_rate", "0.000123", "0.000014"),
        (-0.31, 0.05, "test/loss", "\N{MINUS SIGN}0.31", "0.05"),
        (3.7821e11, 2.3e9, "flops/training_dense", "378G", "2G"),
        (3.5021e10, 2.3e8, "flops/training_dense", "35.0G", "200M"),
    ],
)
def test_a_mean_ends_where_its_deviation_begins(value, spread, metric, text, of_spread):
    at = places(value, metric, spread)
    assert (printed(value, metric, at), printed(spread, metric, at)) == (text, of_spread)


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.98712, "test/accuracy", "98.7"),
        (0.9, "test/accuracy", "90.0"),
        (-0.0001, "test/accuracy", "0.0"),
        (1.23456, "test/loss", "1.235"),
        (12345.6, "test/loss", "12346"),
        (0.5, "test/loss", "0.5"),
        (0.0, "test/loss", "0"),
        (100.0, "test/bleu", "100"),
        (3.7821e11, "flops/training_dense", "378.2G"),
        (1.5e-5, "test/loss", "0.000015"),
    ],
)
def test_without_a_deviation(value, metric, text):
    assert printed(value, metric) == text
    assert printed(value, metric, places(value, metric, 1e-9 * abs(value))).startswith(text[:3])


def test_signs_and_units():
    assert [signed(x, "test/loss", 1) for x in (0.26, -0.26, 0.04, -0.04, 0.0)] == [
        *("+0.3", "\N{MINUS SIGN}0.3", "0.0", "0.0", "0.0")
    ]
    assert [unit("best/test/accuracy", difference) for difference in (False, True)] == [
        *("%", "percentage points")
    ]
    assert (unit("seconds"), unit("flops/training_dense"), unit("test/bleu")) == ("s", "FLOPs", "")
