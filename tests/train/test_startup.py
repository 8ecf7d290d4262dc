"""What a run does not load, since it has no use for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import gc, sys
from nmrun.cli import main
status = main()
loaded = [name for name in ("torch._dynamo", "sympy", "wandb", "pandas") if name in sys.modules]
print(status, loaded, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.parametrize(
    "line",
    [
        "recipe=step sparsity=2:8",
        "recipe=sr_ste sparsity=2:4 optimizer=sgd trainer.clip=1",
        "recipe=s_ste sparsity=2:4 optimizer=adamw model=mlp",
        "sparsity=dense optimizer=adamw trainer.diagnose_every=2",
    ],
)
def test_a_run_loads_no_compiler(tmp_path: Path, line: str) -> None:
    """Torch imports its compiler, and sympy with it, where an optimizer is made or steps and where
    shapes are computed in Python. What is loaded is not searched for garbage.
    """
    small = ("trainer.epochs=2", "trainer.limit_batches=2", "trainer.device=cpu", "track=local")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *line.split(), *small, f"output_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == "0 [] True True", done.stderr
