"""What was measured of a layer's products, kept on disk between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources.abc import Traversable
from typing import Any

from nmrun import atomic
from nmrun.kernels.compiled import cache_folder


@dataclass(frozen=True)
class Times:
    """Milliseconds of the products of one micro-batch, and of packing the weight, once per
    optimizer step. ``wrong``: why this path cannot be used. Packing the operand of the weight
    gradient, with ``mvue``, is part of that. ``algorithms``: the names of the path with the
    library's algorithm, for the three products, where there is a choice of them."""

    pack: float = 0.0
    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    wrong: str = ""
    algorithms: Sequence[str] = ()

    def __post_init__(self) -> None:
        # a list where they come from a file
        object.__setattr__(self, "algorithms", tuple(self.algorithms))

    def step(self, accumulate: int) -> float:
        """What the products with the weight take for one of ``accumulate`` micro-batches."""
        return self.pack / accumulate + self.forward + self.input_gradient

    @property
    def dense(self) -> float:
        """What the three products of a dense layer take."""
        return self.forward + self.input_gradient + self.weight_gradient


def version(sources: Iterable[Traversable]) -> str:
    """A mark of what measures and is measured: times are those of one version."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]


def recall(file: str, machine: str, shape: str, paths: Collection[str]) -> dict[str, Times] | None:
    """The times of ``paths`` for a shape on this machine, if a file of the cache has just those."""
    # a file of another version, or damaged
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        known = json.loads((cache_folder() / file).read_text())[machine][shape]
        if set(paths) == set(known):
            return {name: Times(**times) for name, times in known.items()}
    return None


def remember(file: str, machine: str, shape: str, found: Mapping[str, Times]) -> None:
    """Keep times for :func:`recall`."""
    path, known = cache_folder() / file, dict[str, Any]()
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    known.setdefault(machine, {})[shape] = {name: asdict(times) for name, times in found.items()}
    with contextlib.suppress(OSError):  # next time it is measured again
        atomic.write(path, json.dumps(known, indent=1), shared=True)


def as_data(times: Mapping[str, Mapping[str, Times]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Times by shape and path as plain data."""
    return {
        shape: {path: asdict(taken) for path, taken in paths.items()}
        for shape, paths in times.items()
    }


def from_data(data: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Times]]:
    """The inverse of :func:`as_data`."""
    return {
        shape: {path: Times(**taken) for path, taken in paths.items()}
        for shape, paths in data.items()
    }
