"""What ``nmrun doctor`` says, with GPUs and libraries that are not there played by others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nmrun.fast.gpu import probe, semi_structured
from nmrun.fast.gpu.kernels import cusparselt
from nmrun.fast.measurement import Times
from nmrun.lab.bench import doctor, harness


def gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int = 0) -> None:
    about = SimpleNamespace(
        name="Test GPU", major=major, minor=minor, total_memory=80 * 2**30, uuid=1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)


def test_the_weight_of_the_test_is_2_of_4_both_ways():
    weight = semi_structured.transposable(16, 24, "cpu").float()
    for groups in (weight.reshape(-1, 4), weight.T.reshape(-1, 4)):
        assert set((groups != 0).sum(1).tolist()) == {2}


def test_the_loaded_version_is_the_one_torch_knows():
    library = cusparselt.loaded_cusparselt()
    number = (
        torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None
    )
    if not number:
        pytest.skip("this torch has no cuSPARSELt")
    assert library is not None
    major, minor, patch = library[0]
    assert number == 1000 * major + 100 * minor + patch


def test_what_was_measured_of_each_path(monkeypatch):
    gpu(monkeypatch, 9)
    times = {
        "dense": Times(forward=3.0),
        "good": Times(forward=2.0),
        "bad": Times(wrong="WRONG results"),
    }
    monkeypatch.setattr(probe, "measure", lambda shape, device: dict(times))
    assert doctor.accelerated(torch.device("cuda")) == "good right, bad WRONG results"


def test_gpus_without_2_4_products_and_none(monkeypatch):
    def said(name: str) -> str:
        return dict(doctor.lines())[name]

    assert said("2:4 products") == "none: no CUDA device; masks train anywhere"
    gpu(monkeypatch, 7, 5)
    monkeypatch.setattr(harness, "nvidia_smi", lambda *fields, gpu: ["700 W", "1980 MHz", "999.1"])
    lines = dict(doctor.lines())
    assert (lines["gpu"], lines["compute_capability"], lines["driver"]) == (
        "Test GPU",
        "7.5",
        "999.1",
    )
    assert (
        lines["2:4 products"] == "none: this GPU has no sparse tensor cores; masks train anywhere"
    )
    # GPUs of ROCm are CUDA devices to torch, of capability 9.4
    gpu(monkeypatch, 9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert "this torch is for ROCm; masks train anywhere" in said("2:4 products")
    assert said("rocm") == "6.4.1: not tried with nmrun, see docs/gpu.md"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_the_whole_of_it_on_a_cpu(compiler, monkeypatch, capsys, request):
    if not compiler:
        request.getfixturevalue("no_compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[:18].strip(): line[19:] for line in lines}
    assert {"nmrun", "cpu", "torch", "python"} <= said.keys()
    for name in ("CPU masks", "CPU products"):
        assert (said[name] == "compiled") is (compiler and said["C compiler"][:4] != "none")


def test_what_cusparselt_is_asked_to_multiply(monkeypatch):
    """Played: the compressed operand, the dense one filled up to 16 tokens, bias, algorithm."""
    seen: list[tuple[Any, ...]] = []

    def multiply(
        packed: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        algorithm: int = 0,
    ) -> Tensor:
        seen.append((*x.shape, algorithm))
        product = x.double() @ packed.double().t()
        return (product if bias is None else product + bias.double()).bfloat16()

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(cusparselt, "multiply", multiply)
    weight = semi_structured.transposable(32, 64, "cpu")
    x, dz, bias = (torch.randn(*size, dtype=torch.bfloat16) for size in ((37, 64), (37, 32), (32,)))
    parts, parts_t = map(semi_structured.CUSPARSELT.pack, (weight, weight.t()))
    torch.testing.assert_close(
        semi_structured.named("cusparselt:3").multiply(x, parts, bias),
        torch.nn.functional.linear(x.double(), weight.double(), bias.double()).bfloat16(),
    )
    torch.testing.assert_close(
        semi_structured.CUSPARSELT.multiply(dz, parts_t, None),
        (dz.double() @ weight.double()).bfloat16(),
    )
    assert seen == [(48, 64, 3), (48, 32, 0)]


def test_the_fastest_algorithm_that_is_right(monkeypatch):
    """Five of a library, played: one is refused, the fastest is wrong, the next is not the same
    every time.
    """
    calls, wrong, restless, right, slow = [0], 1, 2, 3, 4

    def multiply(packed: Tensor, x: Tensor, bias: Tensor | None = None, algorithm: int = 0):
        calls[0] += 1
        if algorithm == 0:
            raise RuntimeError("cuSPARSELt's MatmulPlanInit: not supported")
        off = (algorithm == wrong) * 1.0 + (algorithm == restless) * 1e-3 * calls[0]
        return (x.float() @ packed.float().t()).add_(off).bfloat16()

    times = {wrong: 1.0, restless: 2.0, right: 3.0, slow: 4.0}

    def milliseconds(call: Any, repeats: int = 20, graph: bool = False) -> float:
        call()  # the one that is refused refuses
        return times[call.keywords["algorithm"]]

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(cusparselt, "multiply", multiply)
    monkeypatch.setattr(cusparselt, "algorithms", lambda packed, x: 5)
    monkeypatch.setattr(semi_structured, "milliseconds", milliseconds)
    weight, x = semi_structured.transposable(16, 32, "cpu"), torch.randn(16, 32).bfloat16()
    parts = semi_structured.CUSPARSELT.pack(weight)
    expected = x.float() @ weight.float().t()
    fastest = semi_structured.fastest("cusparselt", x, parts, None, expected)
    assert fastest == ("cusparselt:3", 3.0)
    with pytest.raises(ValueError, match="WRONG results"):
        semi_structured.fastest("cusparselt", x, parts, None, expected + 5)
