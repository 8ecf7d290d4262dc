"""A run in shards needs no process that has room for the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import big_shards
import pytest

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.minutes
def test_the_leader_holds_no_more_than_the_others(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TORCHRUN, big_shards.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # what is freed goes back to the system
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    leader, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert 0.4 < other["build"] < 0.6  # half of the model
    assert leader["build"] == pytest.approx(other["build"], abs=0.1)
    for name in ("begin", "go on"):
        # its halves of weights, gradients, moments, dense weights and the best weights
        assert 2.5 < other[name] < 5
        assert leader[name] == pytest.approx(other[name], abs=0.25)
