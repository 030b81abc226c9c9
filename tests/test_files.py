"""Files that appear atomically, HDF5 files on a disk that fills up, and texts of numbers."""

import errno
import os
import resource
from contextlib import nullcontext
from pathlib import Path

import h5py
import numpy as np
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
from odc_mpi.formatting import did_you_mean, format_seconds, format_size, printable_text
from odc_mpi.hdf5_file import create_hdf5


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


VALUES = np.arange(100_000, dtype=np.uint32)


def write_hdf5(path):
    with create_hdf5(path, libver="latest") as file:
        for name in ("first", "second"):
            file.create_dataset(name, data=VALUES, chunks=(1000,), fletcher32=True)
        file.attrs["text"] = "x" * 1000


def test_the_file_is_an_ordinary_hdf5_file(tmp_path):
    write_hdf5(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["second"][:], VALUES) and file.attrs["text"] == "x" * 1000
    with pytest.raises(FileExistsError):
        write_hdf5(tmp_path / "a.h5")


@pytest.mark.parametrize("limit", [0, 100, 5000, 200_000, 800_000])
def test_a_full_disk_raises_an_error_instead_of_crashing(tmp_path, limit):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_hdf5(tmp_path / "a.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a.h5")


def test_an_error_of_the_caller_leaves_the_context(tmp_path):
    with pytest.raises(KeyError), create_hdf5(tmp_path / "a.h5") as file:
        file["no such data set"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(31.2, "31 s"), (3.14, "3.1 s"), (0.25, "250 ms"), (2e-4, "0.2 ms"), (9.94e-5, "99 us"), (1.5e-6, "1.5 us")],
)
def test_times_are_short(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(65536, "64K"), (1 << 20, "1M"), (2 << 30, "2G"), (12, "12"), (1536, "1536"), (1025, "1025")],
)
def test_sizes_lose_nothing(size, text):
    assert format_size(size) == text


def test_the_most_similar_name():
    assert did_you_mean("lineer", {"linear": 1, "quadratic": 2}) == " (did you mean linear?)"
    assert did_you_mean("lineer", ["linear"], ": {}") == ": did you mean linear?"
    assert did_you_mean("zzz", ["linear"]) == ""


def test_escaped_characters_can_be_printed():
    assert printable_text("a\x1b[1m\ud800\x85\r\n\tü\u2028") == "a\\x1b[1m\\ud800\\x85\\x0d\n\tü\u2028"
