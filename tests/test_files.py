"""Files that appear atomically."""

import errno
import os
import stat
from pathlib import Path

import pytest

from odc_mpi import files
from odc_mpi.files import (
    atomic_write,
    make_directory,
    sync_directory,
    write_or_warn,
    write_text_atomic,
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


WRITES = pytest.mark.parametrize(
    "write", [write_text_durable, lambda path, text: write_text_atomic(path, text, private=True), replace]
)


@WRITES
def test_a_file_is_replaced_and_nothing_is_left_over(tmp_path, write):
    path = tmp_path / "notes.txt"
    for text in ("first", "second, ü"):
        write(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@WRITES
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch, write):
    path = tmp_path / "notes.txt"
    path.write_text("old")

    def full(self, goal):
        raise OSError(errno.ENOSPC, "no space", str(goal))

    monkeypatch.setattr(files.Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_the_name(tmp_path, synced):
    write_text_durable(tmp_path / "notes.txt", "text")
    assert synced == [tmp_path / "notes.txt.tmp", tmp_path]
    synced.clear()
    replace(tmp_path / "data", "1")
    assert [path.name for path in synced] == ["data", tmp_path.name]
    assert synced[0].parent.name.startswith(".data.") and synced[1] == tmp_path


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o640)])
def test_who_may_read_what_was_swapped_in(tmp_path, private, mode):
    umask = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "page.html", "text", private=private)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == mode


def test_a_new_file_gets_its_name_at_the_end(tmp_path):
    path = tmp_path / "made" / "on the way" / "data"
    replace(path, "1")
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failure_leaves_no_folder(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(files, "sync_file", fail)
    with pytest.raises(OSError, match="on fire"):
        replace(tmp_path / "made" / "too" / "data", "new")
    assert list(tmp_path.iterdir()) == []


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
    write_or_warn(tmp_path / "nowhere" / "summary.json", "{}")
    errors = capsys.readouterr().err
    assert errors.startswith(f"odc_mpi: WARNING: cannot write {tmp_path / 'nowhere' / 'summary.json'}: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_file_systems_that_cannot_sync_directories(tmp_path, monkeypatch, code, passes):
    def refuse(descriptor):
        raise OSError(code, "refused")

    monkeypatch.setattr(files.os, "fsync", refuse)
    if passes:
        sync_directory(tmp_path)
    else:
        with pytest.raises(OSError, match="refused"):
            sync_directory(tmp_path)


def test_a_new_directory_and_those_above_it_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    for _ in range(2):
        make_directory(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
    assert sorted(synced) == [tmp_path, tmp_path / "a"], "where a name was added, once"
