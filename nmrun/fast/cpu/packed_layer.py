"""What the layers for inference on the CPU share whose weight is packed: its tensors are buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from nmrun.fast.operators import keep_dtypes


def check_input(x: Tensor, values: Tensor) -> None:
    """Raise RuntimeError for an input or weights that are not on the CPU, and for an input of integers,
    whose dtype the result would have."""
    if not x.is_floating_point():
        raise RuntimeError(f"x of {x.dtype}: packed layers take floating-point numbers")
    if not (x.is_cpu and values.is_cpu):
        raise RuntimeError(
            f"these weights are packed for the CPU; x is on {x.device}, they on {values.device}"
        )


class PackedLayer(nn.Module):
    """A layer whose state dict has what the matrix of its weight stores, and ``bias`` where there is
    one. Nothing in it is trained, but gradients pass through to the input.

    Args:
        matrix: a :attr:`MATRIX`.
        bias: (outputs,), or None.
        shape: what a matrix is made of beside its tensors.
    """

    MATRIX: ClassVar[Any]
    KEPT: ClassVar[Sequence[str]] = ()  # tensors that no cast of the model changes
    values: Tensor
    bias: Tensor | None

    def __init__(self, matrix: Any, bias: Tensor | None, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.hold(matrix)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def hold(self, matrix: Any) -> None:
        """Take over the tensors of a matrix."""
        for name in (*self.MATRIX.STORED, *self.MATRIX.DERIVED):
            stored = name in self.MATRIX.STORED
            self.register_buffer(name, getattr(matrix, name), persistent=stored)

    def parts(self) -> list[Tensor]:
        """The tensors of the matrix."""
        buffers: Any = self._buffers
        return [buffers[name] for name in (*self.MATRIX.STORED, *self.MATRIX.DERIVED)]

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        dense: Tensor = self.MATRIX(*self.parts(), *self.shape).dense()
        return dense

    def _apply(self, *args: Any, **kwargs: Any) -> PackedLayer:
        keep_dtypes(self, self.KEPT, partial(super()._apply, *args, **kwargs))
        return self

    def _matrix(self, stored: Sequence[Tensor]) -> Any:
        """The matrix of this layer's shape that has these tensors. Raises ValueError where there is none."""
        own = [getattr(self, name) for name in self.MATRIX.STORED]
        cast = [t.to(o) if o.is_floating_point() else t for t, o in zip(stored, own, strict=True)]
        return self.MATRIX.of(*cast, *self.shape)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        stored = [state.get(prefix + name) for name in self.MATRIX.STORED]
        if all(isinstance(tensor, Tensor) for tensor in stored):
            try:  # another weight of this shape may have another number of non-zeros
                self.hold(self._matrix([tensor.clone() for tensor in stored]))  # type: ignore[union-attr]
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
