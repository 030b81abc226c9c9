"""A rank's file in a checkpoint: ranges of flattened tensors as contiguous HDF5 data sets, and checksums.

h5py has a single lock for all HDF5 calls of a process. If gigabytes were written under this lock, training could not
read its data in the meantime. Therefore, HDF5 only allocates the data sets in the file, and their bytes are then
written and read at their offsets without the lock.

| data set                            | type           | content                                                     |
|-------------------------------------|----------------|-------------------------------------------------------------|
| `model/NAME` and other paths        | `STORED_AS`    | `[n]`, elements of the flattened tensor from `start` on      |
| `checksums`                         | uint32         | CRC-32 of each block of 256 KiB, in the order of the file    |

The attributes of a data set are `start`, `shape` (of the full tensor) and `dtype` (its name in torch). The attributes
of the file are `format`, `version`, `step`, `rank` and `size`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.checkpoint.manifest import STORED_AS, FileRecord
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.hdf5_file import create_hdf5

try:
    from isal.isal_zlib import crc32  # the same values, at 8 instead of 2 GB/s
except ImportError:  # only available for two processor architectures
    from zlib import crc32

#: Size of a block, in bytes. Each block has its own checksum, so slices are read in complete blocks.
BLOCK_BYTES = 1 << 18
#: Maximum size of one write, in bytes, which is enough to keep a disk busy.
_WRITE_BYTES = 1 << 22
_CHECKSUMS = "checksums"


class ShardEntry(NamedTuple):
    """Range of a flattened tensor whose full shape is `shape`, to be stored as the dataset `path`.

    `values`, `[n]`, is contiguous and has the elements from `start` on, in the stored type of the torch dtype `dtype`.
    """

    path: str
    values: npt.NDArray
    start: int
    shape: tuple[int, ...]
    dtype: str


class ShardWriter:
    """Writes a file, and writes it again with other values. Thread-safe only for different files.

    HDF5 needs 0.2 ms per data set to allocate it, under h5py's lock. So a file whose tensors have the same places and
    types as before is not allocated again, but only overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allocated: list[tuple[object, ...]] | None = None
        self._offsets: list[int] = []
        self._table = 0

    def write(self, entries: Sequence[ShardEntry], attributes: Mapping[str, str | int]) -> FileRecord:
        """Write `entries`, none of which is empty, and sync the file. Data bypasses h5py's lock.

        The names of `attributes` must be those of the previous call.
        """
        needed: list[tuple[object, ...]] = [
            (path, len(values), start, shape, dtype) for path, values, start, shape, dtype in entries
        ]
        if needed != self._allocated:
            self._allocated = None
            self._path.unlink(missing_ok=True)
            self._offsets, self._table = _allocate(self._path, entries, attributes)
            self._allocated = needed
        else:
            with h5py.File(self._path, "r+", locking=False) as file:
                for name, value in attributes.items():
                    if file.attrs[name] != value:
                        file.attrs.modify(name, value)
        return self._overwrite(entries)

    def _overwrite(self, entries: Sequence[ShardEntry]) -> FileRecord:
        # In the order of the file: HDF5 does not allocate in the order of the requests.
        placements = sorted(zip(self._offsets, entries, strict=True), key=lambda placement: placement[0])
        checksums: list[int] = []
        with self._path.open("r+b", buffering=0) as file:
            descriptor = file.fileno()
            for offset, entry in placements:
                checksums += _write(descriptor, _bytes_of(entry.values), offset)
            if checksums:
                _write(descriptor, _bytes_of(np.array(checksums, dtype="<u4")), self._table)
            os.fsync(descriptor)
            extents = [(offset, entry.values.nbytes) for offset, entry in placements]
            return FileRecord(os.fstat(descriptor).st_size, _checksum_of_rest(descriptor, extents))


def write_shard(path: Path, entries: Sequence[ShardEntry], attributes: Mapping[str, str | int]) -> FileRecord:
    """Write a new file with a `ShardWriter`. Thread-safe."""
    return ShardWriter(path).write(entries, attributes)


def _allocate(path: Path, entries: Sequence[ShardEntry], attributes: Mapping[str, str | int]) -> tuple[list[int], int]:
    """Create a file and allocate its data sets. Return the offsets of the entries and of the table of checksums."""
    offsets = []
    with create_hdf5(path) as file:
        file.attrs.update(attributes)
        for entry in entries:
            created = _create_dataset(file, entry.path, len(entry.values), entry.values.dtype)
            created.attrs.update(start=entry.start, shape=np.array(entry.shape, dtype=np.int64), dtype=entry.dtype)
            offsets.append(int(created.id.get_offset()))
        num_blocks = sum(-(-entry.values.nbytes // BLOCK_BYTES) for entry in entries)
        table = _create_dataset(file, _CHECKSUMS, num_blocks, np.dtype("<u4")).id.get_offset() if num_blocks else 0
    return offsets, int(table)


def _create_dataset(file: h5py.File, path: str, numel: int, dtype: np.dtype) -> h5py.Dataset:
    """Create a data set whose space in the file is allocated immediately, but not filled."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    return file.create_dataset(path, (numel,), dtype, dcpl=plan, fill_time="never")


def _bytes_of(values: npt.NDArray) -> memoryview:
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


def _write(descriptor: int, content: memoryview, offset: int) -> list[int]:
    """Write bytes at an offset of a file, and return the checksums of their blocks."""
    checksums = []
    for begin in range(0, len(content), _WRITE_BYTES):
        part = content[begin : begin + _WRITE_BYTES]
        checksums += _block_checksums(part)
        num_written = 0
        while num_written < len(part):
            num_written += os.pwrite(descriptor, part[num_written:], offset + begin + num_written)
        # Linux then writes these pages to the disk while the next checksums are computed. A file system may refuse.
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset + begin, len(part), os.POSIX_FADV_DONTNEED)
    return checksums


def _block_checksums(content: memoryview) -> list[int]:
    return [crc32(content[i : i + BLOCK_BYTES]) for i in range(0, len(content), BLOCK_BYTES)]


def _read(descriptor: int, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Read bytes at an offset of a file. The result is shorter if the file ends earlier."""
    content = np.empty(num_bytes, dtype=np.uint8)
    view, num_read = _bytes_of(content), 0
    while num_read < num_bytes and (count := os.preadv(descriptor, [view[num_read:]], offset + num_read)):
        num_read += count
    return content[:num_read]


def _checksum_of_rest(descriptor: int, extents: Sequence[tuple[int, int]]) -> int:
    """Return the checksum of a file, excluding the byte ranges in `extents`, each given as `(offset, num_bytes)`."""
    checksum, position, size = 0, 0, os.fstat(descriptor).st_size
    for offset, num_bytes in [*sorted(extents), (size, 0)]:
        offset = min(offset, size)
        checksum = crc32(_bytes_of(_read(descriptor, position, max(0, offset - position))), checksum)
        position = offset + num_bytes
    return checksum


def checksum_of_file(path: Path) -> FileRecord:
    """Return the size and checksum of a file that contains no tensor data, such as the index."""
    with path.open("rb", buffering=0) as file:
        return FileRecord(os.fstat(file.fileno()).st_size, _checksum_of_rest(file.fileno(), ()))


class _Stored(NamedTuple):
    """Data set at byte `offset` of a file. `first_block` is the index of its first checksum in the table."""

    dtype: np.dtype
    numel: int
    start: int
    offset: int
    first_block: int

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ShardFile(AbstractContextManager["ShardFile"]):
    """A rank's file that is open for reading. Data is verified against its checksums when it is read.

    The constructor raises `UserError` if the file is missing or damaged, or if it does not match the record `expected`.
    """

    def __init__(self, path: Path, expected: FileRecord) -> None:
        self.path = path
        try:
            num_bytes = path.stat().st_size
            if num_bytes != expected.num_bytes:
                raise UserError(f"{path} is damaged: expected {expected.num_bytes:,} bytes, got {num_bytes:,}")
            self._datasets, table = _look_up(path)
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: the checkpoint is damaged") from error
        except UserError:
            raise
        except Exception as error:  # h5py raises many types of exceptions for a damaged file
            raise UserError(f"{path} is damaged, or cannot be read: {one_line_message(error)}") from error
        try:
            self._checksums = self._read_checksums(table, expected)
        except BaseException:
            self.close()
            raise

    def _read_checksums(self, table: int, expected: FileRecord) -> npt.NDArray[np.uint32]:
        """Verify the file except for tensor data, and return the checksums of the blocks of tensor data."""
        extents = [(stored.offset, stored.num_bytes) for stored in self._datasets.values()]
        blocks = sum(-(-num_bytes // BLOCK_BYTES) for _, num_bytes in extents)
        try:
            checksum = _checksum_of_rest(self._descriptor, extents)
            table_bytes = _read(self._descriptor, table, 4 * blocks)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        if checksum != expected.checksum:
            raise UserError(f"{self.path} is damaged, or belongs to another checkpoint: its checksum does not match")
        return table_bytes.view("<u4")

    def read(self, path: str, start: int, stop: int) -> npt.NDArray:
        """Read elements `[start, stop)` of the flattened tensor in the dataset `path` as a 1D array.

        All of these elements must be in this file. Raises `UserError` if they are damaged or cannot be read.
        """
        stored = self._datasets[path]
        assert stored.start <= start <= stop <= stored.start + stored.numel, f"{path} [{start}, {stop}) of {stored}"
        begin, end = ((element - stored.start) * stored.dtype.itemsize for element in (start, stop))
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        content = self._read_blocks(path, first, last)
        return content[begin - first * BLOCK_BYTES :][: end - begin].view(stored.dtype)

    def verify(self) -> Iterator[str]:
        """Read all tensors, and yield a message for each tensor that is damaged or cannot be read."""
        for path, stored in self._datasets.items():
            try:
                for first in range(0, -(-stored.num_bytes // BLOCK_BYTES), _WRITE_BYTES // BLOCK_BYTES):
                    self._read_blocks(path, first, first + _WRITE_BYTES // BLOCK_BYTES)
            except UserError as error:
                yield str(error)

    def _read_blocks(self, path: str, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Read and verify the blocks `[first, last)` of a data set, which may have fewer blocks."""
        stored = self._datasets[path]
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, stored.num_bytes)
        try:
            content = _read(self._descriptor, stored.offset + begin, end - begin)
        except OSError as error:  # a bad sector, or an unreachable file server
            raise UserError(f"cannot read {self.path}, {path}: {error.strerror}") from error
        last = -(-end // BLOCK_BYTES)
        expected = self._checksums[stored.first_block + first : stored.first_block + last].tolist()
        if _block_checksums(_bytes_of(content)) != expected:
            raise UserError(f"{self.path} is damaged: the checksum of {path} does not match")
        return content

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def _look_up(path: Path) -> tuple[dict[str, _Stored], int]:
    """Return the data sets of a file, keyed by path and ordered by offset, and the offset of the checksums."""
    items: dict[str, h5py.Dataset] = {}
    with h5py.File(path, "r", locking=False) as file:
        file.visititems(lambda name, item: items.update({name: item}) if isinstance(item, h5py.Dataset) else None)
        table = items.pop(_CHECKSUMS, None)
        datasets, block = {}, 0
        for offset, name in sorted((int(item.id.get_offset()), name) for name, item in items.items()):
            stored = _Stored(items[name].dtype, len(items[name]), int(items[name].attrs["start"]), offset, block)
            datasets[name] = stored
            block += -(-stored.num_bytes // BLOCK_BYTES)
        return datasets, int(table.id.get_offset()) if table is not None else 0


def stored_type(dtype: str) -> np.dtype:
    """Return the NumPy type in which the torch dtype `dtype` is stored. Raise `UserError` for unsupported dtypes."""
    if dtype not in STORED_AS:
        raise UserError(f"a checkpoint cannot hold a tensor of {dtype}, expected one of {', '.join(STORED_AS)}")
    return np.dtype(STORED_AS[dtype])
