"""A linear layer through 2:4 products, as operators that autograd, ``torch.compile`` and CUDA
graphs know.

The dense weight stays the parameter. :class:`SemiStructuredProducts` holds what the products read, packed once per
optimizer step and shared by all micro-batches and by the recomputation of checkpointed activations;
it is no part of any state dict, since the layout is the GPU's.

    Z = X W^T      sparse
    dX = dZ V      sparse where V^T is 2:4 too (transposable masks, double pruning), else dense;
                   V is W unless the recipe has another
    dW = dZ^T X    dense; with MVUE, E^T X with an estimate E of dZ
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.fast.gpu import semi_structured
from nmrun.fast.measurement import on
from nmrun.fast.operators import keep_dtypes, operator, over_tokens, training
from nmrun.patterns import Pattern
from nmrun.products.simulation import estimate


class SemiStructuredProducts(nn.Module):
    """The packed weight of one layer, in buffers that keep their addresses: compiled code and CUDA
    graphs see the new values.

    ``weight``: (rows, columns), 2:4 along its columns, in float32 or already in ``dtype``.
    ``other``: the weight of the input gradient where that is not ``weight``. ``both``: V is 2:4
    along its rows, so the input gradient is sparse as well, by ``input_path`` where that is another
    algorithm.
    """

    def __init__(
        self,
        path: str,
        weight: Tensor,
        other: Tensor | None,
        dtype: torch.dtype,
        both: bool,
        input_path: str | None = None,
    ) -> None:
        super().__init__()
        self.path, self.dtype = path, dtype
        self.input_path = (input_path or path) if both else None  # None: dense
        low, pack = self._cast(weight), semi_structured.named(path).pack
        backward = low if other is None else self._cast(other)
        parts = pack(low)
        self.count = len(parts)  # behind them come those of the input gradient
        for i, part in enumerate([*parts, *(pack(backward.t()) if both else [backward])]):
            self.register_buffer(f"part{i}", part, persistent=False)

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the forward product reads, and what the input gradient does."""
        parts = list(self.buffers())
        return parts[: self.count], parts[self.count :]

    def _cast(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
        # a mask times a negative weight is -0.0, which compressors may take for a number
        return torch.add(weight.detach(), 0.0, out=out)

    @torch.no_grad()
    def write(self, weight: Tensor, other: Tensor | None, masked: bool = False) -> None:
        """Pack these values in place of the old ones; the weight gradient is whole, also where a
        ``masked`` one would do."""
        forward, backward = self.parts()
        other = weight if other is None else other
        self._rewrite(forward, weight)
        if self.input_path is not None:
            self._rewrite(backward, other.t())
        else:
            self._cast(other, backward[0])

    def _rewrite(self, parts: list[Tensor], weight: Tensor) -> None:
        path = semi_structured.named(self.path)
        if path.rewrite is not None:
            path.rewrite(parts, weight)
        else:
            torch._foreach_copy_(parts, path.pack(self._cast(weight)))
        # a backward pass of an earlier step raises, as with a dense weight
        torch.autograd.graph.increment_version(parts)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mvue: Pattern | None = None
    ) -> Tensor:
        """x (..., columns) to (..., rows). ``weight`` is not read: it receives the gradient."""
        x, bias = x.to(self.dtype), None if bias is None else bias.to(self.dtype)
        z = linear24(
            *(x.reshape(-1, x.shape[-1]), weight, bias, *self.parts()),
            *(self.path, self.input_path, None if mvue is None else str(mvue)),
        )
        return z.view(*x.shape[:-1], z.shape[-1])


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


multiply24 = operator(
    "multiply24", lambda x, parts, rows, path, bias=None: x.new_empty(len(x), rows)
)(_product)


def _input_gradient(
    dz: Tensor,
    x: Tensor,
    backward: list[Tensor],
    path: str,
    input_path: str | None,
    mvue: str | None,
) -> Tensor:
    if input_path is None:
        return dz @ backward[0]
    dx: Tensor = multiply24(dz, backward, x.shape[1], input_path)
    return dx


def _weight_gradient(
    dz: Tensor,
    x: Tensor,
    forward: list[Tensor],
    path: str,
    input_path: str | None,
    mvue: str | None,
) -> Tensor:
    return (dz if mvue is None else estimate(dz, Pattern.parse(mvue))).t() @ x


@training(
    "linear24",
    lambda x, weight, bias, *how: x.new_empty(x.shape[0], weight.shape[0]),
    _input_gradient,
    _weight_gradient,
)
def linear24(
    x: Tensor, weight: Tensor, bias: Tensor | None, forward: list[Tensor], backward: list[Tensor],
    path: str, input_path: str | None, mvue: str | None,
) -> Tensor:  # fmt: skip
    return _product(x, forward, weight.shape[0], path, bias)


class SemiStructuredLinear(nn.Module):
    """The same on CUDA, with a weight that fits into 2:4, by a path of ``semi_structured.PATHS``."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, path: str) -> None:
        super().__init__()
        self.path = path
        self.out_features, self.in_features = weight.shape
        # a mask times a negative weight is -0.0, which compressors may take for a number
        parts = semi_structured.named(path).pack((weight.detach() + 0.0).contiguous())
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
        if input.shape[-1] != self.in_features:  # the library sees no width of the weight
            raise RuntimeError(
                f"x has {input.shape[-1]} features where the layer has {self.in_features}"
            )
        operands = self._parts(), self.out_features, self.path, self.bias
        return over_tokens(input, multiply24, _product, *operands)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, path={self.path}"
