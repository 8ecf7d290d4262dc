"""What is measured of a way to compute a layer: whether it is right and what it takes, kept on disk
between runs; and what the layer got by it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources.abc import Traversable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from nmrun import atomic, ranks
from nmrun.errors import first_line
from nmrun.kernels.compiler import cache_folder
from nmrun.products.attention import uncompiled

ONEDNN = "onednn"  # the path of dense products by oneDNN
PACKED_ACTIVATIONS = "packed activations"  # the path of products with the kept activations
FLOAT32 = "float32"  # of attention in float32 where all else is bfloat16
BF16 = "packed bf16"  # of packed ones in bfloat16; those of "packed" are computed in float32
BF16_BLOCKS = "packed blocks bf16"  # of V:N:M ones in bfloat16, by AMX where it is
BF16_BITMAP = "packed bitmap bf16"  # of any N:M in bfloat16, for few tokens, by AMX
BF16_FORWARD = "packed forward bf16"  # with a dense input gradient
INT8 = "int8"  # of packed ones in int8
INT8_BLOCKS = "int8 blocks"  # of V:N:M ones in int8
DENSE_INT8 = "dense int8"  # of dense products in int8
DENSE_BF16 = "dense bf16"  # and in bfloat16 where the weights are float32
DENSE_PATHS = ONEDNN, DENSE_INT8, DENSE_BF16  # the paths that multiply all weights
# of another path's time: what is closer than that differs from trial to trial
FASTER = 0.97
NO_MEMORY = "not enough memory is free to try it"
REPEATS = 10  # products that must have the same bits
ALLOWED = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # twice the rounding of one number
# what a path raises that cannot be used here; NotImplementedError is a RuntimeError, and so is
# torch.OutOfMemoryError, which says nothing of the path
ERRORS = RuntimeError, ValueError, AttributeError


@dataclass(frozen=True)
class Times:
    """Milliseconds of the products of one micro-batch, and of packing the weight, once per
    optimizer step. ``wrong``: why this path cannot be used. ``algorithms``: the names of the path
    with the library's algorithm, for output and input gradient, where there is a choice of them.
    ``library``: the GPU and the library of these, empty on a CPU."""

    pack: float = 0.0
    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    wrong: str = ""
    algorithms: Sequence[str] = ()
    library: str = ""

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


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU torch's current one: events and captured graphs go by that one's stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Shape(Protocol):
    """What is timed: its string says all of it, its ``paths`` what is tried."""

    @property
    def paths(self) -> Collection[str]: ...


def is_faster(times: Mapping[str, Times], path: str) -> bool:
    """Whether a path is right and beats the dense products in a layer with these times by path."""
    candidate = times.get(path, Times(wrong="not measured"))
    return not candidate.wrong and candidate.dense < FASTER * times["dense"].dense


def version(sources: Iterable[Traversable]) -> str:
    """A mark of what measures and is measured: times are those of one version."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]


def measured(
    shape: Shape,
    file: str,
    machine: str,
    device: torch.device,
    measure: Callable[[], dict[str, Times]],
) -> dict[str, Times]:
    """The times of a shape by all its paths: from a file of the cache if they are known there for
    this machine, else measured now."""
    if (known := recall(file, machine, str(shape), shape.paths)) is not None:
        return known
    with torch.no_grad(), torch.autocast(device.type, enabled=False), on(device):
        by_path = measure()
    if all(times.wrong != NO_MEMORY for times in by_path.values()):  # there may be more next time
        remember(file, machine, str(shape), by_path)
    return by_path


def agreed(
    shape: Shape,
    known: Mapping[str, Mapping[str, Times]] | None,
    measure: Callable[[], Mapping[str, Times]],
    library: str = "",
) -> Mapping[str, Times]:
    """The times that all processes choose by: those that are ``known`` by shape from an earlier
    process, else those that the leader measures. Not known are those of another processor with
    paths that this one lacks, and those of another GPU or ``library``, whose algorithms differ."""
    times = (known or {}).get(str(shape), {})
    ours = all(each.library in ("", library) for each in times.values())
    if times and ours and times.keys() <= set(shape.paths):
        return times
    return ranks.from_leader(measure() if ranks.leads() else {})


def _records(file: str) -> dict[str, Any]:
    """What a file of the cache has; nothing of one that is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((cache_folder() / file).read_text()))
    return {}


def recall(file: str, machine: str, shape: str, paths: Collection[str]) -> dict[str, Times] | None:
    """The times of ``paths`` for a shape on this machine, if a file of the cache has just those."""
    # a file of another version
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        record = _records(file)[machine][shape]
        if set(paths) == set(record):
            return from_data({shape: record})[shape]
    return None


def remember(file: str, machine: str, shape: str, by_path: Mapping[str, Times]) -> None:
    """Keep times for :func:`recall`."""
    records = _records(file)
    records.setdefault(machine, {}).update(as_data({shape: by_path}))
    with contextlib.suppress(OSError):  # next time it is measured again
        atomic.write(cache_folder() / file, json.dumps(records, indent=1), shared=True)


def as_data(times: Mapping[str, Mapping[str, Times]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Times by shape and path as plain data."""
    return {
        shape: {path: asdict(entry) for path, entry in paths.items()}
        for shape, paths in times.items()
    }


def from_data(data: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Times]]:
    """The inverse of :func:`as_data`."""
    return {
        shape: {path: Times(**entry) for path, entry in paths.items()}
        for shape, paths in data.items()
    }


@dataclass(frozen=True)
class Choice:
    """How one layer is computed from now on, and why.

    Attributes:
        name: of the weight, or of the module of an attention or GELU.
        path: what computes it, such as ``packed``; None for torch's dense layer.
        reason: why, for a reader; with the times in milliseconds where it was measured.
        shape: the size that was measured, with :func:`nmrun.accelerate`; ``str(shape)`` names it.
        times: what each path took, likewise.
        always_dense: it has no sparse weight.
    """

    name: str
    path: str | None
    reason: str
    shape: object | None = None
    times: Mapping[str, Times] = field(default_factory=dict)
    always_dense: bool = False

    def __repr__(self) -> str:
        kind = f"always dense, {self.path}" if self.always_dense and self.path else self.path
        return f"Choice({self.name}: {kind or 'dense'}; {self.reason})"

    @property
    def is_sparse(self) -> bool:
        """Whether the layer is computed with its kept weights alone."""
        return not self.always_dense and self.path not in (None, *DENSE_PATHS)


def fault(call: Callable[[], Tensor], expected: Tensor, roundings: int = 1) -> str:
    """What is wrong with a product, empty if nothing is: against float32's, within the rounding of
    its dtype, the same bits every time. Running out of memory is no fault: it raises.

    Args:
        roundings: how often numbers on the way to an output are rounded to its dtype.
    """
    try:
        first = call()
        if first.shape != expected.shape or not _near(first, expected, roundings):
            return "WRONG results"
        return (
            ""
            if all(torch.equal(first, call()) for _ in range(REPEATS))
            else "results CHANGE from call to call"
        )
    except torch.OutOfMemoryError:
        raise
    except ERRORS as error:
        return first_line(error)


def nearness(actual: Tensor, exact: Tensor, tolerance: float) -> tuple[bool, str]:
    """Whether outputs are within a share of the norm of the exact ones, and how far off they are."""
    if not exact.any():
        return False, "its outputs for the sample are all 0, and show no error"
    off = float((actual - exact).norm() / exact.norm())
    near = off <= tolerance  # NaN is not
    return near, f"outputs {off:.2g} off" + ("" if near else f", more than {tolerance:g}")


def _near(actual: Tensor, expected: Tensor, roundings: int) -> bool:
    spread = float(expected.std(correction=0))  # of a single number 0
    bound = roundings * ALLOWED.get(actual.dtype, 1e-4)
    return torch.allclose(actual.float(), expected, rtol=bound, atol=bound * spread)


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first of what a module was called with, by place or by name."""
    return next(iter((*args, *kwargs.values())))


def watched(hooks: Sequence[RemovableHandle], sample: Callable[[], object]) -> None:
    """Compute a forward pass of ``sample`` (of :func:`nmrun.accelerate`) that leaves no trace, and remove
    the hooks that looked at it."""
    try:
        with torch.no_grad(), torch.random.fork_rng(), uncompiled():
            sample()
    finally:
        for hook in hooks:
            hook.remove()


NOTES = {  # what is said where some layer has a path
    ONEDNN: "oneDNN's dense products where they are faster than torch's default",
    FLOAT32: "attention in float32 where that is faster than in bfloat16",
    PACKED_ACTIVATIONS: "products with packed activations in the steps that prune them",
}


def lines(choices: Sequence[Choice]) -> list[str]:
    """What was decided, for the reader: a table of the layers that were measured, or one line why
    none was.
    """
    sparse = [choice for choice in choices if not choice.always_dense]
    accelerated = sum(choice.is_sparse for choice in choices)
    rows, report = choices, list[str]()
    if accelerated:
        report.append(f"N:M products in {accelerated} of {len(sparse)} sparse layers")
    elif any(choice.shape for choice in sparse):
        report.append("masks only: no N:M product is faster than dense")
    elif sparse:
        first, *others = dict.fromkeys(choice.reason for choice in sparse)
        more = f" (and {len(others)} more reasons)" if others else ""
        report.append(f"masks only, nothing is accelerated: {first}{more}")
        rows = [choice for choice in choices if choice.always_dense]
    taken = {choice.path for choice in choices}
    report += [note for path, note in NOTES.items() if path in taken]
    groups: dict[tuple[str | None, object, str], list[str]] = {}
    for choice in rows:
        groups.setdefault((choice.path, choice.shape, choice.reason), []).append(choice.name)
    for (path, shape, reason), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        report.append(
            f"  {path or 'dense'}: {names[0]}{more}"
            + (f", {shape}" if shape else "")
            + f": {reason}"
        )
    return report
