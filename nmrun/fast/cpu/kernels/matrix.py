"""What the layouts of packed weights share: a sparse matrix as the tensors that a kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

MATRICES: dict[str, type[Matrix]] = {}  # by their names, which operators take


class Matrix:
    """A sparse matrix (rows, columns), or one for each position of a convolution's kernel (tap).

    ``STORED`` are the tensors of a state dict, ``DERIVED`` those that follow from them; the ``parts`` are
    both, by their ``NAMES``.
    ``KEPT`` are those whose dtype no cast of a model changes. ``COMPUTES`` is what inputs are cast to,
    None for products in their own dtype.
    """

    STORED: ClassVar[tuple[str, ...]] = ("values", "index", "counts")
    DERIVED: ClassVar[tuple[str, ...]] = ("start",)
    NAMES: ClassVar[tuple[str, ...]]
    KEPT: ClassVar[tuple[str, ...]] = ()
    COMPUTES: ClassVar[torch.dtype | None] = None
    values: Tensor
    index: Tensor
    counts: Tensor
    start: Tensor

    def __init__(self, parts: Sequence[Tensor], rows: int, columns: int, taps: int = 1) -> None:
        self.parts, self.rows, self.columns, self.taps = [*parts], rows, columns, taps
        for name, part in zip(self.NAMES, parts, strict=True):
            setattr(self, name, part)

    def __init_subclass__(cls) -> None:
        MATRICES[cls.__name__] = cls
        cls.NAMES = *cls.STORED, *cls.DERIVED  # once: each product makes a matrix

    @classmethod
    def of(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int = 1) -> Self:
        """The matrix that has these tensors. Raises ValueError for tensors that hold no matrix of this
        shape, so that nothing outside of them is read."""
        stored = [tensor.contiguous() for tensor in stored]
        return cls([*stored, *cls.derived(stored, rows, columns, taps)], rows, columns, taps)

    @classmethod
    def derived(cls, stored: Sequence[Tensor], rows: int, columns: int, taps: int) -> list[Tensor]:
        """What follows from the tensors of :meth:`of`."""
        raise NotImplementedError

    @classmethod
    def packed(cls, weight: Tensor, taps: int = 1) -> Self:
        """A weight (rows, taps * columns) with zeros. Raises ValueError for one that cannot be packed so."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int]:
        """What a matrix is made of beside its parts."""
        return self.rows, self.columns, self.taps

    def named(self) -> dict[str, Tensor]:
        """The parts by their names."""
        return dict(zip(self.NAMES, self.parts, strict=True))

    @property
    def addresses(self) -> list[int]:
        """Where the parts lie, for a kernel."""
        return [part.data_ptr() for part in self.parts]

    def dense(self) -> Tensor:
        """The matrix with its zeros, (rows, taps * columns)."""
        raise NotImplementedError

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x S^T + bias``, with x (tokens, columns) in the dtype that is computed in: (tokens, rows) in
        this dtype. Raises RuntimeError where there are no such products."""
        raise NotImplementedError
