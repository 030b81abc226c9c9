"""index.h5: every tensor whole, by its name, for anyone with HDF5. Local.

Each tensor is a virtual data set: HDF5 assembles it from the ranks' files when it is read. Where a file is missing HDF5
reads the fill value without an error. The fill value is NaN, so that the loss shows; and this package never reads a
checkpoint through its index.
"""

from pathlib import Path

import h5py
import numpy as np

from odc_mpi.checkpoint.hyperslabs import boxes
from odc_mpi.checkpoint.manifest import FORMAT, INDEX, VERSION, FileRecord, Manifest, TensorRecord, shard_name
from odc_mpi.checkpoint.shard_file import checksum_of_file, stored_type
from odc_mpi.files import sync_file

#: NaN in the bits of a type that is stored as an integer.
_NAN_BITS = {"bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}


def write_index(directory: Path, manifest: Manifest) -> FileRecord:
    """Write the index of a checkpoint whose ranks' files are all there, and flush it to the disk. Local."""
    path = directory / INDEX
    with h5py.File(path, "x", locking=False) as file:
        file.attrs.update(format=FORMAT, version=VERSION, step=manifest.step, size=manifest.size)
        for name, record in manifest.tensors.items():
            _show(file, name, record, directory, manifest.step)
    sync_file(path)
    return checksum_of_file(path)


def _show(file: h5py.File, name: str, record: TensorRecord, directory: Path, step: int) -> None:
    dtype = stored_type(record.dtype)
    if record.shape and 0 not in record.shape:
        layout = h5py.VirtualLayout(record.shape, dtype)
        for rank, start, stop in record.pieces:
            source = h5py.VirtualSource(shard_name(step, rank), name, shape=(stop - start,), dtype=dtype)
            for first, last, box in boxes(record.shape, start, stop):
                layout[tuple(slice(*bounds) for bounds in box)] = source[first - start : last - start]
        created = file.create_virtual_dataset(name, layout, fillvalue=_fill(record.dtype, dtype))
    else:
        created = file.create_dataset(name, shape=record.shape, dtype=dtype, fillvalue=_fill(record.dtype, dtype))
        # HDF5 has no virtual scalars: a copy.
        for rank, _, _ in record.pieces:
            with h5py.File(directory / shard_name(step, rank), "r", locking=False) as source:
                created[()] = source[name][0]
    created.attrs.update(dtype=record.dtype, kind=record.kind)


def _fill(dtype: str, stored: np.dtype) -> int | float:
    """Return the fill value of a type: NaN, or the largest integer."""
    if stored.kind == "f":
        return np.nan
    return _NAN_BITS.get(dtype, int(np.iinfo(stored).max))
