"""Our calls of cuSPARSELt, without a GPU: a library in Python reads the addresses that it is given,
by the order and meaning of the arguments in NVIDIA's header.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from operands import normal

from nmrun.fast.gpu.kernels import cusparselt

FLOAT32, ROWS_FIRST, COLUMNS_FIRST = 0, 2, 1


class Matrix(NamedTuple):
    rows: int
    columns: int
    leading: int
    order: int


def number(argument: Any) -> int:
    return int(argument.value)


def array(address: int, shape: tuple[int, int]) -> np.ndarray:
    assert address % 16 == 0
    return np.ctypeslib.as_array((ctypes.c_float * (shape[0] * shape[1])).from_address(address))


class Library:
    """float32 products of a weight that is not compressed."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self.plans, self.destroyed = 0, 0

    def __call__(self, name: str, handle: Any, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def Init(self) -> None: ...

    def StructuredDescriptorInit(self, at, rows, columns, leading, alignment, kind, order, half):
        assert (number(alignment), number(kind), number(half)) == (16, FLOAT32, 0)
        self.known[at.value] = Matrix(*map(number, (rows, columns, leading, order)))

    def DenseDescriptorInit(self, at, rows, columns, leading, alignment, kind, order):
        self.StructuredDescriptorInit(
            at, rows, columns, leading, alignment, kind, order, ctypes.c_int(0)
        )

    def MatmulDescriptorInit(self, at, turn_w, turn_x, w, x, z, out, kind):
        assert (number(turn_w), number(kind)) == (0, 2)
        assert z.value == out.value
        matrices = [self.known[each.value] for each in (w, x, z)]
        self.known[at.value] = {"matrices": matrices, "turned": number(turn_x), "bias": None}

    def MatmulDescSetAttribute(self, at, which, value, size):
        assert (number(which), number(size)) == (8, 8)
        self.known[at.value]["bias"] = ctypes.cast(value, ctypes.POINTER(ctypes.c_uint64))[0]

    def MatmulAlgSelectionInit(self, at, product, default):
        self.known[at.value] = {"algorithm": number(default)}

    def MatmulAlgGetAttribute(self, at, which, value, size):
        assert (number(which), number(size)) == (1, 4)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = 3

    def MatmulAlgSetAttribute(self, at, which, value, size):
        assert (number(which), number(size)) == (0, 4)
        self.known[at.value]["algorithm"] = ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0]

    def MatmulPlanInit(self, at, product, selection):
        if (algorithm := self.known[selection.value]["algorithm"]) >= 3:
            raise RuntimeError(f"cuSPARSELt's MatmulPlanInit: no algorithm {algorithm}")
        # with a bias or without is decided here
        biased = self.known[product.value]["bias"] is not None
        self.known[at.value] = {"product": product.value, "biased": biased}
        self.plans += 1

    def MatmulGetWorkspace(self, plan, size):
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = 5

    def Matmul(self, plan, alpha, w, x, beta, c, out, space, streams, count):
        scales = [ctypes.cast(each, ctypes.POINTER(ctypes.c_float))[0] for each in (alpha, beta)]
        assert scales == [1.0, 0.0]
        assert number(count) == 1
        assert c.value == out.value
        product = self.known[self.known[plan.value]["product"]]
        assert self.known[plan.value]["biased"] == (product["bias"] is not None)
        of_w, of_x, of_z = product["matrices"]
        assert of_w.order == of_x.order == ROWS_FIRST
        weight = array(w.value, of_w[:2]).reshape(of_w[:2])
        dense = array(x.value, of_x[:2]).reshape(of_x[:2])
        assert (of_w.leading, of_x.leading) == (of_w.columns, of_x.columns)
        by_rows = of_z.order == ROWS_FIRST
        assert of_z.order in (ROWS_FIRST, COLUMNS_FIRST)
        assert of_z.leading == (of_z.columns if by_rows else of_z.rows)
        result = weight @ (dense.T if product["turned"] else dense)
        if product["bias"] is not None:
            result += array(product["bias"], (of_z.rows, 1))[:, None]
        array(out.value, of_z[:2])[:] = result.ravel("C" if by_rows else "F")

    def cusparseLtMatDescriptorDestroy(self, at):
        self.destroyed += 1

    cusparseLtMatmulPlanDestroy = cusparseLtMatDescriptorDestroy
    cusparseLtMatmulAlgSelectionDestroy = cusparseLtMatDescriptorDestroy


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library()
    monkeypatch.setattr(cusparselt, "call", library)
    monkeypatch.setattr(cusparselt, "library", lambda: library)
    monkeypatch.setattr(cusparselt, "_state", cusparselt._State())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 7})
    )
    yield library
    # now, and not when another test counts
    cusparselt._state.plan.cache_clear()


def test_products(library: Library) -> None:
    """Stored by rows, by columns, neither, at odd addresses; with one bias, another and none."""
    weight, wide = normal(6, 4, seed=0), normal(8, 9, seed=1)
    xs = [
        *(wide[:, :4].contiguous(), wide.t()[:4].contiguous().t(), wide[:, 2:6]),
        wide.view(-1)[3:35].view(8, 4),
    ]
    biases = [normal(6, seed=2), None, normal(7, seed=3)[1:]]
    for x in xs:
        for bias in biases:
            z = cusparselt.multiply(weight, x, bias)
            torch.testing.assert_close(z, torch.nn.functional.linear(x, weight, bias))
            by_columns = x.t().is_contiguous() and bias is None
            assert (z.t() if by_columns else z).is_contiguous()
    assert library.plans == 4  # by rows and by columns, with a bias and without


def test_algorithms(library: Library) -> None:
    weight, x = normal(6, 4, seed=0), normal(8, 4, seed=1)
    assert cusparselt.algorithms(weight, x) == 3
    for algorithm in range(3):
        torch.testing.assert_close(
            cusparselt.multiply(weight, x, algorithm=algorithm), x @ weight.t()
        )
    with pytest.raises(RuntimeError, match="no algorithm 3"):
        cusparselt.multiply(weight, x, algorithm=3)
    assert library.destroyed == 4  # what the plan that failed had made


def test_numbers_of_another_dtype_are_refused(library: Library) -> None:
    """The library would read their bits as those of the weight's dtype."""
    with pytest.raises(RuntimeError, match=r"x is torch\.float64, and the packed"):
        cusparselt.multiply(normal(6, 4, seed=0), normal(8, 4, seed=1).double())


def test_plans_are_few(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusparselt, "PLANS", 2)
    monkeypatch.setattr(cusparselt, "_state", cusparselt._State())
    weight = normal(6, 4, seed=0)
    for tokens in (8, 16, 8, 24, 32):
        cusparselt.multiply(weight, normal(tokens, 4, seed=1))
    assert library.plans == 4
    assert library.destroyed == 5 * 2  # each with three descriptors and a selection


def test_an_old_library_or_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, message in ((None, "has no cuSPARSELt"), (((0, 5, 2), "lib"), "0.6 or later")):
        cusparselt.library.cache_clear()
        monkeypatch.setattr(cusparselt, "loaded_cusparselt", lambda found=found: found)
        with pytest.raises(RuntimeError, match=message):
            cusparselt.call("Init")
    cusparselt.library.cache_clear()
