"""A rank's file: what is written is read, by h5py too; no damage goes unnoticed."""

import os
import resource
import zlib

import h5py
import numpy as np
import pytest
from damage import flip

from odc_mpi.checkpoint import shard_file
from odc_mpi.checkpoint.shard_file import ShardEntry, ShardFile, write_shard
from odc_mpi.errors import UserError

ATTRIBUTES = {"format": "f", "version": 1, "step": 3, "rank": 0, "size": 1}


def entry(path, values, start=0):
    return ShardEntry(path, values, start, (1000,), str(values.dtype))


@pytest.fixture
def entries():
    rng = np.random.default_rng(0)
    return [
        entry("model/b", rng.normal(size=500).astype(np.float32), 100),
        entry("model/a.weight", rng.integers(0, 1 << 16, size=33).astype(np.uint16)),
        entry("optimizer/x/a.weight", rng.normal(size=3)),
    ]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(shard_file, "_WRITE_BYTES", 256)


def test_stretches_are_read_from_any_element_to_any(tmp_path, entries, small_blocks, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    record = write_shard(tmp_path / "x.h5", entries, ATTRIBUTES)
    assert flushed == [record.num_bytes] == [(tmp_path / "x.h5").stat().st_size]
    with ShardFile(tmp_path / "x.h5", record) as file:
        for start, stop in [(100, 600), (100, 101), (599, 600), (116, 132), (117, 300), (200, 200)]:
            np.testing.assert_array_equal(
                file.read("model/b", start, stop), entries[0].values[start - 100 : stop - 100]
            )
        np.testing.assert_array_equal(file.read("optimizer/x/a.weight", 1, 3), entries[2].values[1:])
        assert list(file.verify()) == []


@pytest.mark.parametrize("limit", [0, 1000, 4500, 6000])
def test_a_full_disk_raises_an_error(tmp_path, entries, limit):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(tmp_path / "x.h5", entries, ATTRIBUTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_checksums_are_those_of_zlib_in_the_order_of_the_file(tmp_path, entries, small_blocks):
    record = write_shard(tmp_path / "x.h5", entries, ATTRIBUTES)
    content = (tmp_path / "x.h5").read_bytes()
    with h5py.File(tmp_path / "x.h5") as file:
        assert dict(file.attrs) == ATTRIBUTES
        assert file["model/b"].attrs["start"] == 100 and file["model/b"].attrs["shape"].tolist() == [1000]
        for stored in entries:
            np.testing.assert_array_equal(file[stored.path][:], stored.values)
        places = sorted((file[e.path].id.get_offset(), e.values.nbytes) for e in entries)
        checksums = file["checksums"][:].tolist()
    expected, rest, position = [], 0, 0
    for offset, num_bytes in places:
        end = offset + num_bytes
        expected += [zlib.crc32(content[i : min(i + 64, end)]) for i in range(offset, end, 64)]
        rest, position = zlib.crc32(content[position:offset], rest), end
    assert checksums == expected
    assert record.checksum == zlib.crc32(content[position:], rest)


def test_a_rank_that_owns_nothing(tmp_path):
    record = write_shard(tmp_path / "x.h5", [], ATTRIBUTES)
    with ShardFile(tmp_path / "x.h5", record) as file:
        assert list(file.verify()) == []


def test_every_flipped_bit_is_noticed(tmp_path, entries, small_blocks):
    path = tmp_path / "x.h5"
    record = write_shard(path, entries, ATTRIBUTES)
    intact = path.read_bytes()
    # Those of HDF5's own structures are at the beginning.
    rng = np.random.default_rng(0)
    for position in [*range(0, 600, 3), *rng.integers(len(intact), size=200).tolist()]:
        flip(path, position)
        try:
            with ShardFile(path, record) as file:
                assert list(file.verify()), f"byte {position}"
        except UserError as error:
            assert str(path) in str(error)
        path.write_bytes(intact)


@pytest.mark.parametrize("length", [0, 10, 1000, -1])
def test_a_file_cut_short(tmp_path, entries, length):
    path = tmp_path / "x.h5"
    record = write_shard(path, entries, ATTRIBUTES)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"expected .* bytes, got"):
        ShardFile(path, record)


def test_the_file_of_another_step(tmp_path, entries):
    record = write_shard(tmp_path / "x.h5", entries, ATTRIBUTES)
    other = write_shard(tmp_path / "y.h5", entries, ATTRIBUTES | {"step": 4})
    assert other.num_bytes == record.num_bytes
    with pytest.raises(UserError, match="belongs to another checkpoint"):
        ShardFile(tmp_path / "y.h5", record)
