"""Verifying complete data sets, and reading the counts and the origin that `prepare` stored in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from odc_mpi.data.dataset.format import REPORT, DamagedDatasetError, hdf5_errors, read_text
from odc_mpi.data.dataset.reader import Dataset, check_storage, read_tokenizer_files
from odc_mpi.errors import UserError

_MAX_NUMBERS = 3


def verify_dataset(path: Path) -> str:
    """Read and verify the complete contents of a data set, and return a line of text that describes it.

    Raises a `UserError` if the file is not a data set or is damaged. The message names the first damaged sequences.
    """
    with Dataset(path) as dataset:
        damaged: dict[int, DamagedDatasetError] = {}
        for i in range(len(dataset)):
            try:
                dataset[i]
            except DamagedDatasetError as error:
                damaged[i] = error
        if damaged:
            first = ", ".join(map(str, list(damaged)[:_MAX_NUMBERS]))
            raise DamagedDatasetError(path, f"{len(damaged)} of {len(dataset)} sequences, the first: {first}")
        with hdf5_errors(path, "the attributes or the report"), h5py.File(path, "r", locking=False) as file:
            dict(file.attrs)
            if REPORT in file:
                check_storage(file, REPORT, path, np.uint8)[:]
        files = read_tokenizer_files(path)
        tokenizer = f"tokenizer in {len(files)} files" if files else "no tokenizer"
        unit = "sequences" if dataset.pair_counts is None else "pairs"
        return f"{path}: {len(dataset):,} {unit}, {dataset.lengths.sum():,} tokens, {tokenizer}: no damage"


def read_origin(path: Path) -> str:
    """Return the digest of the origins of a data set's sources, or "" if it is missing or the file is damaged."""
    try:
        with hdf5_errors(path, "the file"), h5py.File(path, "r", locking=False) as file:
            return read_text(file.attrs, "sources")
    except UserError:
        return ""


def find_counts(paths: Sequence[Path], request: str) -> dict[str, Any] | None:
    """Verify the data sets written by one call to `prepare`, and return the counts stored in them, keyed by name.

    The result is None if a data set is missing, unfinished or damaged, if its attribute `request` differs from the
    argument `request`, or if the data sets are from different calls.
    """
    reports = set()
    for path in paths:
        try:
            with hdf5_errors(path, "the file"), h5py.File(path, "r", locking=False) as file:
                if read_text(file.attrs, "request") != request:
                    return None
                reports.add(check_storage(file, REPORT, path, np.uint8)[:].tobytes())
            verify_dataset(path)
        except UserError:
            return None
    return json.loads(reports.pop()) if len(reports) == 1 else None
