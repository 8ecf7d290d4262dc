"""Packed weights: of every group of M weights the N that may be non-zero, and their positions. They
load on any machine, bit for bit.

The format is one .safetensors file. The groups of a weight ``w`` are those of its dimension
``dim``, which is moved to the end and filled up with zeros to a multiple of M. The file has

- ``w.values``: (groups, N) in the weight's dtype, in ascending position;
- ``w.places``: bytes that are filled from the lowest bit on. A group has N positions of
  ceil(log2 M) bits, or a mask of M bits where that is less (3:4, 4:8);
- ``w.scales``: (rows,) in float32, of a weight of int8 alone. Each row of values is to be
  multiplied by its scale.

All other tensors stay as they are. The metadata has ``packed``, JSON with the layers and the SHA-256
of every tensor, and ``sha256``, that of this JSON. A file with weights of int8 has version 2, others
have version 1. The JSON says of a layer of int8 which product was the faster where it was written:
``int8``, of the kept weights alone, or ``dense int8``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from nmrun.patterns import Pattern

FILE = "model.packed.safetensors"
PARTS = ("values", "places", "scales")
VERSION, VERSION_INT8 = 1, 2
INT8 = torch.int8
LAYERS = ("int8", "dense int8")
# A small file with huge groups would fill the memory: so large may its dense weights be, in all or by
# its size. The sparsest patterns in use, 1:128, are below.
MOST_BYTES, MOST_TIMES = 2**30, 128
LONGEST = 1024  # of a group that has fewer weights than its size


def load(path: Path | str) -> dict[str, Tensor]:
    """Load a packed file, or the folder that holds one, as a state dict of dense tensors; int8
    weights become float32. It works on any machine, without a compiler.

    Raises:
        ValueError: in one line, if the file is cut off, changed, of a newer version, no packed
            file, or of weights that are far larger than the file.
    """
    tensors, layers = read(path)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    dense = sum(math.prod(line.shape) * torch.float32.itemsize for line in layers)
    if dense > max(MOST_BYTES, MOST_TIMES * stored):
        raise ValueError(
            f"{path} cannot be unpacked: its {stored} bytes would become {dense}, more than "
            f"{MOST_TIMES} times as many; nmrun.load_packed fits it to a model"
        )
    for line in layers:
        weight = line.dense(tensors)
        line.drop(tensors)
        tensors[line.name] = weight
    return dict(sorted(tensors.items()))


@dataclass(frozen=True)
class Line:
    """A packed weight, as the header has it."""

    name: str
    pattern: Pattern
    dim: int
    shape: list[int]
    layer: str | None = None  # one of LAYERS for an int8 weight; files of old have none

    def parts(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Its values and places among the file's tensors."""
        return tensors[f"{self.name}.values"], tensors[f"{self.name}.places"]

    def scales(self, tensors: dict[str, Tensor]) -> Tensor | None:
        """What the rows of an int8 weight are multiplied with; None for any other."""
        return tensors.get(f"{self.name}.scales")

    def unpacked(self, tensors: dict[str, Tensor]) -> Tensor:
        """Its weight with the zeros as it is stored, from the file's tensors."""
        return unpack(*self.parts(tensors), self.pattern, self.dim, self.shape)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same, float32 of an int8 one."""
        weight = self.unpacked(tensors)
        scales = self.scales(tensors)
        return weight if scales is None else scaled(weight, scales, self.dim)

    def drop(self, tensors: dict[str, Any]) -> None:
        """Take its parts out of what the file has by name."""
        for part in PARTS:
            tensors.pop(f"{self.name}.{part}", None)


def read(path: Path | str) -> tuple[dict[str, Tensor], list[Line]]:
    """Read a packed file as it is stored, proven whole: its tensors, and the packed weights among them.
    Raises ValueError as :func:`load`."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    text = metadata.get("packed", "")
    if not text:
        raise ValueError(f"{path} is no packed file of nmrun: its metadata has no header")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise ValueError(f"{path} was changed: the SHA-256 of its header is another")
    try:
        header = json.loads(text)
        if header["version"] not in (VERSION, VERSION_INT8):
            raise ValueError(f"version {header['version']}; this is {VERSION_INT8}")
        if header["sha256"].keys() != tensors.keys():
            raise ValueError(
                f"its tensors are not those of its header: {min(header['sha256'].keys() ^ tensors.keys())}"
            )
        for name, tensor in tensors.items():
            if sha256_of(tensor) != header["sha256"][name]:
                raise ValueError(f"it was changed: the SHA-256 of {name} is another")
        lines = [_line(line) for line in header["layers"]]
        for name, count in Counter([*(line.name for line in lines), *tensors]).items():
            if count > 1:
                raise ValueError(f"it has {name} twice")
        for line in lines:
            values, places = line.parts(tensors)
            if values.shape != _stored(line):
                raise ValueError(f"{line.name}.values is {list(values.shape)}")
            scales, rows = line.scales(tensors), _rows(line)
            if (scales is not None) != (values.dtype == INT8) or (
                scales is not None and (scales.shape != (rows,) or scales.dtype != torch.float32)
            ):
                raise ValueError(f"{line.name}: {values.dtype} values with other scales")
            if line.layer and scales is None:
                raise ValueError(f"{line.name} is {values.dtype}, no layer of {line.layer}")
            positions(places, len(values), line.pattern)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise ValueError(f"{path} cannot be unpacked: {' '.join(str(error).split())}") from None
    return tensors, lines


def _line(plain: dict[str, Any]) -> Line:
    """A line of the header, which anybody may have written."""
    name, dim, shape = plain["name"], plain["dim"], plain["shape"]
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not sizes or type(dim) is not int or not 0 <= dim < len(shape):
        raise ValueError(f"{name} has groups along {dim} of {shape}")
    if (layer := plain.get("layer")) not in (None, *LAYERS):
        raise ValueError(f"{name} is a layer of {layer!r}, none of {', '.join(LAYERS)}")
    pattern = Pattern.parse(plain["pattern"])
    if pattern.m > max(shape[dim], LONGEST):
        raise ValueError(f"{name} has groups of {pattern.m} along {shape[dim]} weights")
    return Line(str(name), pattern, dim, shape, layer)


def _rows(line: Line) -> int:
    return math.prod(line.shape) // line.shape[line.dim]


def scaled(weight: Tensor, scales: Tensor, dim: int) -> Tensor:
    """An int8 weight, whose groups run along ``dim``, times the scales of its rows: float32."""
    last = weight.movedim(dim, -1)
    return (last * scales.view(*last.shape[:-1], 1)).movedim(-1, dim).contiguous()


def _stored(line: Line) -> tuple[int, int]:
    return _rows(line) * -(-line.shape[line.dim] // line.pattern.m), line.pattern.n


def pack(weight: Tensor, pattern: Pattern, dim: int) -> tuple[Tensor, Tensor]:
    """Pack an N:M weight on the CPU that holds the pattern along ``dim``: its values and places. Of a group
    with fewer than N non-zeros, zeros fill up the values."""
    last = weight.movedim(dim, -1)
    groups = functional.pad(last, (0, -last.shape[-1] % pattern.m)).reshape(-1, pattern.m)
    # the non-zeros, then zeros
    first = (groups == 0).to(torch.uint8).argsort(dim=1, stable=True)[:, : pattern.n]
    positions = first.sort(dim=1).values
    values = groups.gather(1, positions)
    if _by_mask(pattern):
        mask = torch.zeros(groups.shape, dtype=torch.uint8, device="cpu").scatter_(1, positions, 1)
        bits = mask.numpy()
    else:
        bits = (positions.numpy()[:, :, None] >> np.arange(_width(pattern)) & 1).astype(np.uint8)
    return values, torch.from_numpy(np.packbits(bits.reshape(-1), bitorder="little"))


def unpack(values: Tensor, places: Tensor, pattern: Pattern, dim: int, shape: list[int]) -> Tensor:
    """The inverse of :func:`pack`. Raises ValueError for positions that it does not write, and for values
    behind the last one of ``dim``."""
    indices = positions(places, len(values), pattern)
    groups = values.new_zeros(len(values), pattern.m).scatter_(1, indices, values)
    moved = [*shape[:dim], *shape[dim + 1 :]]
    whole, last = groups.view(*moved, -1), shape[dim]
    if bool(whole[..., last:].any()):
        raise ValueError(f"a value behind the last of {last}")
    return whole[..., :last].movedim(-1, dim).contiguous()


def positions(places: Tensor, count: int, pattern: Pattern) -> Tensor:
    """Where the values of each of ``count`` groups stand in it, (count, N), increasing in a group. Raises
    ValueError for positions that no :func:`pack` writes."""
    width = pattern.m if _by_mask(pattern) else pattern.n * _width(pattern)
    if places.shape != (-(-count * width // 8),):
        raise ValueError(f"places of {list(places.shape)} for {count} groups of {pattern}")
    bits = np.unpackbits(places.numpy(), count=count * width, bitorder="little")
    if _by_mask(pattern):
        mask = torch.from_numpy(bits.reshape(count, pattern.m))
        if bool((mask.sum(1) != pattern.n).any()):
            raise ValueError(f"a group does not hold {pattern.n} values")
        return mask.nonzero()[:, 1].view(count, pattern.n)
    weights = torch.from_numpy(1 << np.arange(_width(pattern)))
    indices = (torch.from_numpy(bits).view(count, pattern.n, _width(pattern)) * weights).sum(-1)
    if count and int(indices.max()) >= pattern.m:
        raise ValueError(f"a position of {int(indices.max())} in groups of {pattern.m}")
    if bool((indices.diff(dim=1) <= 0).any()):
        raise ValueError("positions of a group that do not increase")
    return indices


def _width(pattern: Pattern) -> int:
    return (pattern.m - 1).bit_length()


def _by_mask(pattern: Pattern) -> bool:
    return pattern.m < pattern.n * _width(pattern)


def sha256_of(tensor: Tensor) -> str:
    about = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(
        about + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
