"""Files that appear atomically."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from user_errors import refused

from odc_mpi import files
from odc_mpi.files import (
    atomic_write,
    make_directory,
    sync,
    write_or_warn,
    write_text_durable,
)


@pytest.fixture
def synced(monkeypatch):
    """The files and directories that were seen on the disk, in order."""
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda fd: (seen.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)))
    return seen


def replace(path, text):
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8")


def fail(*_):
    raise OSError("disk on fire")


WAYS = pytest.mark.parametrize("write", [replace, write_text_durable])


@WAYS
def test_a_file_is_replaced_once_its_content_is_on_the_disk(tmp_path, synced, write):
    path = tmp_path / "data"
    for text in ("1", "2, ü"):
        synced.clear()
        write(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert len(synced) == 2 and ".data." in str(synced[0]) and synced[1] == tmp_path
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


@WAYS
@pytest.mark.parametrize("fails", ["sync", "replace"])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, fails, write):
    write(tmp_path / "data", "old")
    monkeypatch.setattr(files.Path if fails == "replace" else files, fails, fail)
    refused("on fire", write, tmp_path / "data", "new", error=OSError)
    assert list(tmp_path.rglob("*")) == [tmp_path / "data"]
    assert (tmp_path / "data").read_text() == "old"


def test_folders_are_made_and_removed_after_a_failure(tmp_path, monkeypatch):
    path = tmp_path / "made" / "on the way" / "data"
    replace(path, "1")
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(files, "sync", fail)
    refused("on fire", replace, tmp_path / "another" / "data", "1", error=OSError)
    assert not (tmp_path / "another").exists()


def test_nobody_else_reads_a_private_file(tmp_path):
    write_text_durable(tmp_path / "data", "1", private=True)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o600


def test_what_killed_processes_left_is_removed(tmp_path):
    left, others = tmp_path / ".data.abcdefgh.tmp", tmp_path / ".data2.abcdefgh.tmp"
    for folder in (left, others):
        folder.mkdir()
        (folder / "data").touch()
    with atomic_write(tmp_path / "data") as used:
        used.touch()
        assert not left.exists() and others.exists()
        replace(tmp_path / "data", "of another call")
        assert used.exists()


def test_a_lost_file_is_reported_without_an_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    write_or_warn(tmp_path / "file" / "summary.json", "{}")
    errors = capsys.readouterr().err
    assert errors.startswith(f"odc_mpi: WARNING: cannot write {tmp_path / 'file' / 'summary.json'}: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_file_systems_that_cannot_sync_directories(tmp_path, monkeypatch, code, passes):
    def refuse(descriptor):
        raise OSError(code, "refused")

    (tmp_path / "file").touch()
    monkeypatch.setattr(files.os, "fsync", refuse)
    with nullcontext() if passes else pytest.raises(OSError, match="refused"):
        sync(tmp_path)
    refused("refused", sync, tmp_path / "file", error=OSError)


def test_a_new_directory_and_those_above_it_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", synced.append)
    for _ in range(2):
        make_directory(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
    assert sorted(synced) == [tmp_path, tmp_path / "a"], "where a name was added, once"
