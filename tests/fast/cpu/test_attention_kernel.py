"""Attention and GELU by nmrun's kernels against their mathematics in float64: every tail, masks, layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from operands import normal
from torch import Tensor

from nmrun.fast import fused
from nmrun.fast.cpu.kernels import bf16

pytestmark = pytest.mark.skipif(bool(fused.KERNELS.obstacle()), reason="no compiler or no AVX-512")

# rounding of an operand or a result
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-9}


@pytest.fixture(autouse=True, params=["processor", "without bfloat16"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Built for this processor, and for one that does not multiply bfloat16."""
    if request.param == "processor":
        yield
        return
    flags = (*fused.KERNELS.flags, "-mno-avx512bf16")
    monkeypatch.setattr(fused, "KERNELS", replace(fused.KERNELS, flags=flags))
    yield


def heads(
    batch: int, count: int, queries: int, keys: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys and values that lie as a layer's outputs do: heads side by side in a token."""
    tensors = []
    for seed, tokens in enumerate((queries, keys, keys)):
        x = normal(batch, tokens, count * width, seed=seed).to(dtype)
        tensors.append(x.unflatten(-1, (count, width)).transpose(1, 2))
    return tensors


def softmax_of_scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = scale * torch.einsum("bhqw,bhkw->bhqk", q.double(), k.double())
    scores = scores if mask is None else scores + mask.double()
    top = scores.amax(-1, keepdim=True).clamp_min(-1e300)
    numbers = (scores - top).exp()
    return numbers / numbers.sum(-1, keepdim=True).clamp_min(1e-300)


def check(
    result: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, low: bool = False
) -> None:
    scale = 1 / math.sqrt(q.shape[-1])
    weights = softmax_of_scores(q, k, mask, scale)
    expected = torch.einsum("bhqk,bhkw->bhqw", weights, v.double())
    size = torch.einsum("bhqk,bhkw->bhqw", weights, v.double().abs())
    assert (result.shape, result.dtype) == (expected.shape, q.dtype)
    unit = UNIT[torch.bfloat16] if low else UNIT[q.dtype]
    # what a rounding of each operand moves the scores by, and with them the weights
    moved = 2 * scale * float((q.double().abs() @ k.double().abs().transpose(2, 3)).amax())
    bound = unit * (4 + (moved if low else 0)) + 2**-24 * (32 + 4 * moved)
    assert bool(((result.double() - expected).abs() <= bound * size + 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "count", "queries", "keys", "width"),
    [
        (1, 1, 1, 1, 1), (2, 3, 7, 5, 8), (1, 2, 25, 65, 33), (1, 4, 24, 64, 64),
        (2, 1, 49, 130, 80), (1, 2, 6, 300, 15), (1, 1, 31, 16, 130),
    ],
)  # fmt: skip
def test_every_shape(
    batch: int, count: int, queries: int, keys: int, width: int, dtype: torch.dtype
) -> None:
    q, k, v = heads(batch, count, queries, keys, width, dtype)
    check(fused.attention(q, k, v), q, k, v)
    one_by_one = (t.contiguous() for t in (q, k, v))
    assert torch.equal(fused.attention(*one_by_one), fused.attention(q, k, v))


@pytest.mark.skipif(bool(bf16.KERNELS.obstacle()), reason="no AVX-512 with BF16")
def test_operands_rounded_to_bfloat16() -> None:
    q, k, v = heads(1, 2, 25, 65, 33, torch.float32)
    check(fused.attention(q, k, v, low=True), q, k, v, low=True)


def added(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 30, 70), (2, 1, 1, 70), (30, 70), (1, 3, 30, 1)])
def test_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = heads(2, 3, 30, 70, 16, dtype)
    for mask in (normal(*shape, seed=3), added(normal(*shape, seed=4) > -0.5)):
        check(fused.attention(q, k, v, mask), q, k, v, mask)


@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (30, 90), (90, 30)])
def test_causal(queries: int, keys: int) -> None:
    q, k, v = heads(1, 2, queries, keys, 16, torch.float32)
    mask = added(torch.ones(queries, keys, dtype=torch.bool).tril())
    check(fused.attention(q, k, v, mask), q, k, v, mask)


def test_nothing_seen_is_zero_as_torchs_and_nan_stays() -> None:
    q, k, v = heads(1, 2, 9, 20, 16, torch.float32)
    nothing = torch.ones(9, 20, dtype=torch.bool)
    nothing[3] = False
    result = fused.attention(q, k, v, added(nothing))
    torch.testing.assert_close(
        result, torch.nn.functional.scaled_dot_product_attention(q, k, v, nothing)
    )
    assert not result[:, :, 3].any()
    q[0, 1, 4, 2] = math.nan
    assert fused.attention(q, k, v).isnan().any(-1).nonzero().tolist() == [[0, 1, 4]]


def test_a_query_has_the_same_bits_alone_and_on_many_threads() -> None:
    q, k, v = heads(3, 4, 50, 40, 32, torch.bfloat16)
    all_, before = fused.attention(q, k, v), torch.get_num_threads()
    assert torch.equal(fused.attention(q[1:2, :, 29:30], k[1:2], v[1:2]), all_[1:2, :, 29:30])
    torch.set_num_threads(3)
    try:
        assert torch.equal(fused.attention(q, k, v), all_)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu(tanh: bool, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 5001).to(dtype)
    d = x.double()
    if tanh:
        expected = d / (1 + (-math.sqrt(8 / math.pi) * (d + 0.044715 * d**3)).exp())
    else:
        expected = d * torch.erfc(-d / math.sqrt(2)) / 2
    result = fused.gelu(x, tanh).double()
    large = expected.abs() > 1e-36  # below, float32 is nearly subnormal
    off = ((result - expected).abs() / expected.abs())[large]
    # exponents of up to 120 are rounded
    assert float(off.amax()) <= (256 if dtype == torch.float32 else 2.2) * UNIT[dtype]
    assert torch.equal(fused.gelu(x[:33].view(3, 11), tanh), fused.gelu(x, tanh)[:33].view(3, 11))
    odd = fused.gelu(torch.tensor([math.nan, math.inf, 0.0]).to(dtype), tanh)
    assert odd[0].isnan()
    assert odd[1:].tolist() == [math.inf, 0.0]
