"""``nmrun doctor``: what this machine offers, and what of it gives right results, in a few lines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nmrun.errors import extra
from nmrun.lab.arguments import Parser
from nmrun.registry import version_of

if TYPE_CHECKING:
    import torch

SHAPE = 3072, 768, 8192  # outputs, inputs and tokens of the layer that is tried


def main(argv: Sequence[str]) -> int:
    Parser(prog="nmrun doctor", description="What this machine offers to nmrun.").parse_args(argv)
    for name, value in lines():
        print(f"{name:<18} {value}", flush=True)
    return 0


def lines() -> Iterator[tuple[str, object]]:
    import torch

    from nmrun.fast.cpu.kernels import products
    from nmrun.kernels.compiler import find_compiler
    from nmrun.kernels.cpu import load
    from nmrun.lab.bench.harness import hardware
    from nmrun.lab.tasks import storage
    from nmrun.lab.train.track import logged_in
    from nmrun.patterns import Pattern

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masks, packed = load(Pattern(2, 4)) is not None, not products.KERNELS.obstacle()
    fairseq = importlib.util.find_spec("fairseq") is not None
    mode = os.environ.get("WANDB_MODE") or "offline unless track.mode=online"
    yield "nmrun", version_of("nmrun") or "not installed, read from its folder"
    yield from hardware(device).items()
    if torch.version.hip:
        yield "rocm", f"{torch.version.hip}: not tried with nmrun, see docs/gpu.md"
    yield "2:4 products", accelerated(device)
    yield "C compiler", find_compiler() or "none (cc, gcc, clang or $CC)"
    yield "CPU masks", "compiled" if masks else "plain torch: slower, same results"
    yield "CPU products", "compiled" if packed else "none: packed weights need a C compiler"
    yield "data folder", storage.data_folder()
    yield "W&B", f"{mode}, {'' if logged_in() else 'not '}logged in"
    yield "fairseq", "installed" if fairseq else f"not installed ({extra('translation')})"


def accelerated(device: torch.device) -> str:
    """Which 2:4 paths give right results on a device."""
    import torch

    from nmrun.fast.gpu import probe

    if why := probe.obstacle(device):
        return f"none: {why}; masks train anywhere"
    with torch.no_grad():
        times = probe.measure(probe.SemiStructuredShape(*SHAPE, torch.bfloat16), device)
    return ", ".join(f"{name} {t.wrong or 'right'}" for name, t in times.items() if name != "dense")
