"""Linear layers for inference on the CPU whose N:M weight is packed: in float32 or bfloat16, with
products in bfloat16, or in int8. They stand in the place of ``nn.Linear`` and Hugging Face's
``Conv1D``. :class:`PackedLayer` is what they share with convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from nmrun.fast.cpu.kernels.bf16 import Bf16Matrix
from nmrun.fast.cpu.kernels.blocks import BitmapMatrix, BlockMatrix, Int8BlockMatrix
from nmrun.fast.cpu.kernels.int8 import Int8Matrix
from nmrun.fast.cpu.kernels.matrix import MATRICES, Matrix
from nmrun.fast.cpu.kernels.products import DTYPES
from nmrun.fast.cpu.kernels.tiles import TiledMatrix
from nmrun.fast.operators import inference, keep_dtypes, operator, over_tokens


def check_input(x: Tensor, values: Tensor) -> None:
    """Raise RuntimeError for an input or weights that are not on the CPU, and for an input of integers,
    whose dtype the result would have."""
    if not x.is_floating_point():
        raise RuntimeError(f"x of {x.dtype}: packed layers take floating-point numbers")
    if not (x.is_cpu and values.is_cpu):
        raise RuntimeError(
            f"these weights are packed for the CPU; x is on {x.device}, they on {values.device}"
        )


def check_operands(x: Tensor, values: Tensor, columns: int) -> None:
    """Raise RuntimeError for an input of another width, and as :func:`check_input`."""
    check_input(x, values)
    if x.shape[-1] != columns:
        raise RuntimeError(f"x has {x.shape[-1]} features where the layer has {columns}")


def as_computed(x: Tensor, matrix: Matrix, dtypes: Sequence[torch.dtype]) -> Tensor:
    """An input in the dtype of the product: that of the matrix, or its own, one of ``dtypes``; RuntimeError
    for another one."""
    if matrix.COMPUTES is not None:
        return x.to(matrix.COMPUTES)
    for tensor, name in ((x, "x"), (matrix.values, "weights")):
        if tensor.dtype not in dtypes:
            allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RuntimeError(f"{name} of {tensor.dtype}: this layer takes {allowed}")
    return x


class PackedLayer(nn.Module):
    """A layer whose state dict has what the matrix of its weight stores, and ``bias`` where there is
    one. Nothing in it is trained, but gradients pass through to the input.

    Args:
        matrix: a :attr:`MATRIX`.
        bias: (outputs,), or None.
    """

    MATRIX: ClassVar[type[Matrix]]
    values: Tensor
    bias: Tensor | None

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        super().__init__()
        self.shape = matrix.shape
        self.hold(matrix)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def hold(self, matrix: Matrix) -> None:
        """Take over the tensors of a matrix."""
        for name, part in matrix.named().items():
            self.register_buffer(name, part, persistent=name in self.MATRIX.STORED)

    def parts(self) -> list[Tensor]:
        """The tensors of the matrix."""
        buffers: Any = self._buffers
        return [buffers[name] for name in self.MATRIX.NAMES]

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        return self.MATRIX(self.parts(), *self.shape).dense()

    def _apply(self, *args: Any, **kwargs: Any) -> PackedLayer:
        keep_dtypes(self, self.MATRIX.KEPT, partial(super()._apply, *args, **kwargs))
        return self

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        own = {name: getattr(self, name) for name in self.MATRIX.STORED}
        if all(isinstance(state.get(prefix + name), Tensor) for name in own):
            given = [state[prefix + name].clone() for name in own]
            pairs = zip(given, own.values(), strict=True)
            stored = [t.to(mine) if mine.is_floating_point() else t for t, mine in pairs]
            try:  # another weight of this shape may have another number of non-zeros
                self.hold(self.MATRIX.of(stored, *self.shape))
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


class PackedLinear(PackedLayer):
    """``x W^T + bias`` with an N:M weight, float32 or bfloat16, on the CPU.

    The state dict has ``values`` (slots, 16), ``index`` (slots, 16) and ``counts`` (blocks, tiles, 8),
    see :class:`nmrun.fast.cpu.kernels.tiles.TiledMatrix`.

    Args:
        matrix: W, (out_features, in_features), a :attr:`MATRIX`.
        bias: (out_features,), or None.
    """

    MATRIX: ClassVar[type[Matrix]] = TiledMatrix

    def __init__(self, matrix: Matrix, bias: Tensor | None = None) -> None:
        super().__init__(matrix, bias)
        self.in_features, self.out_features = matrix.columns, matrix.rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """The layer of a weight (out_features, in_features) with zeros, rounded where the layer's numbers
        are coarser.

        Raises:
            ValueError: for a weight that cannot be packed so, such as one with NaN in int8.
        """
        return cls(cls.MATRIX.packed(weight.detach()), bias)

    def forward(self, input: Tensor) -> Tensor:
        """From (..., in_features) to (..., out_features), in the dtype of the input, summed in float32.

        Raises:
            RuntimeError: of int8, for NaN and infinity in the input.
        """
        operands = self.parts(), self.bias, self.shape, self.MATRIX.__name__
        return over_tokens(input, packed_linear, _product, *operands)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bf16Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of bfloat16, on processors that multiply such numbers
    (:mod:`nmrun.fast.cpu.kernels.bf16`). Other inputs are rounded to them.

    The state dict has ``values`` (slots, 32), ``index`` (slots, 32) and ``counts`` (blocks, tiles, 16).
    """

    MATRIX = Bf16Matrix


class BlockLinear(PackedLinear):
    """The same with a V:N:M weight, by AMX where it is (:mod:`nmrun.fast.cpu.kernels.blocks`).

    The state dict has ``values`` (groups, V / 16, depth, 16, 32) and ``index`` (groups, 32 * depth).
    """

    MATRIX = BlockMatrix


class BitmapLinear(PackedLinear):
    """The same with any N:M weight for few tokens, by AMX.

    The state dict has ``values`` (non-zeros,) and ``masks`` (tiles, depth, 16).
    """

    MATRIX = BitmapMatrix


class Int8Linear(PackedLinear):
    """``x W^T + bias`` with an N:M weight of int8, on processors that multiply such numbers. It quantises
    its tokens itself (:mod:`nmrun.fast.cpu.kernels.int8` says how).

    The state dict has ``values`` (slots, 64), ``index`` (slots, 64), ``counts`` (tiles, segments) and
    ``scales`` (out_features,).
    """

    MATRIX = Int8Matrix


class Int8BlockLinear(PackedLinear):
    """The same of a V:N:M weight, by AMX where it is, with the same bits
    (:mod:`nmrun.fast.cpu.kernels.blocks`).

    The state dict has ``values`` (groups, V / 16, depth, 16, 64), ``index`` (groups, 64 * depth) and
    ``scales`` (out_features,).
    """

    MATRIX = Int8BlockMatrix


def _product(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, shape: Sequence[int], kind: str
) -> Tensor:
    check_operands(x, parts[0], shape[1])
    matrix, bias = MATRICES[kind](parts, *shape), None if bias is None else bias.float()
    z = matrix.multiply(as_computed(x, matrix, DTYPES), bias)
    return z if z.dtype == x.dtype else z.to(x.dtype)  # a cast to its own dtype takes a microsecond


@operator(
    "unpacked",
    lambda parts, shape, kind: parts[0].new_empty(
        shape[0], shape[1] * shape[2], dtype=torch.float32
    ),
)
def unpacked(parts: list[Tensor], shape: Sequence[int], kind: str) -> Tensor:
    """A packed weight with its zeros, float32."""
    return MATRICES[kind](parts, *shape).dense().float()


packed_linear = inference(
    "packed_linear",
    lambda x, parts, bias, shape, kind: x.new_empty(x.shape[0], shape[0]),
    lambda dz, size, parts, bias, shape, kind: dz @ unpacked(parts, shape, kind).to(dz.dtype),
)(_product)
