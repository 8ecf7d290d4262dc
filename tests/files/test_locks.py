"""One process at a time has a run folder, also where the file system has no locks or another host
has it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nmrun.files import locks

HOLDER = """
import errno, fcntl, os, sys, time
from pathlib import Path
from nmrun.files import locks
if sys.argv[2] == "none":
    def none(*_): raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = none
with locks.hold(Path(sys.argv[1])) as ours:
    child = os.fork()  # as a data loader's, which does not end with its parent
    if child:
        print(ours, child, flush=True)
    time.sleep(60)
"""


def none(number: int) -> Any:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.fixture(params=["flock", "none"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "none":
        monkeypatch.setattr(fcntl, "flock", none(errno.ENOLCK))
    return str(request.param)


def test_after_a_kill_the_folder_is_free_at_once(kind: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        ours, child = holder.stdout.readline().split()
        assert ours == "True"
        assert locks.held(tmp_path)
        assert locks.holder(tmp_path) == f"process {holder.pid} on {os.uname().nodename}"
        with locks.hold(tmp_path) as again:
            assert not again
        holder.kill()
        holder.wait()
        try:
            assert not locks.held(tmp_path)
            with locks.hold(tmp_path) as again:
                assert again
        finally:
            os.kill(int(child), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EIO]
)
def test_without_locks_of_the_file_system(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", none(number))
    with locks.hold(tmp_path) as ours, locks.hold(tmp_path) as again:
        assert (ours, again, locks.held(tmp_path)) == (True, False, True)
    assert not locks.held(tmp_path)
    assert list(tmp_path.iterdir()) == []


def of_another_host(folder: Path, age: float) -> str:
    lease = folder / locks.LEASE
    text = json.dumps({"host": "node7", "pid": os.getpid(), "boot": "another"})
    lease.write_text(text)
    os.utime(lease, (time.time() - age,) * 2)
    return text


def test_another_host_has_it_while_its_heart_beats(kind: str, tmp_path: Path) -> None:
    text = of_another_host(tmp_path, locks.STALE - 20)
    with locks.hold(tmp_path) as ours:
        assert not ours
    assert locks.held(tmp_path)
    assert locks.holder(tmp_path) == f"process {os.getpid()} on node7"
    assert [path.read_text() for path in tmp_path.iterdir()] == [text]


def test_what_another_host_left_is_taken_over(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SETTLES", 0.01)
    of_another_host(tmp_path, locks.STALE + 20)
    assert not locks.held(tmp_path)
    with locks.hold(tmp_path) as ours:
        assert ours
        assert str(os.getpid()) in locks.holder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_hosts_that_take_over_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one writes its lease after ours, before we look."""
    of_another_host(tmp_path, locks.STALE + 20)
    monkeypatch.setattr(locks.time, "sleep", lambda _: of_another_host(tmp_path, 0))
    with locks.hold(tmp_path) as ours:
        assert not ours
    assert locks.holder(tmp_path).endswith("on node7")


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.01)
    with locks.hold(tmp_path):
        lease = tmp_path / locks.LEASE
        os.utime(lease, (1, 1))
        for _ in range(500):
            if lease.stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert abs(lease.stat().st_mtime - time.time()) < 10


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the run says more of it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with locks.hold(tmp_path) as ours:
        assert ours
