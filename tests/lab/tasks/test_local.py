"""Arrays that are kept for the next run, and two processes that find them cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nmrun.lab.runs import locks
from nmrun.lab.tasks import storage

# says that it has seen the damage, and goes on when it is told to
SLOW = """
import sys, time
from pathlib import Path
import numpy as np
import pytest
from nmrun.lab.tasks import storage
place, hold = Path(sys.argv[1]), storage.locks.hold

def seen(folder):
    (place / "seen").touch()
    while not (place / "go").exists():
        time.sleep(0.01)
    return hold(folder)

storage.locks.hold = seen
def make():
    (place / "made again").touch()
    return {"values": np.arange(1000)}
assert storage.cached("what", [], make)["values"].tolist() == list(range(1000))
"""


def test_who_finds_it_cut_off_late_leaves_what_another_has_made_since(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))

    def arrays():
        return storage.cached("what", [], lambda: {"values": np.arange(1000)})["values"].tolist()

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
    inode = file.stat().st_ino
    (tmp_path / "go").touch()
    assert slow.wait(60) == 0
    assert not (tmp_path / "made again").exists()
    assert file.stat().st_ino == inode
    assert os.listdir(tmp_path / "cache") == [file.parent.name]
    assert sorted(os.listdir(file.parent)) == ["arrays.json", file.name]


# a process reads a file once; each folder is another's
READ = """
import os, sys
import numpy as np
import pytest
from nmrun.lab.tasks import storage
def make():
    print(os.environ["NMRUN_CACHE"])
    return arrays()
def arrays():
    return {"train": np.arange(5000), "test": np.ones(2000), "labels": np.zeros(2000)}
for os.environ["NMRUN_CACHE"] in sys.argv[1:]:
    found = storage.cached("what", [], make)
    for name, array in arrays().items():
        assert (found[name] == array).all(), name
"""


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lost(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(4096) + data[8192:])


def without(file: Path, name: str) -> str:
    records = json.loads(file.read_text())
    return json.dumps({key: about for key, about in records.items() if key != name})


DAMAGES = {
    "an array gone": ("test.npy", Path.unlink),
    "another gone": ("labels.npy", Path.unlink),
    "a bit": ("train.npy", flipped),
    "a bit of a label": ("labels.npy", flipped),
    "a page": ("train.npy", lost),
    "cut off": ("test.npy", lambda file: file.write_bytes(file.read_bytes()[:-8])),
    "cut off early": ("train.npy", lambda file: file.write_bytes(file.read_bytes()[:40])),
    "empty": ("labels.npy", lambda file: file.write_bytes(b"")),
    "an array of another": (
        "test.npy",
        lambda f: f.write_bytes((f.parent / "labels.npy").read_bytes()),
    ),
    "no list": ("arrays.json", Path.unlink),
    "an empty list": ("arrays.json", lambda file: file.write_text("{}")),
    "another list": ("arrays.json", lambda file: file.write_text('{"test": 1}')),
    "an entry gone": ("arrays.json", lambda file: file.write_text(without(file, "test"))),
    "no JSON": ("arrays.json", lambda file: file.write_text("{")),
}


@pytest.mark.parametrize("kind", ["a bit of a label", "an entry gone"])
def test_arrays_that_were_changed_are_made_again(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path))
    monkeypatch.setattr(storage, "_folders", set())  # each is read as by a new process
    arrays = {"train": np.arange(50), "test": np.ones(20), "labels": np.zeros(20)}
    storage.cached("what", [], lambda: arrays)
    name, damage = DAMAGES[kind]
    damage(next(tmp_path.rglob(name)))
    storage._folders.clear()
    found = storage.cached("what", [], lambda: arrays)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert len(os.listdir(tmp_path)) == 1


def test_what_a_kill_has_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(locks.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(storage.atomic, "write", interrupted)
        storage.cached("what", [], lambda: {"train": np.arange(50)})
    (remnant,) = tmp_path.iterdir()
    assert any(remnant.rglob("train.npy"))
    storage.cached("another", [], lambda: {"train": np.arange(50)})
    assert not remnant.exists()
    assert len(os.listdir(tmp_path)) == 1


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_other_arrays_than_were_made_are_made_again(tmp_path):
    places = {kind: tmp_path / kind for kind in DAMAGES}

    def rebuild():
        command = [sys.executable, "-c", READ, *map(str, places.values())]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        return [Path(line).name for line in process.stdout.splitlines()]

    assert rebuild() == [*DAMAGES]
    assert rebuild() == []
    for kind, (name, damage) in DAMAGES.items():
        (file,) = places[kind].rglob(name)
        damage(file)
    assert rebuild() == [*DAMAGES]
    assert rebuild() == []
