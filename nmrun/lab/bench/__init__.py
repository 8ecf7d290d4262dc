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

    asked = options.parse(argv)
    what, out = asked.pop("what"), asked.pop("out")
    from nmrun.lab.bench import harness  # torch

    benchmark = importlib.import_module(f"nmrun.lab.bench.{what}").benchmark(**asked)
    harness.run(what, benchmark, out, shlex.join(["nmrun", "bench", *argv]))
    return 0
