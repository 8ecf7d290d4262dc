"""Triton's kernels without a GPU: right in the interpreter, and good machine code for the GPUs that
have sparse tensor cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nmrun import optim
from nmrun.kernels import cpu, projection
from nmrun.kernels.layout import Update
from nmrun.patterns import Pattern
from nmrun.rule import Rule

triton = pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels for Linux")

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARCHITECTURES = [80, 90, 100]  # Ampere, Hopper, Blackwell


@pytest.mark.parametrize(
    ("where", "which"),
    [
        pytest.param("interpreter", "not minutes", marks=pytest.mark.slow),
        pytest.param("interpreter", "minutes", marks=pytest.mark.minutes),
        pytest.param("device", "minutes or not minutes", marks=ON_GPU),
    ],
)
def test_against_the_reference(where, which):
    file = Path(__file__).parents[1] / "triton_interpreted.py"
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, str(file)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": str(int(where == "interpreter"))},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert "[100%]" in process.stdout


def compiled(
    kernel: Any, architecture: int, types: dict[str, str], whole: str = "", **constants: Any
) -> Any:
    """A kernel whose pointers 16 divides, and the number ``whole``, in Triton's own words."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == whole
    }
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False})


class Compiled:
    """One kernel, compiled for an architecture without a device: its global memory instructions, by
    kind, and what it needs.
    """

    def __init__(
        self,
        kernel: Any,
        architecture: int,
        ratio: str,
        strided: bool = False,
        short: bool = False,
        across: int = 33,
        **constants: Any,
    ) -> None:
        from nmrun.kernels import triton_groups

        shape, dim = ((64, across), 0) if strided else ((64, 64 + short), 1)
        pattern = Pattern.parse(ratio).over(shape[dim])
        *_, fixed = triton_groups.shape_of(torch.empty(shape, device="meta"), pattern, dim)
        fixed |= constants
        types = {
            "weight": "*fp32", "out": "*fp32", "amount": "fp32", "table": "*i64", "owner": "*i32",
            "scalars": "*fp32", "columns": "i32", "inner": "i32", "size": "i32", "scale": "*fp32",
        }  # fmt: skip
        types |= fixed.pop("types", {})
        names = kernel.arg_names
        fixed |= {} if fixed.get("SCALED") else {"scale": None}
        fixed = {n: v for n, v in fixed.items() if n in names}
        kept = {n: types[n] for n in names if n not in fixed}
        built = compiled(kernel, architecture, kept, **fixed)
        self.ptx, self.shared = built.asm["ptx"], built.metadata.shared
        self.loads = Counter(re.findall(r"\bld\.global\.([.\w]+)", self.ptx))
        self.stores = Counter(re.findall(r"\bst\.global\.([.\w]+)", self.ptx))
        assert f"sm_{architecture}" in self.ptx
        assert built.asm["cubin"]


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("gpu") is None:  # on a device a second call is fast
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def project_one(architecture: int, ratio: str, mode: int = 0, **options: Any) -> Compiled:
    from nmrun.kernels import triton_projection

    options = {"SCALED": False, "MODE": mode, **options}
    return Compiled(triton_projection.project_one, architecture, ratio, **options)


def many(kernel: Any, architecture: int, weight: Any, fields: int, **options: Any) -> Compiled:
    dtypes = {"WEIGHT": weight, "OUT": weight, "FIELDS": fields}
    return Compiled(kernel, architecture, "2:4", **dtypes, **options)


@pytest.mark.slow
# hard, soft and decayed
@pytest.mark.parametrize(("architecture", "mode"), [(80, 0), (90, 1), (100, 2)])
def test_2_of_4_goes_16_bytes_at_a_time_and_through_registers_alone(architecture, mode):
    """2,048 weights for 128 threads: four vectors of four each."""
    built = project_one(architecture, "2:4", mode)
    assert built.loads == built.stores == {"v4.b32": 4}
    assert built.shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_2_of_4_from_a_table(architecture):
    import triton.language as tl

    from nmrun.kernels.triton_projection import project_many

    built = many(project_many, architecture, tl.float32, 7, MODE=0, SCALED=False)
    assert built.loads["v4.b32"] == 4
    assert built.stores == {"v4.b32": 4}
    assert built.loads.keys() <= {"v4.b32", "b64", "b32"}  # besides, the table
    assert built.loads["b32"] + built.loads["b64"] < 10
    assert built.shared == 0
    narrow = many(project_many, architecture, tl.bfloat16, 7, MODE=0, SCALED=False)
    assert narrow.stores == {"v2.b32": 4}
    assert narrow.loads["v2.b32"] == 4
    assert narrow.shared == 0


@pytest.mark.slow
def test_the_step_of_adam():
    import triton.language as tl

    from nmrun.kernels.triton_adamw import adam_many

    flags = ("DECAYED", "SPARED", "HAS_MASK", "COUPLED", "FROZEN")
    plainly = {**dict.fromkeys(flags, False), "MODE": 0}
    built = many(adam_many, 90, tl.float32, 11, **{**plainly, "DECAYED": True})
    assert built.loads["v4.b32"] == 5 * 4  # weight, gradient, two moments, old working copy
    assert built.stores == {"v4.b32": 4 * 4}
    assert built.shared == 0
    assert re.search(r"\bsqrt\.rn\.f32", built.ptx)
    assert re.search(r"\bdiv\.rn\.f32", built.ptx)
    # operation by operation, and subnormals stay
    assert not re.search(r"\bfma|\.ftz|\.approx", built.ptx)
    plain = many(adam_many, 90, tl.float32, 11, **plainly)
    assert plain.loads["v4.b32"] == 4 * 4  # without decay nobody asks for the old working copy
    masked = many(adam_many, 90, tl.float32, 11, **{**plainly, "HAS_MASK": True, "SPARED": True})
    assert masked.loads["v4.b32"] == 4 * 4
    # the mask, four bytes at a time, and ``spared``
    assert masked.loads["b32"] == 4 + 1 + plain.loads["b32"]
    frozen = many(adam_many, 90, tl.float32, 11, **{**plainly, "FROZEN": True})
    assert frozen.stores == {"v4.b32": 3 * 4}  # weight, first moment, working copy
    for mode in (1, 2):
        other = many(adam_many, 90, tl.float32, 11, **{**plainly, "MODE": mode})
        assert other.loads["v4.b32"] == other.stores["v4.b32"] == 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "n"), [(90, 3), (100, 2), (80, 1)])
def test_the_unbiased_estimate(architecture, n):
    """16 bytes at a time, and threads exchange nothing."""
    from nmrun.kernels.triton_mvue import estimate_one

    types = {"x": "*bf16", "out": "*bf16", "seed": "*i32", "inner": "i32"}
    built = compiled(estimate_one, architecture, types, "inner", N=n, COLUMNS=1024)
    ptx = built.asm["ptx"]
    assert f"sm_{architecture}" in ptx
    assert built.asm["cubin"]
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx)) == 4
    assert len(re.findall(r"\bst\.global\.v4\.b32", ptx)) == 4
    assert built.metadata.shared == 0


@pytest.mark.parametrize(
    ("ratio", "options"),
    [("2:4", {"strided": True}), ("1:16", {"strided": True}), ("2:4", {"short": True})],
)
def test_strided_and_short_groups_compile(ratio, options):
    built = project_one(90, ratio, **options)
    assert built.loads.keys() == built.stores.keys() == {"b32"}
    assert built.shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_strided_groups_of_a_wide_weight_are_vectors_too(architecture):
    """As double pruning has them; neighbours in memory are neighbours in a thread, and none asks
    another for its numbers."""
    built = project_one(architecture, "2:4", strided=True, across=768)
    assert built.loads == built.stores == {"v4.b32": 4}
    assert built.shared == 0
    assert "shfl" not in built.ptx


# --- who calls them -------------------------------------------------------------------------------


def test_neither_cpu_nor_other_devices_are_triton_s(monkeypatch):
    monkeypatch.setattr(projection, "on_cuda", lambda *args: pytest.fail("asked for CUDA"))
    weight = torch.randn(64, 128)
    out = torch.empty_like(weight)
    assert not projection.project(weight.to("meta"), out.to("meta"), Pattern(2, 4), 1)
    by_compiler = cpu.load(Pattern(2, 4)) is not None
    assert projection.project(weight, out, Pattern(2, 4), 1, factor=0.5) is by_compiler


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_recipes_do_not_wait_for_it():
    from nmrun.sparsity import hard_threshold, soft_threshold

    weight, scale = torch.randn(256, 512, device="cuda"), torch.tensor(1.25, device="cuda")
    out, param = torch.empty_like(weight), torch.nn.Parameter(torch.randn(256, 512, device="cuda"))
    optimizer = optim.AdamW([param])
    rule = Rule(pruned_gradient_decay=0.1)
    copies = {param: Update(param.detach(), torch.zeros_like(weight), 1, Pattern(2, 4), rule)}
    param.grad = torch.randn_like(param)
    assert optimizer.plan(copies) == [param]
    optimizer.step()
    assert projection.project(weight, out, Pattern(2, 4), 1)
    assert torch.equal(out, hard_threshold(weight, "2:4"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert projection.project(weight, out, Pattern(2, 4), 1, soft=True, scale=scale)
        optimizer.plan(copies)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, soft_threshold(weight, "2:4") * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ratio"), [(80, "64:4:16"), (90, "16:2:7"), (100, "64:4:64")]
)
def test_blocks_compile_without_memory_of_their_own(architecture, ratio):
    """Each weight is read twice and written once; columns are found in registers."""
    from nmrun.kernels import triton_blocks

    types = {"weight": "*fp32", "out": "*fp32", "amount": "fp32", "groups": "i32", "columns": "i32"}
    constants = {**triton_blocks.constants_of(Pattern.parse(ratio)), "MODE": 0}
    built = compiled(triton_blocks.project_blocks, architecture, types, **constants)
    assert built.asm["cubin"]
    assert "st.local" not in built.asm["ptx"]
