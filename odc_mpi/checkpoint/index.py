"""The index of a checkpoint, index.h5, in which other HDF5 programs can find the full tensors by name.

Unless it is empty or 0-dimensional, each tensor is a virtual data set, which HDF5 assembles from the files of the ranks
when it is read. If one of the files is missing, HDF5 returns the fill value without an error. The fill value is NaN
where possible, so that missing data is visible. This package never reads a checkpoint through its index.

An index of many ranks would be large, so it is not saved. `odc-mpi checkpoint index` can write it later.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from odc_mpi.checkpoint.manifest import FORMAT, VERSION, FileRecord, Manifest, TensorRecord, shard_name
from odc_mpi.checkpoint.shard_file import checksum_of_file, stored_type
from odc_mpi.files import sync
from odc_mpi.hdf5_file import create_hdf5

#: Box in a tensor, given by the start and stop of its range in each dimension.
Hyperslab = tuple[tuple[int, int], ...]
#: Maximum number of ranks for which a checkpoint is saved with an index.
MAX_INDEXED_RANKS = 64
#: Bits of NaN for floating-point types that are stored as integers.
_NAN_BITS = {"bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}


def write_index(path: Path, directory: Path, manifest: Manifest) -> FileRecord:
    """Write a checkpoint's index to the new file `path`, and return the record of this file.

    All ranks' files must be in `directory`. The index refers to them by name, so it is valid only in this directory.
    """
    with create_hdf5(path) as file:
        file.attrs.update(format=FORMAT, version=VERSION, step=manifest.step, size=manifest.size)
        for name, record in manifest.tensors.items():
            _create_virtual_dataset(file, name, record, directory, manifest.step)
    sync(path)
    return checksum_of_file(path)


def _create_virtual_dataset(file: h5py.File, name: str, record: TensorRecord, directory: Path, step: int) -> None:
    dtype = stored_type(record.dtype)
    if record.shape and 0 not in record.shape:
        layout = h5py.VirtualLayout(record.shape, dtype)
        for rank, start, stop in record.ranges:
            source = h5py.VirtualSource(shard_name(step, rank), name, shape=(stop - start,), dtype=dtype)
            for first, last, hyperslab in hyperslabs(record.shape, start, stop):
                layout[tuple(slice(*bounds) for bounds in hyperslab)] = source[first - start : last - start]
        layout.dcpl.set_obj_track_times(False)  # for equal checksums of indexes that are written again
        created = file.create_virtual_dataset(name, layout, fillvalue=_fill_value(record.dtype, dtype))
    else:
        created = file.create_dataset(name, shape=record.shape, dtype=dtype, fillvalue=_fill_value(record.dtype, dtype))
        # HDF5 has no virtual scalars: copy the value.
        for rank, _, _ in record.ranges:
            with h5py.File(directory / shard_name(step, rank), "r", locking=False) as source:
                created[()] = source[name][0]
    created.attrs.update(dtype=record.dtype, kind=record.kind)


def _fill_value(dtype: str, stored: np.dtype) -> int | float:
    """Return the fill value of a tensor: NaN, or the largest integer for a type without NaN."""
    if stored.kind == "f":
        return np.nan
    return _NAN_BITS.get(dtype, int(np.iinfo(stored).max))


def hyperslabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Hyperslab]]:
    """Split elements `[start, stop)` of a flattened tensor into hyperslabs (boxes) of the tensor.

    Yields, for each part in order, its start and stop, and the hyperslab that contains the same elements in the same
    order. The parts are the end of a row `tensor[i]`, complete rows, and the beginning of a row. Partial rows are split
    recursively. `shape` must have at least one dimension.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield start, stop, ((start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the complete rows
    head = min(stop, first * row)
    if start < head:
        yield from _within_row(shape, start, head)
    if first < last:
        yield first * row, last * row, ((first, last), *((0, extent) for extent in shape[1:]))
    if last * row < stop and first <= last:
        yield from _within_row(shape, last * row, stop)


def _within_row(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Hyperslab]]:
    row = math.prod(shape[1:])
    index = start // row
    for begin, end, hyperslab in hyperslabs(shape[1:], start - index * row, stop - index * row):
        yield begin + index * row, end + index * row, ((index, index + 1), *hyperslab)
