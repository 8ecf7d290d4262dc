"""What the layers for inference on the CPU share whose weight is packed: its tensors are buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn


def check_on_cpu(x: Tensor, values: Tensor) -> None:
    """Raise RuntimeError for an input or weights that are elsewhere."""
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
    """

    MATRIX: ClassVar[Any]
    values: Tensor
    index: Tensor
    start: Tensor
    bias: Tensor | None

    def __init__(self, matrix: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.hold(matrix)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def hold(self, matrix: Any) -> None:
        """Take over the tensors of a matrix."""
        for name in self.MATRIX.STORED:
            self.register_buffer(name, getattr(matrix, name))
        for name in self.MATRIX.DERIVED:
            value = getattr(matrix, name)
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)

    def matrix(self, stored: Sequence[Tensor]) -> Any:
        """The matrix of this layer's shape that has these tensors. Raises ValueError where there is none."""
        raise NotImplementedError

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        stored = [state.get(prefix + name) for name in self.MATRIX.STORED]
        if all(isinstance(tensor, Tensor) for tensor in stored):
            try:  # another weight of this shape may have another number of non-zeros
                self.hold(self.matrix([tensor.clone() for tensor in stored]))  # type: ignore[union-attr]
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
