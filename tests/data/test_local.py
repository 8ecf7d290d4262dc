"""Arrays that are kept for the next run, and two processes that find them cut off."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nmrun.data import local

# says that it has seen the damage, and goes on when it is told to
SLOW = """
import sys, time
from pathlib import Path
import numpy as np
from nmrun.data import local
place, load = Path(sys.argv[1]), local.np.load

def seen(path, **how):
    try:
        return load(path, **how)
    except ValueError:
        (place / "seen").touch()
        while not (place / "go").exists():
            time.sleep(0.01)
        raise

local.np.load = seen
def make():
    (place / "made again").touch()
    return {"values": np.arange(1000)}
assert local.cached("what", [], make)["values"].tolist() == list(range(1000))
"""


def test_who_finds_it_cut_off_late_leaves_what_another_has_made_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))

    def arrays() -> list[int]:
        return local.cached("what", [], lambda: {"values": np.arange(1000)})["values"].tolist()

    arrays()
    (file,) = (tmp_path / "cache").rglob("values.npy")
    file.write_bytes(file.read_bytes()[:500])
    slow = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)])
    until = time.monotonic() + 60
    while not (tmp_path / "seen").exists():
        assert slow.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    assert arrays() == list(range(1000))
    made = file.stat().st_ino
    (tmp_path / "go").touch()
    assert slow.wait(60) == 0
    assert not (tmp_path / "made again").exists()
    assert file.stat().st_ino == made
    assert os.listdir(tmp_path / "cache") == [file.parent.name]
    assert os.listdir(file.parent) == [file.name]
