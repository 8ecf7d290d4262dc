"""What a run does not load, since it has no use for it."""

import subprocess
import sys

import pytest

LINES = (
    "recipe=step sparsity=2:8",
    "recipe=sr_ste sparsity=2:4 optimizer=sgd trainer.clip=1",
    "recipe=s_ste sparsity=2:4 optimizer=adamw model=mlp",
    "sparsity=dense optimizer=adamw",
)
SMALL = "trainer.epochs=2 trainer.limit_batches=2 trainer.device=cpu track=local"
PROBE = """
import gc, sys
from nmrun.lab.cli import main
for line in sys.argv[1:]:
    sys.argv = ["nmrun", *line.split()]
    status = main()
    loaded = [name for name in ("torch._dynamo", "sympy", "wandb", "pandas", "nmrun.fast.acceleration") if name in sys.modules]
    print("PROBE", status, loaded, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.slow
def test_a_run_loads_no_compiler(tmp_path):
    """Torch imports its compiler, and sympy with it, where an optimizer is made or steps and where
    shapes are computed in Python. What is loaded is not searched for garbage.
    """
    lines = [f"{line} {SMALL} output_dir={tmp_path}" for line in LINES]
    process = subprocess.run(
        [sys.executable, "-c", PROBE, *lines], capture_output=True, text=True, timeout=120
    )
    probes = [line for line in process.stdout.splitlines() if line.startswith("PROBE")]
    assert probes == ["PROBE 0 [] True True"] * len(LINES), process.stderr
