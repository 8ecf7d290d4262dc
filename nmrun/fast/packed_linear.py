"""Layers for inference whose N:M weights are packed: on the CPU in tiles, on CUDA by a 2:4 path.

They stand in the place of ``nn.Linear``, Hugging Face's ``Conv1D`` and ``nn.MultiheadAttention``.
A weight holds its non-zeros and their places alone, in buffers: nothing in here is trained, but
gradients pass through to the input.

The state dict of a :class:`PackedLinear` has ``values`` (slots, 16), ``index`` (slots, 16) and
``counts`` (blocks, tiles, 8), see :class:`nmrun.fast.kernels.cpu_tiles.TiledMatrix`, and ``bias`` where
there is one.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.fast.backends24 import fastest, named
from nmrun.fast.kernels import cpu_products, cpu_tiles
from nmrun.fast.kernels.cpu_tiles import TiledMatrix
from nmrun.fast.linear24 import multiply24
from nmrun.products.simulated import compute_dtype


class PackedLinear(nn.Module):
    """``x W^T + bias`` with an N:M weight, float32 or bfloat16, on the CPU.

    Args:
        matrix: W, (out_features, in_features), a :class:`TiledMatrix`.
        bias: (out_features,), or None.
    """

    values: Tensor
    index: Tensor
    counts: Tensor
    start: Tensor
    bias: Tensor | None
    PARTS: ClassVar[tuple[str, ...]] = ("values", "index", "counts")

    def __init__(self, matrix: Any, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self._hold(matrix)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """The layer of a weight (out_features, in_features) with zeros."""
        row, column = weight.nonzero(as_tuple=True)
        matrix = cpu_tiles.pack(row, column, weight.detach()[row, column], *weight.shape)
        return cls(matrix, bias)

    def _hold(self, matrix: Any) -> None:
        for name in self.PARTS:
            self.register_buffer(name, getattr(matrix, name))
        self.register_buffer("start", matrix.start, persistent=False)
        self.same = matrix.same

    def _matrix(self, *parts: Tensor) -> Any:
        """Raises ValueError: for tensors that hold no matrix of this shape."""
        values, index, counts = parts
        shape = (self.out_features, self.in_features)
        return TiledMatrix.of(values.to(self.values), index, counts, *shape)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        parts = [state.get(prefix + name) for name in self.PARTS]
        if all(isinstance(part, Tensor) for part in parts):
            try:  # another weight of this shape may have another number of slots
                self._hold(self._matrix(*(part.clone() for part in parts)))  # type: ignore[union-attr]
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, summed in float32."""
        parts = (self.values, self.index, self.counts, self.start, self.bias)
        x = x.to(compute_dtype(x))
        flat, shape = x.reshape(-1, x.shape[-1]), (self.out_features, self.in_features)
        # an operator is what a compiler and autograd know; the call alone is faster
        differentiated = x.requires_grad and torch.is_grad_enabled()
        call = packed_linear if torch.compiler.is_compiling() or differentiated else _product
        return call(flat, *parts, *shape, self.same).view(*x.shape[:-1], self.out_features)

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        parts = (self.values, self.index, self.counts, self.start)
        return unpacked(*parts, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Linear24(nn.Module):
    """The same on CUDA, with a weight that fits into 2:4, by a path of ``backends24.PATHS``."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, path: str) -> None:
        super().__init__()
        self.path = path
        self.out_features, self.in_features = weight.shape
        # a mask times a negative weight is -0.0, which compressors may take for a number
        parts, _ = named(path).pack((weight.detach() + 0.0).contiguous(), None)
        self.parts = len(parts)
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def choose(self, x: Tensor, weight: Tensor) -> None:
        """Take the library's fastest right algorithm for inputs of this size.

        Args:
            x: (..., in_features), in the dtype of the products.
            weight: what was packed.

        Raises:
            ValueError: where none is right.
        """
        flat, kind = x.reshape(-1, x.shape[-1]), self.path.partition(":")[0]
        bias = None if self.bias is None else self.bias.float()
        expected = F.linear(flat.float(), weight.float(), bias)
        self.path, _ = fastest(kind, flat, self._parts(), self.bias, expected)

    def _parts(self) -> list[Tensor]:
        return [getattr(self, f"part{i}") for i in range(self.parts)]

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        flat = x.reshape(-1, x.shape[-1])
        z = multiply24(flat, self._parts(), self.out_features, self.path, self.bias)
        return z.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, path={self.path}"


class PackedAttention(nn.Module):
    """``nn.MultiheadAttention`` with layers in the place of its weights.

    Args:
        attention: what is replaced; its keys and values are as wide as its queries.
        query: the layer of the queries, (embed_dim,) outputs.
        key_value: the layer of keys and values, (2 embed_dim,) outputs.
        out: the layer of the result.
    """

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        query: nn.Module,
        key_value: nn.Module,
        out: nn.Module,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first = attention.batch_first
        # torch's encoder layers look at these before they read weights past the layers
        self.in_proj_bias, self._qkv_same_embed_dim = None, False
        self.query, self.key_value, self.out_proj = query, key_value, out

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`torch.nn.MultiheadAttention.forward`, without dropout."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        single, same = query.dim() == 2, key is value
        query, key, value = (self._batched(t) for t in (query, key, value))
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        k, v = self.key_value(key).chunk(2, -1)
        if not same:
            v = self.key_value(value).chunk(2, -1)[1]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.query(query), k, v)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            z = weights @ v
        else:
            z = F.scaled_dot_product_attention(q, k, v, mask)
        z = self.out_proj(z.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return z[0], None if weights is None else weights[0]
        return z if self.batch_first else z.transpose(0, 1), weights

    def _batched(self, t: Tensor) -> Tensor:
        return t[None] if t.dim() == 2 else t if self.batch_first else t.transpose(0, 1)

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        """Both masks, to be added to the scores (batch, heads, queries, keys)."""
        found = None
        if attn_mask is not None:
            found = _added(attn_mask, q)
            found = found.view(-1, self.num_heads, *found.shape[1:]) if found.dim() == 3 else found
        if padding is not None:
            padding = _added(padding, q).view(len(padding), 1, 1, keys)
            found = padding if found is None else found + padding
        return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def check_operands(x: Tensor, values: Tensor, columns: int) -> None:
    """Raise RuntimeError for an input of another width, and for tensors that are not on the CPU."""
    if x.device.type != "cpu" or values.device.type != "cpu":
        raise RuntimeError(
            f"these weights are packed for the CPU; x is on {x.device}, they on {values.device}"
        )
    if x.shape[-1] != columns:
        raise RuntimeError(f"x has {x.shape[-1]} features where the layer has {columns}")


def _product(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int, same: int,
) -> Tensor:  # fmt: skip
    check_operands(x, values, columns)
    for tensor, name in ((x, "x"), (values, "weights")):
        if tensor.dtype not in cpu_products.DTYPES:
            raise RuntimeError(f"{name} of {tensor.dtype}: packed layers take float32 and bfloat16")
    bias = None if bias is None else bias.float()
    return cpu_tiles.multiply(
        x, TiledMatrix(values, index, counts, rows, columns, start, same), bias
    )


@torch.library.custom_op("nmrun::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, values: Tensor, index: Tensor, counts: Tensor, start: Tensor, bias: Tensor | None,
    rows: int, columns: int, same: int,
) -> Tensor:  # fmt: skip
    return _product(x.detach(), values, index, counts, start, bias, rows, columns, same)


@packed_linear.register_fake
def _(x, values, index, counts, start, bias, rows, columns, same):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("nmrun::unpacked", mutates_args=())
def unpacked(
    values: Tensor, index: Tensor, counts: Tensor, start: Tensor, rows: int, columns: int
) -> Tensor:
    """A packed weight with its zeros."""
    return TiledMatrix(values, index, counts, rows, columns, start, 0).dense()


@unpacked.register_fake
def _(values, index, counts, start, rows, columns):  # type: ignore[no-untyped-def]
    return values.new_empty(rows, columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *parts, _, ctx.rows, ctx.columns, _ = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    dense = unpacked(*ctx.saved_tensors, ctx.rows, ctx.columns)
    return dz @ dense.to(dz.dtype), *[None] * 8


packed_linear.register_autograd(_backward, setup_context=_save)
