"""Arrays that are kept for the next run, and files of them that are not as they were written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nmrun.lab.runs import locks
from nmrun.lab.tasks import storage

ARRAYS = {"train": np.arange(50, dtype=np.uint16), "test": np.ones(20), "size": np.array(7)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path))
    monkeypatch.setattr(storage, "_compared", set())  # each is read as by a new process
    return tmp_path


def kept(made: list[str]) -> None:
    """Ask for the arrays, and compare them with what they should be."""
    found = storage.cached("what", [], lambda: made.append("made") or ARRAYS)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        flipped,
        lambda file: file.write_bytes(file.read_bytes().replace(b"train", b"Train")),
        lambda file: file.write_bytes(file.read_bytes().replace(b"U16", b"I16")),
        lambda file: file.write_bytes(file.read_bytes()[:-8]),
        lambda file: file.write_bytes(b""),
    ],
)
def test_arrays_that_were_changed_are_made_again(damage: Callable[[Path], object], cache: Path):
    made: list[str] = []
    kept(made)
    kept(made)
    assert len(made) == 1
    (file,) = cache.iterdir()
    damage(file)
    storage._compared.clear()
    kept(made)
    kept(made)
    assert len(made) == 2
    assert [*cache.iterdir()] == [file]


def test_what_a_kill_has_left_is_removed(cache, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(locks.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(storage.atomic, "sync", interrupted)
        kept([])
    (remnant,) = cache.iterdir()
    assert any(remnant.rglob("*.safetensors"))
    kept([])
    assert not remnant.exists()
    assert len([*cache.iterdir()]) == 1
