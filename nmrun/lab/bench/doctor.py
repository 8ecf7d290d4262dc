"""``nmrun doctor``: what this machine offers, and what of it gives right results, in a few lines."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence

from nmrun.errors import extra
from nmrun.lab.arguments import Parser
from nmrun.lab.output import quantity
from nmrun.registry import version_of

SHAPES = ((768, 3072), (2048, 8192), (4096, 16384))  # inputs and outputs of the timed layers
TOKENS = 8192


def main(argv: Sequence[str]) -> int:
    Parser(prog="nmrun doctor", description="What this machine offers to nmrun.").parse_args(argv)
    import torch

    from nmrun.fast.cpu.kernels import products
    from nmrun.kernels.compiler import find_compiler
    from nmrun.kernels.cpu import load
    from nmrun.lab.tasks import storage
    from nmrun.lab.train.track import logged_in
    from nmrun.patterns import Pattern

    masks, packed = load(Pattern(2, 4)) is not None, not products.KERNELS.obstacle()
    fairseq = importlib.util.find_spec("fairseq") is not None
    mode = os.environ.get("WANDB_MODE") or "offline unless track.mode=online"
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
        ("C compiler", find_compiler() or "none (cc, gcc, clang or $CC)"),
        ("CPU masks", "compiled" if masks else "plain torch: slower, same results"),
        ("CPU products", "compiled" if packed else "none: packed weights need a C compiler"),
        ("data folder", str(storage.data_folder())),
        ("W&B", f"{mode}, {'' if logged_in() else 'not '}logged in"),
        ("fairseq", "installed" if fairseq else f"not installed ({extra('translation')})"),
    ]:
        print(f"{name:<15} {value}", flush=True)
    return 0


def platform_of_torch() -> str:
    """What GPUs torch was built for."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}: not tried with nmrun, see docs/gpu.md"
    return f"CUDA {torch.version.cuda or 'not built in'}"


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
