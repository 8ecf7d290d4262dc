"""Products with packed matrices, against float64 and brute force."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.kernels.products import PackedMatrix, pack
from nmrun.kernels import compiler

pytestmark = pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here")

EVERY = [
    (n, m) for m in (1, 2, 3, 4, 5, 7, 8, 12, 16) for n in {1, 2, m // 2, m - 1, m} if 0 < n <= m
]
# one below, at and above what the kernel works in: lanes, panels, blocks, rows at once
SIZES = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (17, 127, 33), (63, 129, 15), (64, 128, 512),
         (65, 300, 513), (130, 257, 31)]  # fmt: skip


def matrix(rows: int, columns: int, n: int, m: int, seed: int = 0) -> Tensor:
    """Random, with exactly n places of every m consecutive columns, by a loop."""
    g = torch.Generator().manual_seed(seed)
    out = torch.zeros(rows, columns)
    for r in range(rows):
        for c in range(0, columns, m):
            width = min(m, columns - c)
            places = torch.randperm(width, generator=g)[:n]
            out[r, c + places] = torch.randn(len(places), generator=g)
    return out


def packed(dense: Tensor) -> tuple[PackedMatrix, PackedMatrix]:
    rows, columns = dense.shape
    both = PackedMatrix.empty(rows, columns), PackedMatrix.empty(columns, rows)
    pack(dense, *both)
    return both


def close(result: Tensor, exact: Tensor, terms: int) -> bool:
    """Within a few roundings of float32: sums of random numbers grow by the root of their count."""
    scale = max(float(exact.abs().max()), 1e-30)
    bound = 4 * 2**-23 * scale * max(1.0, math.sqrt(terms) / 4)
    return float((result - exact).abs().max()) <= bound


@pytest.mark.parametrize(("n", "m"), EVERY)
def test_every_pattern(n: int, m: int) -> None:
    w = matrix(37, 150, n, m)
    rows, turned = packed(w)
    assert torch.equal(rows.dense(), w)
    assert torch.equal(turned.dense(), w.t())
    g = torch.Generator().manual_seed(1)
    x, dz, bias = (torch.randn(*size, generator=g) for size in ((70, 150), (70, 37), (37,)))
    assert close(rows.multiply(x, bias), x.double() @ w.double().t() + bias, 150)
    assert close(turned.multiply(dz), dz.double() @ w.double(), 37)
    assert close(rows.sampled(x, dz), dz.double().t() @ x.double() * (w != 0), 70)


@pytest.mark.parametrize(("tokens", "columns", "rows"), SIZES)
def test_every_tail(tokens: int, columns: int, rows: int) -> None:
    w = matrix(rows, columns, 1, 3)
    x, dz = torch.randn(tokens, columns), torch.randn(tokens, rows)
    by_rows, turned = packed(w)
    z = by_rows.multiply(x)
    assert close(z, x.double() @ w.double().t(), columns)
    assert torch.equal(by_rows.multiply(x.t(), turned=True), z.t())
    assert close(turned.multiply(dz), dz.double() @ w.double(), rows)
    assert close(by_rows.sampled(x, dz), dz.double().t() @ x.double() * (w != 0), tokens)


@pytest.mark.parametrize("full", [0, 1 << 40])  # from its rows, from the matrix itself
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("taps", "rows", "columns"), [(1, 300, 150), (1, 17, 1), (9, 130, 33)])
def test_transposes_however_they_are_packed(
    taps: int, rows: int, columns: int, threads: int, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "FULL", full)
    monkeypatch.setattr(compiler, "CHUNK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    w = torch.randn(rows, taps * columns, generator=torch.Generator().manual_seed(0))
    w[:, ::3], w[:: max(2, rows // 5)] = 0, 0
    own = PackedMatrix.empty(rows, columns, taps)
    turned = PackedMatrix.empty(columns, rows, taps)
    pack(w, own, turned)
    by_tap = w.view(rows, taps, columns).transpose(0, 2).reshape(columns, taps * rows)
    assert torch.equal(own.dense(), w)
    assert torch.equal(turned.dense(), by_tap)
    assert turned.count == own.count
    # rows of a block of the transpose stand in order
    first, last = turned.start[:-1].tolist(), turned.start[1:].tolist()
    places = turned.index.tolist()
    assert all(places[a:b] == sorted(set(places[a:b])) for a, b in zip(first, last, strict=True))


def test_uneven_rows_and_empty_ones() -> None:
    w = torch.zeros(6, 300)
    w[1], w[2, 299], w[4, :130] = torch.randn(300), 2.0, torch.randn(130)
    x = torch.randn(5, 300)
    rows, turned = packed(w)
    assert close(rows.multiply(x), x.double() @ w.double().t(), 300)
    assert torch.equal(turned.dense(), w.t())


def test_the_bits_do_not_depend_on_threads_or_on_other_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "CHUNK", 1)
    w = matrix(200, 260, 2, 4)
    rows, turned = packed(w)
    x, dz = torch.randn(300, 260), torch.randn(300, 200)
    results = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        again = packed(w)[1]
        assert torch.equal(again.values[: again.count], turned.values[: turned.count])
        assert torch.equal(again.start, turned.start)
        results.append((rows.multiply(x), rows.multiply(x[:3]), rows.sampled(x, dz)))
    for z, few, gradient in results:
        assert torch.equal(z, results[0][0])
        assert torch.equal(gradient, results[0][2])
        assert torch.equal(few, z[:3])


def test_bfloat16_is_rounded_once() -> None:
    w, bias = matrix(40, 200, 1, 4), torch.randn(40)
    x = torch.randn(67, 200).bfloat16()
    rows, _ = packed(w)
    z, exact = rows.multiply(x, bias), x.double() @ w.double().t() + bias
    assert z.dtype == torch.bfloat16
    nearest = exact.float().bfloat16()
    # the sum of float32 may lie on the other side of a tie
    assert ((z.float() - nearest.float()).abs() <= nearest.float().abs() * 2**-7).all()
    assert (z == nearest).float().mean() > 0.99
    assert torch.isnan(rows.multiply(torch.full_like(x, torch.nan))).all()


def test_infinities_and_nan_spread_as_in_a_dense_product() -> None:
    w = matrix(8, 32, 2, 4)
    w[3, int(w[3].nonzero()[0])] = torch.nan
    rows, _ = packed(w)
    assert torch.equal(rows.dense().isnan(), w.isnan())
    z = rows.multiply(torch.randn(9, 32))
    assert z[:, 3].isnan().all()
    assert not z[:, :3].isnan().any()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "KERNELS", replace(products.KERNELS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "less", ["-mno-avx512f", pytest.param("-mno-avx", marks=pytest.mark.minutes)]
)
def test_narrower_vectors(less: str, built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX2's and SSE's source is the same."""
    if os.uname().machine != "x86_64":
        pytest.skip("the flags are x86's")
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, less))
    w = matrix(70, 290, 2, 5)
    rows, turned = packed(w)
    x, dz, bias = torch.randn(131, 290), torch.randn(131, 70), torch.randn(70)
    assert torch.equal(rows.dense(), w)
    assert torch.equal(turned.dense(), w.t())
    assert close(rows.multiply(x, bias), x.double() @ w.double().t() + bias, 290)
    assert close(turned.multiply(dz), dz.double() @ w.double(), 70)
    assert close(rows.sampled(x, dz), dz.double().t() @ x.double() * (w != 0), 131)


ARM = """
#include <stdio.h>
int main(void) {
  enum { T = 70, K = 150, O = 37 };
  static float w[O * K], x[T * K], y[T * O], values[O * K], sampled_to[O * K];
  static uint8_t index[O * K];
  static int32_t start[O * 2 + 1];
  for (int i = 0; i < O * K; i++) w[i] = i % 4 == i / 4 % 3 ? (i * 37 % 101 - 50) / 25.0f : 0.0f;
  for (int i = 0; i < T * K; i++) x[i] = (i * 53 % 97 - 48) / 20.0f;
  nm_count(w, 1, O, K, 0, O, start);
  nm_starts(start, O * 2);
  nm_fill(w, 1, O, K, 0, O, start, values, index);
  if (nm_product(x, y, 0, values, index, start, O, K, T, 0, T, 0, O, 0)) return 1;
  for (int t = 0; t < T; t++)
    for (int o = 0; o < O; o++) {
      double sum = 0;
      for (int k = 0; k < K; k++) sum += (double)x[t * K + k] * w[o * K + k];
      if (sum - y[t * O + o] > 1e-3 || sum - y[t * O + o] < -1e-3) return 2;
    }
  if (nm_sampled(x, y, index, start, O, K, T, 0, O, 0, sampled_to)) return 3;
  for (int o = 0; o < O; o++)
    for (int b = 0; b < 2; b++)
      for (int e = start[b * O + o]; e < start[b * O + o + 1]; e++) {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += (double)y[t * O + o] * x[t * K + b * 128 + index[e]];
        if (sum - sampled_to[e] > 1e-1 || sum - sampled_to[e] < -1e-1) return 4;
      }
  puts("right");
  return 0;
}
"""


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_thread_that_ends_leaves_no_memory() -> None:
    """As the threads of a server do that each serve one request."""
    matrix, x = PackedMatrix.empty(16, 1 << 14), torch.ones(64, 1 << 14)  # 4 MB a thread
    pack(torch.ones(16, 1 << 14), matrix)

    def serve(requests: int) -> int:
        for _ in range(requests):
            thread = threading.Thread(target=matrix.multiply, args=(x,))
            thread.start()
            thread.join()
        return resident()

    before = serve(5)
    assert serve(40) - before < 20 * 4 << 20


@pytest.mark.minutes
def test_on_arm(tmp_path: Path) -> None:
    """NEON, cross-compiled and emulated (Debian: gcc-aarch64-linux-gnu, qemu-user)."""
    compiler, emulator = map(shutil.which, ("aarch64-linux-gnu-gcc", "qemu-aarch64"))
    if compiler is None or emulator is None:
        pytest.skip("no gcc-aarch64-linux-gnu and qemu-user here")
    folder = resources.files(products.KERNELS.package)
    sources = [folder.joinpath(f"{name}.c").read_text() for name in products.KERNELS.sources]
    (code := tmp_path / "all.c").write_text("".join(sources) + ARM)
    flags = ["-O3", "-static", "-pthread", *products.KERNELS.flags]
    subprocess.run([compiler, *flags, str(code), "-o", str(tmp_path / "all"), "-lm"], check=True)
    ran = subprocess.run([emulator, str(tmp_path / "all")], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "right\n")


def test_a_cached_file_that_was_changed_or_is_not_ours_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def built() -> bool:
        return compiler.library("nm_parts", ("nm_parts",)) is not None  # the smallest

    assert built()
    (library,) = (tmp_path / "nmrun" / "kernels").glob("nm_parts-*.so")
    whole = library.read_bytes()

    def other(content: bytes) -> None:  # this process has the first one open
        (new := tmp_path / "new").write_bytes(content)
        new.replace(library)

    for damage in (
        lambda: other(b"no"),
        lambda: other(whole[:-1] + b"!"),
        lambda: library.chmod(0o666),
        lambda: library.with_suffix(".sha256").unlink(),
    ):
        damage()
        assert built()
        assert library.read_bytes() == whole
        assert not library.stat().st_mode & 0o022
