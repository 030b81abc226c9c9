"""HDF5 files on a disk that fills up."""

import errno
import resource

import h5py
import numpy as np
import pytest

from odc_mpi.hdf5_file import create_hdf5

VALUES = np.arange(100_000, dtype=np.uint32)


def write(path):
    with create_hdf5(path, libver="latest") as file:
        for name in ("first", "second"):
            file.create_dataset(name, data=VALUES, chunks=(1000,), fletcher32=True)
        file.attrs["text"] = "x" * 1000


def test_the_file_is_an_ordinary_hdf5_file(tmp_path):
    write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["second"][:], VALUES) and file.attrs["text"] == "x" * 1000
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.h5")


@pytest.mark.parametrize("limit", [0, 100, 5000, 200_000, 800_000])
def test_a_full_disk_raises_an_error_instead_of_crashing(tmp_path, limit):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write(tmp_path / "a.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a.h5")


def test_an_error_of_the_caller_leaves_the_context(tmp_path):
    with pytest.raises(KeyError), create_hdf5(tmp_path / "a.h5") as file:
        file["no such data set"]
