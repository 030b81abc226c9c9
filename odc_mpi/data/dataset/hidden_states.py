"""Files with hidden states of sequences, which several ranks write and read. Does not use MPI.

Each rank writes files of its own, which `finish` completes and renames; `refresh` finds those of all ranks. All ranks
find the same files if they synchronize in between. An entry has the digest of its tokens as key, and a checksum. Files
that were written for another `identity` are not used.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.errors import one_line_message, warn
from odc_mpi.files import make_directory
from odc_mpi.hdf5_file import create_hdf5

KEY_BYTES = 16
_FORMAT, _COMPLETE, _PARTIAL = "odc_mpi.hidden_states", ".h5", ".partial"
#: Bytes that are collected before they are written, and rows of an HDF5 chunk.
_BUFFER_BYTES, _ROWS = 1 << 24, 256


class _Entry(NamedTuple):
    checksum: int
    path: Path
    begin: int
    end: int


class HiddenStates:
    """Hidden states of sequences, keyed by digests of `KEY_BYTES` bytes.

    Args:
        directory: Folder for the files of all ranks. It is created when the first file is written.
        identity: Text that describes all that the values depend on, besides the tokens.
        name: Name of this rank's files, unique among ranks and starts of the run.

    Attributes:
        stale: Files of another identity, damaged ones, and those that earlier starts left incomplete.
    """

    def __init__(self, directory: Path, identity: str, name: str) -> None:
        self._directory, self._identity, self._name = directory, identity.encode(), name
        self._entries: dict[bytes, _Entry] = {}
        self._files: dict[Path, h5py.File] = {}
        self._open = ExitStack()
        self._number, self._failed = 0, False
        self._clear()
        self.stale = list(directory.glob(f"*{_PARTIAL}"))
        self.refresh()

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose hidden states can be read."""
        return sum(entry.end - entry.begin for entry in self._entries.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def read(self, keys: Sequence[bytes]) -> npt.NDArray | None:
        """Read the hidden states of several sequences, `[tokens, width]`. Return None if any is missing or damaged."""
        parts = []
        for key in keys:
            if (entry := self._entries.get(key)) is None:
                return None
            try:
                values = self._files[entry.path]["hidden"][entry.begin : entry.end]
            except (OSError, RuntimeError, KeyError, ValueError):
                values = None
            if values is None or crc32(values.data) != entry.checksum:
                del self._entries[key]  # computed and stored again
                return None
            parts.append(values)
        return np.concatenate(parts)

    def append(self, key: bytes, values: npt.NDArray) -> None:
        """Store the hidden states of a sequence, integers `[length, width]`, in a file that `finish` completes.

        Nothing is stored again if the values are the same, or after an error, such as a full disk, which is reported.
        """
        values = np.ascontiguousarray(values)
        checksum = crc32(values.data)
        # Values that differ in their last bits are kept, so that the choice does not depend on the number of ranks.
        if self._failed or (key, checksum) in self._pending:
            return
        self._pending.add((key, checksum))
        self._keys.append(key)
        self._rows.append((self._num_rows, self._num_rows + len(values), checksum))
        self._num_rows += len(values)
        self._buffer.append(values)
        self._num_buffered += values.nbytes
        if self._num_buffered >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> None:
        """Complete the file that is being written, if any, so that `refresh` finds it on all ranks."""
        if not self._keys or self._failed:
            return
        self._flush()
        if self._new is None:  # an error was reported
            return
        with self._reported():
            keys = np.frombuffer(b"".join(self._keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
            self._new["keys"], self._new["rows"] = keys, np.array(self._rows, dtype=np.int64)
            self._new.attrs["format"], self._new.attrs["identity"] = _FORMAT, np.void(self._identity)
            self._writing.close()
            self._path.rename(self._path.with_suffix(_COMPLETE))
        self._clear()

    def refresh(self) -> None:
        """Find the complete files of all ranks, and add their entries."""
        for path in sorted(self._directory.glob(f"*{_COMPLETE}")):
            if path in self._files or path in self.stale:
                continue
            try:
                file = h5py.File(path, "r", locking=False)
                if file.attrs["identity"].tobytes() != self._identity:
                    raise ValueError("another identity")
                keys, rows = file["keys"][:].tobytes(), file["rows"][:].tolist()
            except (OSError, RuntimeError, KeyError, ValueError, AttributeError):
                self.stale.append(path)
                continue
            self._files[path] = self._open.enter_context(file)
            for i, (begin, end, checksum) in enumerate(rows):
                entry, key = _Entry(checksum, path, begin, end), keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                self._entries[key] = min(entry, self._entries.get(key, entry))

    def close(self) -> None:
        """Close all files, and delete the one that is not complete."""
        self._open.close()
        self._discard()

    def _clear(self) -> None:
        self._writing = ExitStack()
        self._new: h5py.File | None = None
        self._keys: list[bytes] = []
        self._rows: list[tuple[int, int, int]] = []
        self._pending: set[tuple[bytes, int]] = set()
        self._buffer: list[npt.NDArray] = []
        self._num_rows = self._num_buffered = 0
        self._number += 1
        self._path = self._directory / f"{self._name}-{self._number}{_PARTIAL}"

    def _flush(self) -> None:
        if not self._buffer:
            return
        values = np.concatenate(self._buffer)
        self._buffer, self._num_buffered = [], 0
        with self._reported():
            if self._new is None:
                make_directory(self._directory)
                self._new = self._writing.enter_context(create_hdf5(self._path))
                width = values.shape[1]
                self._new.create_dataset(
                    "hidden", (0, width), values.dtype, maxshape=(None, width), chunks=(_ROWS, width)
                )
            stored = self._new["hidden"]
            begin = len(stored)
            stored.resize(begin + len(values), axis=0)
            stored[begin:] = values

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._failed = True
            self._discard()
            warn(f"WARNING: {self._directory}: no more hidden states are stored: {one_line_message(error)}")

    def _discard(self) -> None:
        with suppress(OSError, RuntimeError):
            self._writing.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._clear()
