"""What of a document does not have the shape that readers rely on."""

from __future__ import annotations

from typing import Any

import pytest

from nmrun.lab.runs.documents import misfit, parsed
from nmrun.ranges import whole

SHAPE: dict[str, Any] = {
    "seed": int,
    "config?": {"name": str},
    "metrics?": {str: {str: float | int | None}},
    "events?": [{"sentence": str}],
    "jobs?": whole(1),
    "best?": bool,
}
GOOD: dict[str, Any] = {
    "seed": 3,
    "config": {"name": "mlp", "width": [1]},
    "metrics": {"final": {"loss": 0.5, "accuracy": None}},
    "events": [{"sentence": "it began"}],
    "jobs": 2,
    "best": True,
    "of another program": {},
}


def test_a_document_of_the_shape_fits():
    assert misfit(GOOD, SHAPE) == misfit({"seed": 0}, SHAPE) == ""


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"seed": "3"}, "seed"),
        ({"seed": True}, "seed"),
        ({"config": {}}, "config.name"),
        ({"config": ["name"]}, "config"),
        ({"metrics": {"final": {"loss": "low"}}}, "metrics.final.loss"),
        ({"metrics": {"final": None}}, "metrics.final"),
        ({"events": [{"sentence": "a"}, "b"]}, "events"),
        ({"events": {}}, "events"),
        ({"jobs": 0}, "jobs"),
        ({"best": 1}, "best"),
    ],
)
def test_the_place_that_does_not_fit_is_named(change, place):
    assert place in misfit({**GOOD, **change}, SHAPE)


@pytest.mark.parametrize("value", [None, [], "text", 3, {}])
def test_what_is_no_such_document_at_all(value):
    assert misfit(value, SHAPE)


def test_whole_numbers_are_those_that_a_float_holds():
    """Of a training there may be more than 2**64 FLOPs."""
    assert parsed(b'{"total": %d}' % 10**30) == {"total": 10**30}
    assert parsed(b'{"total": 0.%d}' % 10**400) == {"total": 0.1}
    for text in (b'{"total": %d}', b'["\\n", -%d]'):
        with pytest.raises(ValueError, match="too large"):
            parsed(text % 10**400)
