"""``nmrun bench train`` and ``nmrun bench infer``: training steps and forward passes on the machine at
hand.

``options`` reads the command, ``harness`` has what both share. ``nmrun doctor`` is here too.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    from nmrun.lab.bench import options

    arguments = options.parse(argv)
    what, out = arguments.pop("what"), arguments.pop("out")
    import torch

    from nmrun.lab.bench import harness

    module = importlib.import_module(f"nmrun.lab.bench.{what}")
    threads = torch.get_num_threads()
    try:
        harness.run(what, module.benchmark(**arguments), out, shlex.join(["nmrun", "bench", *argv]))
    finally:
        torch.set_num_threads(threads)
    return 0
