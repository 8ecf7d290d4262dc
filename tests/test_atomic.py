"""Replacing a file: the old content or the new, in any order of events."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nmrun import atomic


def test_the_old_content_stays_until_the_end(tmp_path):
    path = tmp_path / "file.json"
    atomic.write(path, "old")
    with atomic.replaced(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path  # a file system renames within itself alone
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file.json"]


@pytest.mark.parametrize("shared", [False, True])
def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path, shared):
    path = tmp_path / "file.json"
    atomic.write(path, b"old")
    with pytest.raises(OSError, match="full"), atomic.replaced(path, shared) as partial:
        partial.write_text("ne")
        raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    """Also that of a disk to read only, which refuses to delete even what is not there."""

    def refused(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(OSError, match=r"No such file|Read-only") as raised:
            atomic.write(place / "file.json", "new", shared=True)
        assert raised.value.filename == str(place / "file.json")
        monkeypatch.setattr(Path, "unlink", refused)


def test_the_content_is_on_disk_before_it_has_the_name(tmp_path, monkeypatch):
    """After a power cut a file system may have done what came after an fsync, and not what came
    before: a name without its content.
    """
    synced: dict[int, int] = {}
    fsync, replace = os.fsync, os.replace

    def noting(handle):
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checking(source, to):
        assert synced.get(os.stat(source).st_ino) == 5
        replace(source, to)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", checking)
    atomic.write(tmp_path / "file", "12345")
    assert (tmp_path / "file").read_text() == "12345"
    assert synced


def test_two_processes_at_once(tmp_path, monkeypatch):
    path = tmp_path / "cache.json"
    with atomic.replaced(path, shared=True) as one:
        one.write_text("one")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with atomic.replaced(path, shared=True) as other:
                other.write_text("other, and longer")
        assert path.read_text() == "other, and longer"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["cache.json"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="modes of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_who_may_read_a_new_file_may_read_weights(tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "plain").touch()
        with atomic.replaced(tmp_path / "weights") as partial:
            save_file({"weight": torch.ones(2)}, partial)  # makes a file for its owner alone
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "weights")}
    assert modes == {0o666 & ~umask}


def written(path: Path, writer: str) -> None:
    """Two megabytes, by one who raises an OSError and by one who does not."""
    if writer == "bytes":
        atomic.write(path, bytes(2_000_000))
    else:
        with atomic.replaced(path) as partial:
            save_file({"weight": torch.zeros(500_000)}, partial)


@pytest.mark.parametrize("writer", ["bytes", "safetensors"])
def test_a_limit_of_files_is_told_likewise(tmp_path, writer):
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large, .* free there") as error:
            written(path, writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("writer", ["bytes", "safetensors"])
def test_a_full_disk_says_where_and_how_much_is_free(small_disk, writer):
    path = small_disk / "file"
    atomic.write(path, b"old" * 1000)  # one page of 4 kB
    with pytest.raises(OSError, match="No space left on device") as error:
        written(path, writer)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert str(error.value.strerror).endswith(", 1 MB free there")
    assert path.read_bytes() == b"old" * 1000
    assert os.listdir(small_disk) == ["file"]


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(OSError, match="broken") as error, atomic.disk_errors(tmp_path / "file"):
        raise OSError(errno.EIO, "broken")
    assert error.value.filename is None
