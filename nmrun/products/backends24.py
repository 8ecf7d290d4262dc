"""The ways in which torch multiplies with a 2:4 weight on sparse tensor cores, each with a test of
its own before it is believed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.sparse import SparseSemiStructuredTensorCUTLASS as Cutlass
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from nmrun.patterns import Pattern
from nmrun.products import simulated
from nmrun.sparsity.masks import hard_threshold

Product = Callable[[Tensor], Tensor]
Parts = list[Tensor]
REPEATS = 10  # products that must have the same bits
ALLOWED = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # twice the rounding of one number
ROUND_UP = (
    16  # tokens: a dense operand of 16-bit numbers has to have a multiple of 8, and fp8 of 16
)


@dataclass(frozen=True)
class Path:
    """One way to compute ``x W^T``, W (rows, columns) 2:4 along its columns, x (tokens, columns).

    ``pack(W, V)`` compresses W, and V^T where a second weight V (rows, columns), 2:4 along its
    rows, is given: that of the input gradient ``dz V``. ``multiply(x, parts, bias)`` is the product
    with what was packed, of shape (tokens, rows). ``fp8``: operands are rounded as
    :func:`nmrun.products.simulated.linear` does with ``fp8``, those of ``x W^T`` to e4m3fn and
    those of ``dz V`` to e5m2.
    """

    pack: Callable[[Tensor, Tensor | None], tuple[Parts, Parts]]
    multiply: Callable[[Tensor, Parts, Tensor | None], Tensor]
    fp8: bool = False

    def __call__(self, weight: Tensor) -> Product:
        """``x W^T`` with a weight that is 2:4 both ways."""
        parts, _ = self.pack(weight, weight)
        return lambda x: self.multiply(x, parts, None)


def padded(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """A matrix with zeros up to a multiple of rows (dim 0) or columns (1); itself where there is
    nothing to add, which ``pad`` copies.
    """
    missing = -x.shape[dim] % multiple
    return functional.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing)) if missing else x


def _separately(
    compress: Callable[[Tensor], Parts],
) -> Callable[[Tensor, Tensor | None], tuple[Parts, Parts]]:
    return lambda w, v: (compress(w), [] if v is None else compress(v.t().contiguous()))


def _cusparselt(x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
    tokens = len(x)
    x = padded(x, ROUND_UP)
    return torch._cslt_sparse_mm(parts[0], x.t(), bias=bias, transpose_result=True)[:tokens]


def _cusparselt_fp8_pack(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    values, scale = simulated.quantize(weight, simulated.FORWARD_FP8)
    parts_t: Parts = []
    # torch compresses e4m3 alone of the two; numbers of e5m2 are numbers of bfloat16 as well
    if other is not None:
        values_t, scale_t = simulated.quantize(other.t().contiguous(), simulated.BACKWARD_FP8)
        parts_t = [torch._cslt_compress(values_t.bfloat16()), scale_t]
    return [torch._cslt_compress(values), scale], parts_t


def _cusparselt_fp8(x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
    packed, scale = parts
    forward = packed.dtype == simulated.FORWARD_FP8
    values, scale_x = simulated.quantize(
        padded(x, ROUND_UP), packed.dtype if forward else simulated.BACKWARD_FP8
    )
    if forward:  # in float32, since the library takes no scales that lie on the device
        z = torch._cslt_sparse_mm(packed, values.t(), out_dtype=torch.float32)
    else:
        z = torch._cslt_sparse_mm(packed, values.to(packed.dtype).t())
    return unscaled(z.t()[: len(x)], scale, scale_x, bias, x.dtype)


def unscaled(
    z: Tensor, scale: Tensor, scale_x: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``z / scale / scale_x + bias``, computed in float32 and rounded once, contiguous."""
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    # with a dimension it makes the product float32
    factor = (scale.reciprocal() * scale_x.reciprocal()).view(1)
    return (
        torch.mul(z, factor, out=out)
        if bias is None
        else torch.addcmul(bias.float(), z, factor, out=out)
    )


def _cutlass_compress(weight: Tensor) -> Parts:
    Cutlass._validate_device_dim_dtype_shape(weight)
    return list(sparse_semi_structured_from_dense_cutlass(weight))


def _cutlass(x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
    tokens = len(x)
    x = padded(x, ROUND_UP)
    if bias is None:
        product = torch._sparse_semi_structured_mm(parts[0], parts[1], x.t())
    else:
        product = torch._sparse_semi_structured_addmm(bias, parts[0], parts[1], x.t())
    return product[:, :tokens].t().contiguous()


def _one_pass(weight: Tensor, other: Tensor | None) -> tuple[Parts, Parts]:
    major = torch.cuda.get_device_capability(weight.device)[0]
    if major != 8:
        raise NotImplementedError(
            f"not tried: it writes the layout of compute capability 8.x, and this is {major}.x"
        )
    if other is not weight:
        raise NotImplementedError(
            "it packs one weight for both products, and prunes what is not 2:4 both ways"
        )
    # by default it compares signed values
    packed, meta, packed_t, meta_t, _ = torch._sparse_semi_structured_tile(
        weight, algorithm="largest_abs_values_greedy", use_cutlass=True
    )
    return [packed, meta], [packed_t, meta_t]


# NVIDIA's library: Ampere and later
CUSPARSELT = Path(_separately(lambda weight: [torch._cslt_compress(weight)]), _cusparselt)
# torch's kernel: compiled for compute capability 8.x, refused elsewhere
CUTLASS = Path(_separately(_cutlass_compress), _cutlass)
# Prune and pack in one kernel, which writes the metadata of 8.x and does not look where it runs:
# elsewhere results are wrong. What is not 2:4 both ways it prunes by a rule of its own.
ONE_PASS = Path(_one_pass, _cutlass)
CUSPARSELT_FP8 = Path(_cusparselt_fp8_pack, _cusparselt_fp8, fp8=True)  # Ada, Hopper and later
PATHS: dict[str, Path] = {
    "cusparselt": CUSPARSELT,
    "cutlass": CUTLASS,
    "one_pass": ONE_PASS,
    "cusparselt_fp8": CUSPARSELT_FP8,
}
# The reference, on any device: the zeros are multiplied too.
MASKED = Path(
    lambda w, v: ([w.clone()], [] if v is None else [v.t().contiguous()]),
    lambda x, parts, bias: functional.linear(x, parts[0], bias),
)


def candidates(fp8: bool) -> dict[str, Path]:
    """The paths for operands rounded to FP8, or those for others."""
    return {name: path for name, path in PATHS.items() if path.fp8 == fp8}


def transposable(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """A bfloat16 weight of N(0, 1) numbers that is 2:4 along both dimensions, so that no path has a
    choice what to prune.
    """
    values = torch.randn(
        rows, columns, generator=torch.Generator(device).manual_seed(0), device=device
    )
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).to(device)
    return (values * pairs.repeat(rows // 4, columns // 4) + 0.0).bfloat16()


def fault(call: Callable[[], Tensor], expected: Tensor, atol: float | None = None) -> str:
    """What is wrong with a product, empty if nothing is: against float32's, within the rounding of
    its dtype, the same bits every time.

    ``atol``: default the same share of the expected values' standard deviation. Running out of
    memory is no fault: it raises.
    """
    try:
        first = call()
        bound = ALLOWED.get(first.dtype, 1e-4)
        near = bound * float(expected.std()) if atol is None else atol
        if first.shape != expected.shape or not torch.allclose(
            first.float(), expected, rtol=bound, atol=near
        ):
            return "WRONG results"
        return (
            ""
            if all(torch.equal(first, call()) for _ in range(REPEATS))
            else "results CHANGE from call to call"
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        return first_line(error)


def first_line(error: Exception) -> str:
    """What an error says, without the stack that torch adds."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def verdict(path: Path, device: torch.device | str = "cuda") -> str:
    """``"right"``, or what is wrong with a path, by one product in bfloat16."""
    weight = transposable(256, 512, device)
    x = torch.randn(384, 512, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the format is a prototype
            product = path(weight)
            expected = simulated.linear(x.float(), weight.float(), fp8=path.fp8)
            found = fault(lambda: product(x), expected, atol=ALLOWED[torch.bfloat16])
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return first_line(error)
    return (
        f"{found}: not to be used here"
        if found.startswith(("WRONG", "results"))
        else found or "right"
    )


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """The median time of ``call`` on the current GPU, after three calls to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def bandwidth(weights: int = 1 << 22) -> tuple[float, float]:
    """GB/s (read and written) on this CPU: of the 2:4 projection, compiled where it can be, and of
    a plain copy of the same tensor.
    """
    from nmrun.kernels import cpu

    weight, out, pattern = (
        torch.randn(1024, weights // 1024),
        torch.empty(1024, weights // 1024),
        Pattern(2, 4),
    )

    def project() -> None:
        if not cpu.project(weight, out, pattern, 1):
            out.copy_(hard_threshold(weight, pattern, 1))

    return _rate(project, weight), _rate(lambda: out.copy_(weight), weight)


def _rate(call: Callable[[], object], weight: Tensor) -> float:
    call()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return 2 * weight.nbytes / best / 1e9
