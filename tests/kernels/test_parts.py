"""Work in parts on torch's threads: every row once, operands as they are, failures told."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from nmrun.kernels import compiler
from nmrun.kernels.compiler import BEGIN, END, in_parts

pytestmark = pytest.mark.skipif(not compiler.find_compiler(), reason="no C compiler works here")
Kernel = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * compiler.MOST_OPERANDS)


class Calls:
    """A kernel that notes what it is called with, and fails for the part that begins at ``bad``."""

    def __init__(self, bad: int | None = None) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.bad = bad
        self.lock = threading.Lock()
        self.kernel = Kernel(self.call)

    def call(self, *words: int) -> int:
        with self.lock:
            self.seen.append(words)
        return int(words[1] == self.bad)


@pytest.fixture(params=["torch's threads", "threads of our own"])
def three_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiler, "CHUNK", 10)
    if request.param == "threads of our own":
        monkeypatch.setattr(compiler, "IMPORTED_IN", 0)  # as in a process that was forked


@pytest.mark.parametrize(
    ("rows", "weights", "unit", "expected"),
    [
        (100, 1000, 1, [(0, 34), (34, 68), (68, 100)]),
        (100, 1000, 16, [(0, 48), (48, 96), (96, 100)]),
        (100, 20, 1, [(0, 50), (50, 100)]),  # two threads' worth
        (100, 9, 1, [(0, 100)]),
        (2, 1000, 1, [(0, 1), (1, 2)]),
        (17, 1000, 16, [(0, 16), (16, 17)]),
    ],
)
def test_every_row_is_in_one_part(three_threads, rows, weights, unit, expected):
    calls, rest = Calls(), [*range(3, compiler.MOST_OPERANDS)]
    operands = (1 << 40, BEGIN, END, *rest)
    in_parts(calls.kernel, operands, rows, weights, unit)
    assert sorted(words[1:3] for words in calls.seen) == expected
    assert {(words[0], *words[3:]) for words in calls.seen} == {(1 << 40, *rest)}


@pytest.mark.parametrize("bad", [0, 40, 80])
def test_a_part_that_fails_fails_the_whole(three_threads, bad):
    operands = (0, BEGIN, END, *[0] * (compiler.MOST_OPERANDS - 3))
    with pytest.raises(MemoryError, match="no memory"):
        in_parts(Calls(bad).kernel, operands, 120, 1000)
    in_parts(Calls(bad=7).kernel, operands, 120, 1000)
