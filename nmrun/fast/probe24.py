"""Which 2:4 path is right and fast for a layer on this GPU: tested and timed once a shape, and
remembered on disk.

A path is tested before it is timed: its products must be those of float32 within the rounding of
the dtype, and the same bits in every repetition. What is remembered is by GPU, torch, cuSPARSELt
and the version of this file, in ``probe24.json`` beside the compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast import backends24, linear24
from nmrun.fast.by_cusparselt import ROUND_UP, padded
from nmrun.fast.times import Times, recall, remember, version
from nmrun.products import simulated

FILE = "probe24.json"
NO_MEMORY = "not enough memory is free to try it"


@dataclass(frozen=True)
class Shape:
    """A linear layer in training: rows = outputs, columns = inputs, tokens of one micro-batch.
    ``both``: the input gradient is sparse too; ``mvue``: so may the weight gradient be; ``fp8``:
    operands of this dtype are rounded to FP8."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    both: bool = False
    mvue: bool = False
    fp8: bool = False

    def __str__(self) -> str:
        kinds = "".join(f" {name}" for name in ("both", "mvue", "fp8") if getattr(self, name))
        return f"{self.columns} to {self.rows}, {self.tokens} tokens, {str(self.dtype).removeprefix('torch.')}{kinds}"


def probe(shape: Shape, device: torch.device) -> dict[str, Times]:
    """The times of the layer as ``"dense"`` and by every path that may compute it; from the disk if
    they are known there.
    """
    machine = _machine(device)
    paths = {"dense", *backends24.candidates(shape.fp8)}
    if (known := recall(FILE, machine, str(shape), paths)) is not None:
        return known
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        found = measure(shape, device)
    if all(times.wrong != NO_MEMORY for times in found.values()):  # there may be more next time
        remember(FILE, machine, str(shape), found)
    return found


def measure(shape: Shape, device: torch.device) -> dict[str, Times]:
    """The same, always measured."""
    generator = torch.Generator().manual_seed(1)
    weight = backends24.transposable(shape.rows, shape.columns, device).to(shape.dtype)
    sizes = ((shape.tokens, shape.columns), (shape.tokens, shape.rows), (shape.rows,))
    x, dz, bias = (
        torch.randn(*size, generator=generator).to(device, shape.dtype) for size in sizes
    )
    kept = torch.tensor([True, True, False, False], device=device).repeat(shape.tokens // 4 + 1)[
        : shape.tokens, None
    ]
    estimate = torch.where(kept, dz, 0.0)  # 2:4 along the tokens
    time = backends24.milliseconds
    last = estimate if shape.mvue else dz
    dense = Times(
        forward=time(lambda: _forward(x, weight, bias, shape)),
        input_gradient=time(lambda: simulated.backward_product(dz, weight, shape.fp8)),
        weight_gradient=time(lambda: simulated.backward_product(last.t(), x, shape.fp8)),
    )
    found = {"dense": dense}
    for name, path in backends24.candidates(shape.fp8).items():
        try:
            found[name] = _times(path, name, shape, dense, weight, x, dz, bias, estimate)
        except torch.OutOfMemoryError:
            found[name] = Times(wrong=NO_MEMORY)
        except backends24.ERRORS as error:
            found[name] = Times(wrong=backends24.first_line(error))
    return found


def _times(
    path: backends24.Path, name: str, shape: Shape, dense: Times,
    weight: Tensor, x: Tensor, dz: Tensor, bias: Tensor, estimate: Tensor,
) -> Times:  # fmt: skip
    other = weight if shape.both else None
    parts, parts_t = path.pack(weight, other)
    expected = _forward(x.float(), weight.float(), bias.float(), shape)
    named, forward = backends24.fastest(name, x, parts, bias, expected)
    algorithms, input_gradient, weight_gradient = (
        [named] * 3,
        dense.input_gradient,
        dense.weight_gradient,
    )
    if shape.both:
        expected = simulated.backward_product(dz.float(), weight.float(), shape.fp8)
        algorithms[1], input_gradient = backends24.fastest(name, dz, parts_t, None, expected)
    if shape.mvue:
        try:
            algorithms[2], weight_gradient = _once(name, x, estimate)
        except torch.OutOfMemoryError:
            raise
        except backends24.ERRORS:
            weight_gradient = float("inf")  # then it stays dense
    whole = weight.float()
    packed = linear24.Packed(name, whole, None, shape.dtype, shape.both)
    return Times(
        backends24.milliseconds(lambda: packed.write(whole, None)),
        forward,
        input_gradient,
        weight_gradient,
        algorithms=algorithms if algorithms != [name] * 3 else (),
    )


def _once(name: str, x: Tensor, estimate: Tensor) -> tuple[str, float]:
    """The product ``x^T estimate`` by the fastest right algorithm, with packing."""
    inputs, expected = x.t(), x.t().float() @ estimate.float()
    filled, sparse = (padded(t, 2 * ROUND_UP, 1) for t in (inputs, estimate.t()))
    parts, _ = backends24.named(name).pack(sparse, None)
    named, _ = backends24.fastest(name, filled, parts, None, expected)
    return named, backends24.milliseconds(lambda: linear24.once(inputs, estimate.t(), named))


def _forward(x: Tensor, weight: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    return (
        simulated.linear(x, weight, bias, fp8=True)
        if shape.fp8
        else functional.linear(x, weight, bias)
    )


def _machine(device: torch.device) -> str:
    from nmrun.fast.kernels.cusparselt_library import loaded_cusparselt

    library = loaded_cusparselt()
    number = ".".join(map(str, library[0])) if library else "none"
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuSPARSELt {number}, "
        f"probe {version([Path(__file__), Path(backends24.__file__)])}"
    )
