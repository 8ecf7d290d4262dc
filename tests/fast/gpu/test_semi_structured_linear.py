"""The 2:4 linear layer as operators: products and gradients against F.linear, torch's own check of
operators, compiled graphs.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from played_gpu import COMPRESSED, MASKED, along_inputs, both_ways, multiply, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nmrun.fast.gpu import linear, semi_structured
from nmrun.fast.gpu.linear import SemiStructuredLinear, SemiStructuredProducts
from nmrun.patterns import Pattern
from nmrun.products import simulation

PAIRS = Pattern(2, 4)


@pytest.fixture(autouse=True)
def compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"compressed": COMPRESSED, "masked": MASKED}
    monkeypatch.setattr(semi_structured, "PATHS", paths)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("path", ["masked", "compressed"])
def test_products_and_gradients(shape: tuple[int, ...], bias: bool, both: bool, path: str) -> None:
    weight = (both_ways if both else along_inputs)(8, 16).requires_grad_()
    b = normal(8, seed=2).requires_grad_() if bias else None
    leaves = [normal(*shape).requires_grad_(), weight, *([] if b is None else [b])]
    packed = SemiStructuredProducts(path, weight, None, torch.float64, both)
    z, expected = packed(leaves[0], weight, b), F.linear(leaves[0], weight, b)
    torch.testing.assert_close(z, expected)
    dz = normal(*z.shape, seed=5)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, dz) for y in (z, expected)))
    count = 1 if path == "masked" else 2
    assert list(map(len, packed.parts())) == [count, count if both else 1]


@pytest.mark.parametrize("both", [True, False])
def test_gradients_of_gradients_are_refused(both: bool) -> None:
    """The gradient of the input would have none for the weight."""
    weight, x = both_ways(8, 16).requires_grad_(), normal(5, 16).requires_grad_()
    packed = SemiStructuredProducts("compressed", weight, None, torch.float64, both)
    with pytest.raises(RuntimeError, match="packed products have no gradients of gradients"):
        torch.autograd.grad(packed(x, weight, None).sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)], ids=str)
def test_what_comes_out_may_be_written_in_place(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``nn.ReLU(inplace=True)``, after a product of tokens that were filled up."""

    def filled_up(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
        return multiply(F.pad(x, (0, 0, 0, 2)), parts, bias)[: len(x)]

    paths = {"compressed": replace(COMPRESSED, multiply=filled_up)}
    monkeypatch.setattr(semi_structured, "PATHS", paths)
    weight, x = along_inputs(8, 16), normal(*shape).requires_grad_()
    packed = SemiStructuredProducts("compressed", weight, None, torch.float64, False)
    (expected,) = torch.autograd.grad(F.linear(x, weight).relu().square().sum(), x)
    (gradient,) = torch.autograd.grad(packed(x, weight, None).relu_().square().sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_half_the_values_are_all_that_is_read() -> None:
    """The path of these tests is no disguise of the dense product: of a weight that is not 2:4 it
    loses values.
    """
    weight = normal(8, 16)
    parts = COMPRESSED.pack(weight)
    result = COMPRESSED.multiply(normal(3, 16), parts, None)
    assert not torch.allclose(result, normal(3, 16) @ weight.t())


def test_another_weight_for_the_input_gradient() -> None:
    weight, other = along_inputs(8, 16), both_ways(8, 16)
    x, dz = normal(5, 16).requires_grad_(), normal(5, 8, seed=1)
    for both in (True, False):
        packed = SemiStructuredProducts("compressed", weight, other, torch.float64, both)
        z = packed(x, weight, None)
        torch.testing.assert_close(z, x @ weight.t())
        torch.testing.assert_close(torch.autograd.grad(z, x, dz)[0], dz @ other)


def test_what_is_written_is_what_is_used_in_the_same_memory() -> None:
    packed = SemiStructuredProducts("compressed", both_ways(8, 16), None, torch.float64, True)
    addresses = [buffer.data_ptr() for buffer in packed.buffers()]
    x, new = normal(5, 16).requires_grad_(), both_ways(16, 8).t().roll(4, 0)
    run = torch.compile(lambda x: packed(x, new, None), fullgraph=True, backend="aot_eager")
    assert not torch.allclose(run(x), x @ new.t())
    packed.write(new, None)
    assert [buffer.data_ptr() for buffer in packed.buffers()] == addresses
    torch.testing.assert_close(run(x), x @ new.t())
    (dx,) = torch.autograd.grad(run(x).sum(), x)
    torch.testing.assert_close(dx, new.sum(0).expand(5, -1))
    assert packed.state_dict() == {}


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("mvue", [None, "2:4"])
def test_the_operator_keeps_what_it_promises(both: bool, mvue: str | None) -> None:
    """Schema, autograd, fake tensors and traced graphs, by torch's own check of operators."""
    weight = both_ways(8, 16)
    packed = SemiStructuredProducts("compressed", weight, None, torch.float64, both)
    parts, _ = packed.parts()
    leaves = [t.clone().requires_grad_() for t in (normal(4, 16), weight, normal(8))]
    arguments = (*leaves, *packed.parts(), "compressed", packed.input_path, mvue)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    utils += [] if mvue else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(linear.linear24, arguments, test_utils=utils)
    torch.library.opcheck(linear.multiply24, (normal(4, 16), parts, 8, "compressed"))


@pytest.mark.parametrize("tokens", [16, 10])
def test_estimated_weight_gradient(tokens: int) -> None:
    """The same draws of the estimate as the simulation, whose tests show that it is unbiased; the
    last group is filled with zeros.
    """
    weight = along_inputs(8, 16).requires_grad_()
    x, dz = normal(tokens, 16), normal(tokens, 8, seed=1)
    packed = SemiStructuredProducts("compressed", weight, None, torch.float64, False)
    torch.manual_seed(0)
    (dw,) = torch.autograd.grad(packed(x, weight, None, PAIRS), weight, dz)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(simulation.linear(x, weight, None, None, PAIRS), weight, dz)
    torch.testing.assert_close(dw, expected)
    assert not torch.allclose(dw, dz.t() @ x)


def test_where_an_algorithm_refuses_a_number_of_tokens_the_default_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was chosen for the largest batch; the last one of an epoch is smaller."""

    def picky(x: Tensor, parts: list[Tensor], bias: Tensor | None, algorithm: int = 0) -> Tensor:
        if algorithm and len(x) < 16:
            raise RuntimeError("cuSPARSELt's MatmulPlanInit: not supported")
        return multiply(x, parts, bias)

    path = semi_structured.Path(COMPRESSED.pack, picky)
    monkeypatch.setitem(semi_structured.PATHS, "compressed", path)
    weight = both_ways(8, 16)
    packed = SemiStructuredProducts("compressed:3", weight, None, torch.float64, True)
    for tokens in (16, 5):
        x = normal(tokens, 16).requires_grad_()
        z = packed(x, weight, None)
        torch.testing.assert_close(z, x @ weight.t())
        (dx,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(dx, weight.sum(0).expand(tokens, -1))


def test_without_tokens_there_is_nothing_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an expert that no token goes to."""

    def refusing(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
        raise RuntimeError("cuSPARSELt's DenseDescriptorInit: no rows")

    path = semi_structured.Path(COMPRESSED.pack, refusing)
    monkeypatch.setitem(semi_structured.PATHS, "compressed", path)
    layer = SemiStructuredLinear(both_ways(8, 16), None, "compressed")
    for shape in ((0, 16), (2, 0, 16)):
        assert layer(normal(*shape)).shape == (*shape[:-1], 8)


@pytest.mark.parametrize("shape", [(4, 8), (4, 32), (2, 3, 8)], ids=str)
def test_an_input_of_another_width_is_refused(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by torch; the library would take it, and read something else."""
    taking = replace(MASKED, multiply=lambda x, parts, bias: x.new_zeros(len(x), 8))
    monkeypatch.setitem(semi_structured.PATHS, "masked", taking)
    layer = SemiStructuredLinear(both_ways(8, 16), None, "masked")
    with pytest.raises(RuntimeError, match=f"{shape[-1]} features where the layer has 16"):
        layer(normal(*shape))


def test_a_cast_leaves_what_is_packed_alone() -> None:
    """Behind the values lie their places, which are bits and no numbers."""
    weight, x = both_ways(8, 16).float(), normal(4, 16).float()
    layer = SemiStructuredLinear(weight, normal(8, seed=2).float(), "compressed")
    parts = [part.clone() for part in (layer.part0, layer.part1)]
    expected = layer(x)
    for cast in (layer.bfloat16, layer.float):
        cast()
        assert layer.part0.dtype == torch.float32
        assert all(map(torch.equal, parts, (layer.part0, layer.part1)))
    torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=2**-7)  # of the bias


@pytest.mark.parametrize("called", [True, False])
def test_a_broken_capture_is_over_for_the_memory_too(
    called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's allocator goes on as in the capture, and would refuse to empty its cache. Played: no GPU."""
    underway: list[tuple[int, int]] = []

    class Graph:
        def capture_begin(self, pool: tuple[int, int]) -> None:
            underway.append(pool)

        def capture_end(self) -> None:
            raise RuntimeError("capture invalidated")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, played in {
        "CUDAGraph": Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": contextlib.nullcontext,
        "graph_pool_handle": lambda: (0, 3),
        "current_device": lambda: 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    released: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, pool: underway.remove(pool)
    )
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *what: released.append(what))

    def call() -> None:
        if not called:
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="invalidated" if called else "not in a capture"):
        semi_structured.captured(call)
    assert underway == []
    assert released == [(1, (0, 3))]


def test_rounding_is_that_of_the_layer_it_replaces() -> None:
    """float32 parameters under autocast: the products of bfloat16, gradients in the dtypes of their
    tensors.
    """
    weight = both_ways(16, 32).float().requires_grad_()
    x, bias = (normal(*size).float().requires_grad_() for size in ((8, 32), (16,)))
    with torch.autocast("cpu", torch.bfloat16):
        for both in (True, False):
            packed = SemiStructuredProducts("masked", weight, None, torch.bfloat16, both)
            z = packed(x, weight, bias)
            expected = F.linear(x, weight, bias)
            assert z.dtype == torch.bfloat16
            assert torch.equal(z, expected)
            dz = normal(8, 16, seed=1).bfloat16()
            grads = (torch.autograd.grad(y, (x, weight, bias), dz) for y in (z, expected))
            for actual, exact in zip(*grads, strict=True):
                assert actual.dtype == exact.dtype == torch.float32
                torch.testing.assert_close(actual, exact, rtol=2**-7, atol=2**-7)


def test_recomputed_activations_share_the_packed_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = both_ways(8, 16), normal(5, 16).requires_grad_()
    packed, calls = SemiStructuredProducts("compressed", weight, None, torch.float64, True), []
    packs_again = replace(COMPRESSED, pack=calls.append)
    monkeypatch.setitem(semi_structured.PATHS, "compressed", packs_again)
    z: Any = checkpoint(lambda x: packed(x, weight, None).relu(), x, use_reentrant=False)
    (dx,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(dx, ((x @ weight.t()) > 0).double() @ weight)
    assert calls == []


def test_pruned_weights_are_plain_zeros_when_they_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compressor that looks at bits sees a number in -0.0, as a product with a mask leaves it."""
    seen: list[Tensor] = []
    looking = semi_structured.Path(lambda w: seen.append(w) or [w.clone()], multiply)
    monkeypatch.setitem(semi_structured.PATHS, "looking", looking)
    weight = -normal(8, 16, dtype=torch.float32).abs() * (along_inputs(8, 16) != 0)
    assert ((weight == 0) & weight.signbit()).any()
    SemiStructuredProducts("looking", weight, None, torch.bfloat16, False).write(weight, None)
    assert len(seen) == 2
    assert not any(((w == 0) & w.signbit()).any() for w in seen)
    assert torch.equal(seen[1], weight.bfloat16())


def test_what_needs_no_filling_is_not_copied() -> None:
    x = normal(32, 16)
    assert semi_structured.padded(x) is x
    filled = semi_structured.padded(x[:20])
    assert filled.shape == (32, 16)
    assert torch.equal(filled[:20], x[:20])
    assert filled.count_nonzero() == x[:20].count_nonzero()
