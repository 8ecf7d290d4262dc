"""``nmrun doctor``: what this machine offers, and what it can accelerate, in a few lines."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from functools import partial

from nmrun.errors import extra
from nmrun.lab.arguments import Parser
from nmrun.lab.output import quantity
from nmrun.registry import version_of

# inputs and outputs of the layers in the speed table
SHAPES = (
    (768, 3072),
    (2048, 8192),
    (4096, 16384),
)
TOKENS = 8192
CPU_SHAPE, CPU_TOKENS = (1024, 4096), (1, 256)


def main(argv: Sequence[str]) -> int:
    """Print what is installed, test the 2:4 paths and measure briefly; returns 1 if something
    necessary is missing."""
    Parser(prog="nmrun doctor", description="What this machine offers to nmrun.").parse_args(argv)
    import torch

    from nmrun.kernels.compiler import find_compiler
    from nmrun.kernels.cpu import load
    from nmrun.lab.tasks import storage
    from nmrun.lab.train.track import logged_in
    from nmrun.patterns import Pattern

    compiler = find_compiler()
    built = load(Pattern(2, 4)) is not None
    projection = (
        f"compiled with {compiler}"
        if built
        else "plain torch (no working C compiler): slower, same results"
    )
    speed, copy = bandwidth()
    data = storage.data_folder()
    mode = os.environ.get("WANDB_MODE") or "offline unless track.mode=online"
    wandb = f"{mode}, {'' if logged_in() else 'not '}logged in"
    fairseq = (
        "installed"
        if importlib.util.find_spec("fairseq")
        else f"not installed ({extra('translation')})"
    )
    writable = os.access(".", os.W_OK)
    for name, value in [
        ("nmrun", version_of("nmrun") or "not installed, read from its folder"),
        ("python", platform.python_version()),
        (
            "torch",
            f"{torch.__version__}, {quantity(torch.get_num_threads(), 'thread')}, {platform_of_torch()}",
        ),
        *gpus(),
        ("cuSPARSELt", cusparselt()),
        *accelerated(),
        *packed(),
        ("CPU projection", projection),
        (
            "",
            f"2:4 at {speed:.1f} GB/s; a copy takes {copy:.1f} GB/s: {copy / speed:.1f} times a copy's time",
        ),
        ("data folder", f"{data}" + ("" if data.exists() else " (does not exist yet)")),
        ("W&B", wandb),
        ("fairseq", fairseq),
        ("this folder", "writable" if writable else "not writable: give output_dir=..."),
    ]:
        print(f"{name:<15} {value}", flush=True)
    return 0 if writable else 1


def platform_of_torch() -> str:
    """What GPUs torch was built for."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}: not tried with nmrun, see docs/gpu.md"
    return f"CUDA {torch.version.cuda or 'not built in'}"


def bandwidth(columns: int = 4096) -> list[float]:
    """GB/s (read and written) on this CPU: of the 2:4 projection of a weight, compiled where it can be,
    and of a copy of it."""
    import torch

    from nmrun.fast.cpu.probe import side_by_side
    from nmrun.kernels import projection
    from nmrun.patterns import Pattern
    from nmrun.sparsity import reference

    weight, out, pattern = torch.randn(1024, columns), torch.empty(1024, columns), Pattern(2, 4)

    def project() -> None:
        if not projection.project(weight, out, pattern, 1):
            out.copy_(reference.hard_threshold(weight, pattern, 1))

    times = side_by_side(project, partial(out.copy_, weight))
    return [2 * weight.nbytes / ms / 1e6 for ms in times]


def gpus() -> Iterator[tuple[str, str]]:
    import torch

    from nmrun.lab.bench.harness import nvidia_smi

    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        yield (
            "GPU",
            f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB",
        )
    if not torch.cuda.device_count():
        yield "GPU", "none"
    yield "driver", next(iter(nvidia_smi("driver_version")), "none")


def cusparselt() -> str:
    """The version of the cuSPARSELt that this process has loaded."""
    from nmrun.fast.gpu.kernels.cusparselt import loaded_cusparselt

    library = loaded_cusparselt()
    if library is None:
        return "not loaded (this torch has none): no 2:4 products by it"
    version, path = library
    return f"{'.'.join(map(str, version))} ({path})"


def accelerated() -> Iterator[tuple[str, str]]:
    """Which 2:4 paths give right results on the first GPU, and their speed against the dense
    product."""
    import torch

    from nmrun.fast.gpu import probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if why := probe.obstacle(device):
        yield "2:4 products", f"none: {why}; masks train anywhere"
        return
    for inputs, outputs in SHAPES:
        shape = probe.SemiStructuredShape(outputs, inputs, TOKENS, torch.bfloat16)
        with torch.no_grad():
            times = probe.measure(shape, device)
        dense = times.pop("dense").forward
        cells = [f"dense {dense:.3f} ms"]
        for name, t in times.items():
            found = t.wrong or f"right, {t.forward:.3f} ms ({dense / t.forward:.2f}x)"
            cells.append(f"{name} {found}")
        yield "2:4 products", f"{shape}: {', '.join(cells)}"


def packed() -> Iterator[tuple[str, str]]:
    """How fast a layer of packed N:M weights is on this CPU, against torch's dense product and
    oneDNN's."""
    import torch

    from nmrun.fast.cpu.kernels import products
    from nmrun.fast.cpu.onednn import OneDNNLinear
    from nmrun.fast.cpu.packed_linear import PackedLinear
    from nmrun.fast.deploy import milliseconds
    from nmrun.sparsity.masks import hard_threshold

    if products.KERNELS.obstacle():
        yield "CPU products", "none: packed N:M weights need a C compiler (cc, gcc, clang or $CC)"
        return
    inputs, outputs = CPU_SHAPE
    for pattern in ("2:4", "1:8"):
        weight = hard_threshold(torch.randn(outputs, inputs), pattern)
        layer = PackedLinear.of(weight)
        for tokens in CPU_TOKENS:
            x = torch.randn(tokens, inputs)
            dense = partial(torch.nn.functional.linear, x, weight)
            calls = {"torch": [dense], "packed": [partial(layer, x)]}
            if torch.backends.mkldnn.is_available():
                calls["oneDNN"] = [partial(OneDNNLinear(weight, None), x)]
            with torch.no_grad():
                times = milliseconds(calls, x.device)
            best = min(ms for name, ms in times.items() if name != "packed")
            cells = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(times.items()))
            yield (
                "CPU products",
                f"{pattern}, {inputs} to {outputs}, {tokens} tokens: {cells} ({best / times['packed']:.2f}x)",
            )
