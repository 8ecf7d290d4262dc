"""Memory and time of one-shot pruning by the network's depth: ``nmrun.prune`` of GPT layouts with
random weights, one process for each method and depth.

``python benchmarks/oneshot_memory.py [--layers 12 24 48] [--methods wanda sparsegpt] [--out FOLDER]``.
Memory is the most that is resident while it prunes, beyond what is resident once weights, inputs and
libraries are there (``VmHWM`` less ``VmRSS`` of /proc/self/status); Linux only. Time is the CPU's.
Exits with 1 if a method's memory grows with the depth: by more than a tenth from the least depth to
the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import nmrun
from nmrun.lab.bench.harness import hardware
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.render.formats import aligned
from nmrun.oneshot import METHODS

VOCABULARY, MIB = 50257, 2**20
GROWTH = 1.1  # what counts as growing, over threefold and more depth


def resident(key: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS, or VmHWM, its peak."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def once(method: str, layers: int, width: int, context: int, texts: int) -> dict[str, float]:
    """Prune a network in this process: bytes of its weights, peak bytes beyond, CPU seconds."""
    # libraries and kernels are loaded at their first use
    nmrun.prune(GPTNetwork(64, 16, 2, 2, 64), [torch.zeros(1, 16, dtype=torch.long)], method)
    torch.manual_seed(0)
    model = GPTNetwork(VOCABULARY, context, layers, max(1, width // 64), width)
    batches = [torch.randint(VOCABULARY, (1, context)) for _ in range(texts)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = resident("VmRSS"), time.process_time()
    nmrun.prune(model, batches, method)
    seconds, peak = time.process_time() - began, resident("VmHWM") - before
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"weights": weights, "peak": peak, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--width", type=int, default=1024, help="default: 1024")
    parser.add_argument("--context", type=int, default=256, help="tokens of a text, default 256")
    parser.add_argument("--texts", type=int, default=8, help="calibration texts, default 8")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write oneshot_memory.md there")
    parser.add_argument("--once", nargs=2, metavar=("METHOD", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.width, options.context, options.texts)
    if options.once:
        print(json.dumps(once(options.once[0], int(options.once[1]), *sizes)))
        return 0
    rows, grows = [], False
    for method in options.methods:
        peaks = []
        for layers in sorted(options.layers):
            words = [sys.executable, __file__, *sys.argv[1:], "--once", method, str(layers)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout)
            peaks.append(found["peak"])
            sized = [f"{found[key] / MIB:,.0f}" for key in ("weights", "peak")]
            rows.append([method, str(layers), *sized, f"{found['seconds']:.0f}"])
            print(*rows[-1], flush=True)
        grows |= peaks[-1] > GROWTH * peaks[0]
    machine = hardware()
    text = (
        f"One-shot pruning to 2:4 of GPT layouts of width {options.width} with random weights, by "
        f"{options.texts} texts of {options.context} tokens.\n\n"
        f"{aligned(['method', 'layers', 'weights, MiB', 'peak beyond them, MiB', 'CPU seconds'], rows)}\n\n"
        f"{machine['cpu']}, 1 thread, torch {torch.__version__}, n = 1\n\n"
        f"    python benchmarks/oneshot_memory.py {' '.join(sys.argv[1:])}\n"
    )
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "oneshot_memory.md").write_text(text)
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
