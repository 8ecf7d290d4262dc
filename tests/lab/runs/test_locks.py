"""One process at a time has a run folder, also where it is deleted beside it, and where the file
system has no locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from runs import at_work

from nmrun.lab.runs import locks

HOLDER = """
import errno, fcntl, os, sys, time
from pathlib import Path
from nmrun.lab.runs import locks
if sys.argv[2] == "none":
    def none(*_): raise OSError(errno.ENOLCK, "No locks available")
    flock, fcntl.flock = fcntl.flock, lambda file, kind: (
        none() if os.fstat(file).st_ino == os.stat(sys.argv[1] + "/.lock").st_ino else flock(file, kind))
with locks.hold(Path(sys.argv[1])) as ours:
    child = os.fork()  # as a data loader's, which does not end with its parent
    if child:
        print(ours, child, flush=True)
    time.sleep(60)
"""


def without_locks(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without them; the folder for temporary files is on another."""
    flock = fcntl.flock

    def refused(file: int, kind: int) -> None:
        if (folder / ".lock").exists() and os.path.samestat(
            os.fstat(file), (folder / ".lock").stat()
        ):
            raise OSError(number, os.strerror(number))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.fixture(params=["flock", "none"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "none":
        without_locks(tmp_path, errno.ENOLCK, monkeypatch)
    return str(request.param)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_after_a_kill_the_folder_is_free_at_once(kind, tmp_path, temporary):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind], stdout=subprocess.PIPE, text=True
    ) as holder:
        ours, child = holder.stdout.readline().split()
        assert ours == "True"
        assert locks.is_locked(tmp_path)
        assert locks.holder(tmp_path) == f"process {holder.pid} on {os.uname().nodename}"
        with locks.hold(tmp_path) as again:
            assert not again
        holder.kill()
        holder.wait()
        try:
            assert not locks.is_locked(tmp_path)
            with locks.hold(tmp_path) as again:
                assert again
        finally:
            os.kill(int(child), signal.SIGKILL)
    assert [*tmp_path.iterdir(), *temporary.iterdir()] == []


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EIO]
)
def test_without_locks_of_the_file_system(number, tmp_path, temporary, monkeypatch):
    without_locks(tmp_path, number, monkeypatch)
    with locks.hold(tmp_path) as ours, locks.hold(tmp_path) as again:
        assert (ours, again, locks.is_locked(tmp_path)) == (True, False, True)
    assert not locks.is_locked(tmp_path)
    assert [*tmp_path.iterdir(), *temporary.iterdir()] == []


def test_asking_for_a_lock_keeps_nobody_from_it(tmp_path):
    assert not locks.is_locked(tmp_path / "nowhere")
    asking = os.open(tmp_path / locks.NAME, os.O_RDWR | os.O_CREAT)  # as is_locked() does
    fcntl.flock(asking, fcntl.LOCK_SH)
    assert not locks.is_locked(tmp_path)
    threading.Timer(0.03, os.close, [asking]).start()
    with locks.hold(tmp_path) as ours:
        assert ours


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / locks.NAME)
    assert not locks.is_locked(tmp_path)
    assert locks.holder(tmp_path) == "another process"


def test_one_who_waits_while_the_folder_is_deleted(tmp_path, monkeypatch):
    """It may get the lock of a file that has no name any more, and that keeps nobody out."""
    folder, asides, flock = tmp_path / "run", tmp_path / "deleted", fcntl.flock
    folder.mkdir()

    def late(file, kind):
        if folder.exists() and not asides.exists():  # between its open and its flock
            folder.rename(asides)
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with locks.hold(folder) as ours:
        assert not ours
    shutil.rmtree(asides)
    folder.mkdir()
    asides.mkdir()
    with locks.hold(folder) as first, locks.hold(folder) as second:
        assert (first, second) == (True, False)


def test_who_deletes_the_folder_leaves_the_next_one_s_lock(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with locks.hold(folder) as ours:
        assert ours
        folder.rename(tmp_path / "deleted")
        folder.mkdir()
        other = locks.hold(folder)
        assert other.__enter__()
    assert locks.is_locked(folder)
    other.__exit__(None, None, None)
    assert list(folder.iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    """A file that says nothing locks as well as one that does."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with locks.hold(tmp_path) as ours, locks.hold(tmp_path) as again:
        assert (ours, again, locks.holder(tmp_path)) == (True, False, "another process")
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space left"), locks.hold(tmp_path):
        pass


def test_a_folder_beside_leaves_none_but_those_of_others_at_work(tmp_path):
    place = tmp_path / "made"
    (remnant := tmp_path / f".another{locks.PARTIAL}x").mkdir()
    (own := tmp_path / ".another-1").mkdir()
    (live := tmp_path / f".third{locks.PARTIAL}y").mkdir()
    with at_work(live), locks.folder_beside(place) as part:
        assert not remnant.exists()
        (part / "new").mkdir()
        (part / "new").rename(place)
        with locks.folder_beside(place) as second:  # leaves the first alone
            assert part.exists()
            assert second != part
    assert sorted(tmp_path.iterdir()) == sorted([own, live, place])
