"""Reader for data sets, which verifies all data that it reads."""

import hashlib
import json
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.format import (
    ADDITIONAL_TEMPLATES,
    COLUMNS,
    FORMAT,
    REPORT,
    TOKENIZER_GROUP,
    TYPES,
    UNITS,
    VERSION,
    DamagedDatasetError,
    Kind,
    content_digest,
    has_signature,
    hdf5_errors,
    read_attribute,
    sequence_checksum,
)
from odc_mpi.errors import UserError, one_line_message

_CHECKSUM_BYTES = 4  # of HDF5, at the end of each chunk
_MAX_NUMBERS = 3  # of damaged sequences in a message


class Dataset(AbstractContextManager["Dataset"]):
    """Data set open for reading, which is closed at the end of a `with` body. Sequences are read one at a time.

    Attributes:
        lengths: Number of tokens in each sequence, int64 [n].
        num_trained_tokens: Number of loss tokens in each sequence, not counting its first token, int64 [n].
        kind: What the sequences are: plain sequences, pairs, or prompts with an answer and its label.
        columns: Columns of this kind, int64 [n] each, keyed by the names in `COLUMNS`.
        vocab_size: Number of tokens in the tokenizer's vocabulary.
        max_token_id: Largest token ID in the file. The model's embedding must have more rows than this.
        vocabulary: Digest of the tokenizer's vocabulary (see `vocabulary_digest`); empty if unknown.
    """

    def __init__(self, path: Path | str, setting: str = "data.path") -> None:
        """Open a file written by `prepare`. Each rank opens the file independently.

        `setting` is the setting or option that contains the path, for error messages. Raises a `UserError` if the file
        is missing, is not a data set of this version, or contains no sequences, and a `DamagedDatasetError` if it is
        damaged. Tokens and loss masks are not verified until they are read.
        """
        self.path = Path(path)
        self._file = _open(self.path, setting)
        try:
            with hdf5_errors(self.path, "the file"):
                _check_format(self._file, self.path, setting)
                for name, dtype in TYPES.items():
                    _check_storage(self._file, name, self.path, dtype)
                self._read_index(setting)
        except BaseException:
            self.close()
            raise

    def _read_index(self, setting: str) -> None:
        file = self._file
        self._tokens, self._loss_mask = file["tokens"], file["loss_mask"]
        self._offsets: npt.NDArray[np.int64] = file["offsets"][:]
        trained: npt.NDArray[np.int32] = file["num_trained_tokens"][:]
        self._checksums: npt.NDArray[np.uint32] = file["checksums"][:]
        found = {name for names in COLUMNS.values() for name in names if name in file}
        self.kind: Kind = "labels" if "label" in found else "pairs" if found else "sequences"
        stored = [_check_storage(file, name, self.path, np.int32)[:] for name in COLUMNS[self.kind]]
        self._content: str = read_attribute(file.attrs, "content", str)
        self.vocab_size: int = read_attribute(file.attrs, "vocab_size", int)
        self.max_token_id: int = read_attribute(file.attrs, "max_token_id", int)
        self.vocabulary: str = read_attribute(file.attrs, "vocabulary", str)
        if content_digest(self._offsets, trained, self._checksums, *stored) != self._content:
            raise DamagedDatasetError(self.path, "offsets, num_trained_tokens, checksums or columns were changed")
        if not len(trained):
            raise UserError(f"the data set {str(self.path)!r} is empty: prepare it again, or change {setting}")
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
        if not len(self.lengths) == len(trained) == len(self._checksums) or any(len(c) != len(trained) for c in stored):
            raise DamagedDatasetError(
                self.path, "offsets, num_trained_tokens, checksums and columns are for different numbers of sequences"
            )
        if self._offsets[0] != 0 or not len(self._tokens) == len(self._loss_mask) == self._offsets[-1]:
            raise DamagedDatasetError(self.path, "offsets, tokens and loss_mask do not match")
        if (self.lengths < 2).any() or ((trained < 1) | (trained >= self.lengths)).any():
            raise DamagedDatasetError(self.path, "num_trained_tokens does not match the lengths of the sequences")
        self.num_trained_tokens: npt.NDArray[np.int64] = trained.astype(np.int64)
        values = (column.astype(np.int64) for column in stored)
        self.columns: dict[str, npt.NDArray[np.int64]] = dict(zip(COLUMNS[self.kind], values, strict=True))
        counts = [self.columns[name] for name in COLUMNS[self.kind] if name != "label"]
        if counts and ((np.stack(counts) < 1).any() or (sum(counts[:2]) >= self.lengths).any()):
            raise DamagedDatasetError(self.path, "the parts of pairs or answers do not match the lengths")
        if self.kind == "labels" and not np.isin(self.columns["label"], (0, 1)).all():
            raise DamagedDatasetError(self.path, "a label is neither 0 nor 1")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read a sequence. Returns its tokens, int64 [length], and its loss mask, bool [length].

        Raises a `DamagedDatasetError` if the sequence cannot be read or differs from the one that was written, an
        `IndexError` if `index` is negative or too large, and a `ValueError` if the data set is closed.
        """
        if not self._file:
            raise ValueError(f"the data set {str(self.path)!r} is closed")
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"expected a sequence from 0 to {len(self) - 1}, got {i}")
        part = slice(self._offsets[i], self._offsets[i + 1])
        with hdf5_errors(self.path, f"sequence {i}"):
            tokens, loss_mask = self._tokens[part], self._loss_mask[part]
        if sequence_checksum(tokens, loss_mask) != self._checksums[i]:
            raise DamagedDatasetError(self.path, f"sequence {i} does not match its checksum")
        if tokens.max() > self.max_token_id or np.count_nonzero(loss_mask[1:]) != self.num_trained_tokens[i]:
            raise DamagedDatasetError(self.path, f"sequence {i} does not match max_token_id or num_trained_tokens")
        return tokens.astype(np.int64), loss_mask.astype(np.bool_)

    @property
    def num_positions(self) -> int:
        """Number of positions in the longest sequence. In pairs, each answer's positions follow those of the prompt."""
        if self.kind != "pairs":
            return int(self.lengths.max())
        prompt, chosen, _ = self.columns.values()
        return int(np.maximum(prompt + chosen, self.lengths - chosen).max())

    def digest(self) -> str:
        """Return a digest of the data, computed from the checksums of all sequences without reading the tokens."""
        return hashlib.sha256(f"{self.vocabulary}{self._content}".encode()).hexdigest()

    def close(self) -> None:
        """Close the file. Idempotent. Attributes remain usable, but sequences can no longer be read."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def is_dataset(path: Path) -> bool:
    """Return True if `path` is a completely written data set of any version. Its contents may be damaged."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return has_signature(file)
    except (OSError, KeyError, RuntimeError, ValueError, TypeError):  # missing, not HDF5, or damaged at the beginning
        return False


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files in a data set, keyed by relative path.

    Returns no files if `path` is not a data set or has no tokenizer. Raises a `DamagedDatasetError` if it is damaged.
    """
    if not is_dataset(path):
        return {}
    with hdf5_errors(path, "the tokenizer"), h5py.File(path, "r", locking=False) as file:
        if TOKENIZER_GROUP not in file:
            return {}
        group, names = file[TOKENIZER_GROUP], []
        for name in group:
            names += [f"{name}/{each}" for each in group[name]] if name == ADDITIONAL_TEMPLATES else [name]
        paths = {name: f"{TOKENIZER_GROUP}/{name}" for name in names}
        return {name: _check_storage(file, each, path, np.uint8)[:].tobytes() for name, each in paths.items()}


def verify_dataset(path: Path) -> str:
    """Read and verify an entire data set, and return a line of text that describes it.

    Raises the errors of `Dataset`, and a `DamagedDatasetError` that names the indices of the first damaged sequences.
    """
    with Dataset(path) as dataset:
        damaged: list[int] = []
        for i in range(len(dataset)):
            try:
                dataset[i]
            except DamagedDatasetError:
                damaged.append(i)
        if damaged:
            first = ", ".join(map(str, damaged[:_MAX_NUMBERS]))
            raise DamagedDatasetError(path, f"{len(damaged)} of {len(dataset)} sequences, the first: {first}")
        with hdf5_errors(path, "the attributes or the report"):
            dict(dataset._file.attrs)
            if REPORT in dataset._file:
                _check_storage(dataset._file, REPORT, path, np.uint8)[:]
        files = read_tokenizer_files(path)
        tokenizer = f"tokenizer in {len(files)} files" if files else "no tokenizer"
        return (
            f"{path}: {len(dataset):,} {UNITS[dataset.kind]}, {dataset.lengths.sum():,} tokens, {tokenizer}: no damage"
        )


def read_origin(path: Path) -> str:
    """Return the digest of the origins of a data set's sources, or "" if the file or the digest cannot be read."""
    try:
        with hdf5_errors(path, "the file"), h5py.File(path, "r", locking=False) as file:
            return read_attribute(file.attrs, "sources", str)
    except UserError:
        return ""


def find_counts(paths: Sequence[Path], request: str) -> dict[str, Any] | None:
    """Verify the data sets written by one call to `prepare`, and return the counts stored in them, keyed by name.

    Returns None if a data set is missing or damaged, has a different `request` attribute, or is from a different call.
    """
    reports = set()
    for path in paths:
        try:
            with hdf5_errors(path, "the file"), h5py.File(path, "r", locking=False) as file:
                if read_attribute(file.attrs, "request", str) != request:
                    return None
                reports.add(_check_storage(file, REPORT, path, np.uint8)[:].tobytes())
            verify_dataset(path)
        except UserError:
            return None
    return json.loads(reports.pop()) if len(reports) == 1 else None


def _open(path: Path, setting: str) -> h5py.File:
    """Open a file without locking it, since some network and read-only file systems do not support locks."""
    try:
        reason = None if path.is_file() else "no file"
    except (OSError, ValueError) as error:  # no permission to search the directory, or an invalid name
        reason = one_line_message(error)
    if reason is not None:
        raise UserError(f"expected a data set at {str(path)!r}, got {reason}: change {setting}, or run odc-mpi prepare")
    try:
        return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"expected an HDF5 file at {str(path)!r}, got one that does not open ({one_line_message(error)}): "
            f"write one with odc-mpi prepare, or change {setting}"
        ) from error


def _check_format(file: h5py.File, path: Path, setting: str) -> None:
    if not has_signature(file):
        raise UserError(
            f"expected a file of odc-mpi prepare at {str(path)!r}, got HDF5 without format={FORMAT!r}: change {setting}"
        )
    version = read_attribute(file.attrs, "version", int)
    if version != VERSION:
        raise UserError(
            f"expected version {VERSION} of the data set {str(path)!r}, got version {version}: prepare it again with "
            "this version of odc_mpi"
        )


def _check_storage(file: h5py.File, name: str, path: Path, dtype: npt.DTypeLike) -> h5py.Dataset:
    """Return an HDF5 dataset. Raises a `DamagedDatasetError` unless it is a vector of `dtype` with valid storage.

    It must be stored completely, in this file, and with checksums. HDF5 itself would follow links and external or
    virtual storage to any file, and read missing storage as zeros.
    """
    parents = [str(parent) for parent in PurePosixPath(name).parents][:-1]
    if any(not isinstance(file.get(part, getlink=True), h5py.HardLink) for part in (*reversed(parents), name)):
        raise DamagedDatasetError(path, f"{name!r} is missing, or a link")
    stored, item = file[name], np.dtype(dtype)
    if not isinstance(stored, h5py.Dataset) or stored.dtype != item or stored.ndim != 1:
        raise DamagedDatasetError(path, f"{name!r} is not a vector of {item.name}")
    if stored.is_virtual or stored.external or not stored.fletcher32 or stored.chunks is None:
        raise DamagedDatasetError(path, f"{name!r} is not stored in chunks with checksums in this file")
    (chunk,) = stored.chunks
    num_chunks = -(-len(stored) // chunk)
    if stored.id.get_storage_size() != num_chunks * (chunk * item.itemsize + _CHECKSUM_BYTES):
        raise DamagedDatasetError(path, f"{name!r} is incomplete")
    return stored
