"""Files with hidden states of sequences, which several ranks write and read. Does not use MPI.

Each rank writes files of its own, which `finish` renames; `refresh` finds those of all ranks. All ranks find the same
files if they synchronize in between. An entry has the digest of its tokens as key, and a checksum. Files that were
written for another `identity` are not used.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from zlib import crc32

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.errors import one_line_message, warn
from odc_mpi.files import make_directory
from odc_mpi.hdf5_file import create_hdf5

KEY_BYTES = 16
_COMPLETE, _PARTIAL = ".h5", ".partial"
_FILE_BYTES = 1 << 26  # collected in memory, and then written to a file


_Entry = tuple[int, Path, slice]  # checksum, file, and rows in it


class HiddenStates:
    """Hidden states of sequences, keyed by digests of `KEY_BYTES` bytes.

    `directory` is created when the first file is written. `identity` describes all that the values depend on, besides
    the tokens. `name`, for this rank's files, must be unique among ranks and starts of the run.

    Attributes:
        stale: Files of another identity, damaged ones, and those that earlier starts left incomplete.
    """

    def __init__(self, directory: Path, identity: str, name: str) -> None:
        self._directory, self._identity, self._name = directory, identity.encode(), name
        self._entries: dict[bytes, _Entry] = {}
        self._files: dict[Path, h5py.File] = {}
        self._open, self._failed = ExitStack(), False
        # Of this rank: values to write, by key and checksum; what its files contain; files to rename; their number.
        self._values: dict[tuple[bytes, int], npt.NDArray] = {}
        self._written: set[tuple[bytes, int]] = set()
        self._paths: list[Path] = []
        self._number = self._num_bytes = 0
        self.stale = list(directory.glob(f"*{_PARTIAL}"))
        self.refresh()

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose hidden states can be read."""
        return sum(rows.stop - rows.start for _, _, rows in self._entries.values())

    def read(self, keys: Sequence[bytes]) -> npt.NDArray | None:
        """Read the hidden states of several sequences, `[tokens, width]`. Return None if any is missing or damaged."""
        parts = []
        for key in keys:
            if (entry := self._entries.get(key)) is None:
                return None
            checksum, path, rows = entry
            with suppress(OSError, RuntimeError):
                parts.append(self._files[path]["hidden"][rows])
                if crc32(parts[-1].data) == checksum:
                    continue
            del self._entries[key]  # computed and stored again
            return None
        return np.concatenate(parts)

    def append(self, key: bytes, values: npt.NDArray) -> None:
        """Store the hidden states of a sequence, integers `[length, width]`, unless they are readable or stored."""
        values = np.ascontiguousarray(values)
        # Values that differ in their last bits are kept, so that the choice does not depend on the number of ranks.
        entry = key, crc32(values.data)
        if not self._failed and key not in self._entries and entry not in self._written:
            self._values[entry] = values.copy()
            self._num_bytes += values.nbytes
            if self._num_bytes >= _FILE_BYTES:
                self._write()

    def finish(self) -> None:
        """Make visible what this rank has stored. After an error, such as a full disk, warn and store nothing more."""
        self._write()
        for path in self._paths:
            path.rename(path.with_suffix(_COMPLETE))
        self._paths = []

    def refresh(self) -> None:
        """Find the visible files of all ranks, and add their entries."""
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
            begin = 0
            for i, (end, checksum) in enumerate(rows):
                key, entry = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], (checksum, path, slice(begin, end))
                self._entries[key] = min(entry, self._entries.get(key, entry), key=lambda each: each[0])
                begin = end

    def close(self) -> None:
        """Close all files."""
        self._open.close()

    def _write(self) -> None:
        if not self._values:
            return
        self._number += 1
        path = self._directory / f"{self._name}-{self._number}{_PARTIAL}"
        keys, checksums = zip(*self._values, strict=True)
        values = list(self._values.values())
        try:
            make_directory(self._directory)
            with create_hdf5(path) as file:
                file["keys"] = np.frombuffer(b"".join(keys), dtype=np.uint8)
                file["rows"] = np.stack([np.cumsum([len(each) for each in values]), checksums], axis=1, dtype=np.int64)
                file["hidden"] = np.concatenate(values)
                file.attrs["identity"] = np.void(self._identity)
            self._paths.append(path)
        except OSError as error:
            self._failed = True
            path.unlink(missing_ok=True)
            warn(f"WARNING: {self._directory}: no more hidden states are stored: {one_line_message(error)}")
        self._written |= self._values.keys()
        self._values, self._num_bytes = {}, 0
