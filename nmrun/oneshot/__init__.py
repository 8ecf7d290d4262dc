"""Pruning in one shot: a trained network, some calibration inputs, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nmrun import registry
from nmrun.errors import raise_all
from nmrun.ranges import checks, plain, wrong_values

if TYPE_CHECKING:
    from nmrun.oneshot.methods import Method

METHODS = {
    "magnitude": "nmrun.oneshot.methods.Magnitude",
    "wanda": "nmrun.oneshot.methods.Wanda",
    "ria": "nmrun.oneshot.methods.RIA",
    "sparsegpt": "nmrun.oneshot.methods.SparseGPT",
}


def lines(layers: Sequence[Mapping[str, Any]], width: int = 0) -> list[str]:
    """Write the reports of pruned layers, aligned. ``width``: letters at least of a name."""
    width = max([width, *(len(layer["name"]) for layer in layers)])
    return [
        f"{layer['name']:{width}}  {layer['pattern']}  output error {layer['error']:.3g}"
        for layer in layers
    ]


def build(method: str, hyperparameters: Mapping[str, Any], others: Iterable[str] = ()) -> Method:
    """Make a method of ``METHODS`` with hyperparameters of its own. Raises ConfigError for an
    unknown name or hyperparameter, or a value out of its range. ``others``: what else may have
    been meant by such a hyperparameter."""
    kind: Any = registry.find("method", method, METHODS)
    ranges = checks(kind)
    hyperparameters = {key: plain(value) for key, value in hyperparameters.items()}
    problems = registry.unknown_hyperparameters(method, hyperparameters, ranges, others)
    problems += [line for line, _ in wrong_values(ranges, hyperparameters, f"{method}.")]
    raise_all(problems)
    instance: Method = kind(**hyperparameters)
    return instance
