"""A linear layer through 2:4 products, as operators that autograd, ``torch.compile`` and CUDA
graphs know.

The dense weight stays the parameter. :class:`SemiStructuredProducts` holds what the products read, packed once per
optimizer step and shared by all micro-batches and by the recomputation of checkpointed activations;
it is no part of any state dict, since the layout is the GPU's.

    Z = X W^T      sparse
    dX = dZ V      sparse where V^T is 2:4 too (transposable masks, double pruning), else dense;
                   V is W unless the recipe has another
    dW = dZ^T X    dense; with MVUE, E^T X with a 2:4 estimate E of dZ, sparse where that is faster

By a path of FP8 products the operands are rounded to it, those of dense products as well (see
``nmrun.products.simulation.linear``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.fast.gpu import semi_structured
from nmrun.fast.gpu.kernels import compression
from nmrun.fast.gpu.semi_structured import ROUND_UP, padded
from nmrun.fast.measurement import on
from nmrun.fast.operators import PACKED, keep_dtypes, over_tokens
from nmrun.patterns import Pattern
from nmrun.products.layer import ToWrite
from nmrun.products.simulation import backward_product, estimate, refuse_second_gradients


class BatchPacker:
    """Packs the weights of many layers in few launches."""

    def __init__(self) -> None:
        self._batch: compression.CompressionBatch | None = None

    @torch.no_grad()
    def write(self, members: Sequence[tuple[SemiStructuredProducts, ToWrite]]) -> None:
        """As ``write`` of each of the products does."""
        together = list[tuple[Tensor, Tensor, Tensor | None]]()
        dense, copies = list[Tensor](), list[Tensor]()
        for products, (weight, other, masked) in members:
            rewrite = semi_structured.named(products.path).rewrite
            to_pack, to_copy = products.places(weight, other)
            if rewrite is semi_structured.cusparselt_rewrite and all(
                compression.fits(w, parts[0]) for w, parts in to_pack
            ):
                # what is copied is the one weight that is packed, unless the recipe has another
                beside = [c for w, c in to_copy if w is weight and compression.fits_copy(w, c)]
                together += [(w, parts[0], beside[0] if beside else None) for w, parts in to_pack]
                dense += [w for w, _ in to_copy if not beside]
                copies += [copy for _, copy in to_copy if not beside]
            else:
                products.write(weight, other, masked)
        if copies:
            torch._foreach_copy_(copies, dense)
        if together:  # without Triton there are none
            self._batch = self._batch or compression.CompressionBatch()
            self._batch.write(together)
            written = [t for _, *outs in together for t in outs if t is not None]
            torch.autograd.graph.increment_version(written)


class SemiStructuredProducts(nn.Module):
    """The packed weight of one layer, in buffers that keep their addresses: compiled code and CUDA
    graphs see the new values.

    ``weight``: (rows, columns), 2:4 along its columns, in float32 or already in ``dtype``.
    ``other``: the weight of the input gradient where that is not ``weight``. ``both``: V is 2:4
    along its rows, so the input gradient is sparse as well. ``weight_path`` is the path for the
    weight gradient with MVUE, or None, and ``input_path`` that of the input gradient where it is
    another algorithm.
    """

    packer = BatchPacker

    def __init__(
        self,
        path: str,
        weight: Tensor,
        other: Tensor | None,
        dtype: torch.dtype,
        both: bool,
        weight_path: str | None = None,
        input_path: str | None = None,
    ) -> None:
        super().__init__()
        self.path, self.dtype, self.both, self.weight_path = path, dtype, both, weight_path
        self.input_path = input_path
        parts, parts_t, dense = self._pack(weight, other)
        self.counts = (len(parts), len(parts_t))
        for i, part in enumerate([*parts, *parts_t, *dense]):
            self.register_buffer(f"part{i}", part, persistent=False)

    def _pack(
        self, weight: Tensor, other: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        low = self._cast(weight)
        low_other = low if other is None else self._cast(other)
        parts, parts_t = semi_structured.named(self.path).pack(
            low, low_other if self.both else None
        )
        return parts, parts_t, [] if self.both else [low_other]

    def _cast(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
        # a mask times a negative weight is -0.0, which compressors may take for a number
        return torch.add(weight.detach(), 0.0, out=out)

    @torch.no_grad()
    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Pack these values in place of the old ones; the weight gradient is whole, also where a
        ``masked`` one would do."""
        rewrite = semi_structured.named(self.path).rewrite
        if rewrite is None:
            parts, parts_t, dense = self._pack(weight, other)
            for buffer, part in zip(self.buffers(), [*parts, *parts_t, *dense], strict=True):
                buffer.copy_(part)
            return
        to_pack, to_copy = self.places(weight, other)
        for part_of, parts in to_pack:
            rewrite(parts, part_of)
            # a backward pass of an earlier step raises, as with a dense weight
            torch.autograd.graph.increment_version(parts)
        for dense_of, out in to_copy:
            self._cast(dense_of, out)

    def places(
        self, weight: Tensor, other: Tensor | None
    ) -> tuple[list[tuple[Tensor, list[Tensor]]], list[tuple[Tensor, Tensor]]]:
        """Which weights are packed into which buffers, and which are copied."""
        buffers, (count, count_t) = list(self.buffers()), self.counts
        backward = weight if other is None else other
        if count_t:
            return [(weight, buffers[:count]), (backward.t(), buffers[count:])], []
        return [(weight, buffers[:count])], [(backward, buffers[count])]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mvue: Pattern | None = None
    ) -> Tensor:
        """x (..., columns) to (..., rows). ``weight`` is not read: it receives the gradient."""
        parts = list(self.buffers())
        count, count_t = self.counts
        x, bias = x.to(self.dtype), None if bias is None else bias.to(self.dtype)
        z = linear24(
            *(x.reshape(-1, x.shape[-1]), weight, bias, parts[:count], parts[count : count + count_t], parts[count + count_t :]),
            *(self.path, self.weight_path, None if mvue is None else str(mvue), self.input_path),
        )  # fmt: skip
        return z.view(*x.shape[:-1], z.shape[-1])


@torch.library.custom_op("nmrun::linear24", mutates_args=())
def linear24(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Tensor], parts_t: list[Tensor], dense: list[Tensor],
    path: str, weight_path: str | None, mvue: str | None, input_path: str | None,
) -> Tensor:  # fmt: skip
    return _product(x, parts, weight.shape[0], path, bias)


def _product(
    x: Tensor, parts: list[Tensor], rows: int, path: str, bias: Tensor | None = None
) -> Tensor:
    """x S^T + bias, (tokens, rows), with S as it was packed."""
    if not len(x):  # an expert without tokens, which the library refuses
        return x.new_empty(0, rows)
    z = _multiplied(x, parts, path, bias).contiguous()
    # without the tokens that filled it up it is a view, which autograd would let nobody write in place
    return torch.ops.aten._unsafe_view(z, z.shape)


def _multiplied(x: Tensor, parts: list[Tensor], path: str, bias: Tensor | None) -> Tensor:
    """``Path.multiply`` by an algorithm, or by the library's default where it refuses these tokens:
    it was tried with the most that come."""
    kind, _, algorithm = path.partition(":")
    try:
        return semi_structured.named(path).multiply(x, parts, bias)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if not algorithm:
            raise
        return semi_structured.named(kind).multiply(x, parts, bias)


multiply24 = torch.library.custom_op("nmrun::multiply24", _product, mutates_args=())


@torch.library.custom_op("nmrun::weight_gradient24", mutates_args=())
def weight_gradient24(x: Tensor, dz: Tensor, mvue: str, path: str) -> Tensor:
    """E^T x, (rows, columns), E the unbiased estimate of dz (tokens, rows) along the tokens, packed
    for this one product."""
    x, dz = (padded(t, 2 * ROUND_UP) for t in (x, dz))
    parts = semi_structured.named(path).pack_estimate(dz, Pattern.parse(mvue))
    return _multiplied(x.t(), parts, path, None).t().contiguous()


@linear24.register_fake
def _(x, weight, bias, parts, parts_t, dense, path, weight_path, mvue, input_path):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])


@multiply24.register_fake
def _(x, parts, rows, path, bias=None):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], rows)


@weight_gradient24.register_fake
def _(x, dz, mvue, path):  # type: ignore[no-untyped-def]
    return x.new_empty(dz.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, parts, parts_t, dense, ctx.path, ctx.weight_path, ctx.mvue, ctx.input_path = (
        inputs
    )
    ctx.save_for_backward(x, *parts_t, *dense)
    ctx.sparse_input, ctx.rows, ctx.dtypes = (
        bool(parts_t),
        x.shape[1],
        (weight.dtype, None if bias is None else bias.dtype),
    )
    ctx.nothing = tuple([None] * len(tensors) for tensors in (parts, parts_t, dense))


def _backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    refuse_second_gradients(*PACKED)
    x, *stored = ctx.saved_tensors
    dx = dw = db = None
    weight_dtype, bias_dtype = ctx.dtypes
    dz = dz.contiguous()  # a gradient may come expanded
    fp8 = semi_structured.named(ctx.path).fp8
    if ctx.needs_input_grad[0]:
        dx = (
            multiply24(dz, stored, ctx.rows, ctx.input_path or ctx.path)
            if ctx.sparse_input
            else backward_product(dz, stored[0], fp8)
        )
    if ctx.needs_input_grad[2]:
        db = dz.sum(0).to(bias_dtype)
    if ctx.needs_input_grad[1]:
        if ctx.mvue is None:
            dw = backward_product(dz.t(), x, fp8)
        elif ctx.weight_path is not None:
            dw = weight_gradient24(x, dz, ctx.mvue, ctx.weight_path)
        else:
            dw = backward_product(estimate(dz, Pattern.parse(ctx.mvue), None).t(), x, fp8)
        # autograd would copy what is not stored as the weight is
        dw = dw.to(weight_dtype, memory_format=torch.contiguous_format)
    return dx, dw, db, *ctx.nothing, None, None, None, None


linear24.register_autograd(_backward, setup_context=_save)


class SemiStructuredLinear(nn.Module):
    """The same on CUDA, with a weight that fits into 2:4, by a path of ``semi_structured.PATHS``."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, path: str) -> None:
        super().__init__()
        self.path = path
        self.out_features, self.in_features = weight.shape
        # a mask times a negative weight is -0.0, which compressors may take for a number
        parts, _ = semi_structured.named(path).pack((weight.detach() + 0.0).contiguous(), None)
        self.parts = len(parts)
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def choose(self, x: Tensor, weight: Tensor, graph: bool = False) -> None:
        """Take the library's fastest right algorithm for inputs (..., in_features) of this size and dtype,
        in a CUDA ``graph`` or without; ``weight`` is what was packed. Raises ValueError where none is right."""
        flat, kind = x.reshape(-1, x.shape[-1]), self.path.partition(":")[0]
        bias = None if self.bias is None else self.bias.float()
        expected = functional.linear(flat.float(), weight.float(), bias)
        operands = flat, self._parts(), self.bias
        with on(x.device):
            self.path, _ = semi_structured.fastest(kind, *operands, expected, graph)

    def _apply(self, *args: Any, **kwargs: Any) -> SemiStructuredLinear:
        """A cast of the model would make other numbers of the places that lie behind the values."""
        names = (f"part{i}" for i in range(self.parts))
        keep_dtypes(self, names, partial(super()._apply, *args, **kwargs))
        return self

    def _parts(self) -> list[Tensor]:
        return [getattr(self, f"part{i}") for i in range(self.parts)]

    def forward(self, input: Tensor) -> Tensor:
        operands = self._parts(), self.out_features, self.path, self.bias
        return over_tokens(input, multiply24, _product, *operands)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, path={self.path}"
