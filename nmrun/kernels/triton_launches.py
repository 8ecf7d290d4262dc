"""Launches of Triton's kernels: the constants for a weight, and tables of the weights that share a
launch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmrun.kernels.layout import LARGEST, as_stored, stored_alike
from nmrun.kernels.triton_groups import LARGEST_M
from nmrun.patterns import Pattern

Sizes = tuple[int, int, int]
TILE = 2048  # weights a program has at least, if there are so many: 16 a thread
MOST_BATCHES = 64  # batches of other kinds that are kept: structure decay changes patterns
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def shape_of(
    weight: Tensor, pattern: Pattern, dim: int, tile: int = TILE
) -> tuple[Sizes, dict[str, Any]]:
    """((columns, elements between neighbours of a group, size of the dimension), the kernel's
    constants) for one weight."""
    dim, (weight,) = as_stored(dim, weight)
    inner, size = weight.shape[dim + 1 :].numel(), weight.shape[dim]
    columns = weight.shape[:dim].numel() * -(-size // pattern.m) * inner
    width = triton.next_power_of_2(pattern.m)
    across = max(128 if inner > 1 else 1, tile // width)
    constants = {
        "N": pattern.n, "M": pattern.m, "P": width, "STRIDED": inner > 1, "SHORT": size % pattern.m > 0,
        "COLUMNS": across, "WIDE": inner % 16 == 0 and inner >= across,
    }  # fmt: skip
    return (columns, inner, size), constants


def programs_of(sizes: Sizes, constants: dict[str, Any]) -> int:
    """How many programs one weight takes, by :func:`shape_of`."""
    (columns, inner, _), across = sizes, constants["COLUMNS"]
    return (
        columns // inner * triton.cdiv(inner, across)
        if constants["WIDE"]
        else triton.cdiv(columns, across)
    )


def applies(weight: Tensor, out: Tensor, pattern: Pattern, dim: int) -> bool:
    """Whether these kernels can read ``weight`` and write ``out``."""
    size = weight.shape[dim] if weight.dim() else 0
    return (
        readable(weight, out)
        and pattern.v == 1
        and pattern.m <= LARGEST_M
        and (size % pattern.m == 0 or size == pattern.length)
        and stored_alike(weight, out)
    )


def readable(weight: Tensor, out: Tensor) -> bool:
    """Whether device, size and dtypes are such that any of Triton's kernels takes them."""
    return (
        (weight.is_cuda or triton.knobs.runtime.interpret)
        and 0 < weight.numel() < LARGEST
        and out.device == weight.device
        and out.shape == weight.shape
        and weight.dtype in DTYPES
        and out.dtype in DTYPES
    )


class LaunchTable:
    """Sizes and addresses of weights that share a launch, on their device; written anew only when a
    tensor has moved.

    A row has the number of columns, the elements between neighbours of a group, the size of the
    dimension, the first program. The addresses of the kernel's tensors follow.
    """

    def __init__(
        self, sizes: Sequence[Sizes], programs: Sequence[int], device: torch.device
    ) -> None:
        self.programs = sum(programs)
        first = [sum(programs[:i]) for i in range(len(programs))]
        self.sizes = [[*size, program] for size, program in zip(sizes, first, strict=True)]
        counts = torch.tensor(programs)
        self.owner = (
            torch.arange(len(programs), dtype=torch.int32).repeat_interleave(counts).to(device)
        )
        self._addresses: list[list[int]] = []
        self._rows = torch.empty(0, dtype=torch.int64, device=device)

    def rows(self, tensors: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """The table (weights, fields) for these tensors of each weight. Raises ValueError for one
        that does not begin at 16 bytes."""
        addresses = [[0 if t is None else t.data_ptr() for t in row] for row in tensors]
        if addresses != self._addresses:
            if any(address % 16 for row in addresses for address in row):
                raise ValueError("a tensor of a table must begin at a multiple of 16 bytes")
            rows = [size + row for size, row in zip(self.sizes, addresses, strict=True)]
            if not self._rows.numel():
                self._rows = torch.empty(
                    len(rows), len(rows[0]), dtype=torch.int64, device=self.owner.device
                )
            # in place: a captured graph reads this tensor
            self._rows.copy_(torch.tensor(rows), non_blocking=True)
            self._addresses = addresses
        return self._rows


class Launch(NamedTuple):
    """Weights, by their indices, that one launch can take."""

    members: list[int]
    table: LaunchTable
    constants: dict[str, Any]


class Launches:
    """The fewest launches for batches of weights: one for each device and set of constants. They depend
    on the kinds of the tensors alone, so they hold none, and are made once.

    Args:
        tile: weights that a program has at least.
    """

    def __init__(self, tile: int = TILE) -> None:
        self._tile = tile
        self._made: dict[tuple[Any, ...], list[Launch]] = {}

    def of(self, batch: Sequence[tuple[Tensor, Tensor, Pattern, int]]) -> list[Launch]:
        """Those of a batch: each weight with where its projection goes, its pattern and dimension.
        Raises ValueError where the kernels do not apply to a weight."""
        key = tuple((*_kind(weight), *_kind(out), *how) for weight, out, *how in batch)
        if key not in self._made:
            if len(self._made) >= MOST_BATCHES:
                self._made.clear()
            self._made[key] = self._make(batch)
        return self._made[key]

    def _make(self, batch: Sequence[tuple[Tensor, Tensor, Pattern, int]]) -> list[Launch]:
        alike: dict[tuple[Any, ...], list[tuple[int, Sizes, int]]] = {}
        constants_of: dict[tuple[Any, ...], dict[str, Any]] = {}
        for i, (weight, out, pattern, dim) in enumerate(batch):
            dim %= max(1, weight.dim())
            if not applies(weight, out, pattern, dim):
                raise ValueError(
                    f"weight {i} of the batch, {list(weight.shape)} {weight.dtype}, is none for the kernels"
                )
            sizes, constants = shape_of(weight, pattern, dim, self._tile)
            constants |= {"WEIGHT": DTYPES[weight.dtype], "OUT": DTYPES[out.dtype]}
            key = weight.device, *constants.values()
            constants_of[key] = constants
            alike.setdefault(key, []).append((i, sizes, programs_of(sizes, constants)))
        result = []
        for key, those in alike.items():
            members, sizes_of, programs = zip(*those, strict=True)
            table = LaunchTable(sizes_of, programs, key[0])
            result.append(Launch(list(members), table, constants_of[key]))
        return result


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
