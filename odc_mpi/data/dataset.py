"""Data sets: tokenized sequences in an HDF5 file.

| dataset              | type   | shape        | contents                                                       |
|----------------------|--------|--------------|----------------------------------------------------------------|
| `tokens`             | uint32 | [num_tokens] | all sequences, concatenated                                    |
| `loss_mask`          | uint8  | [num_tokens] | 1 where the token contributes to the loss                      |
| `offsets`            | int64  | [n + 1]      | first token of each sequence in `tokens`, then `num_tokens`    |
| `num_trained_tokens` | int32  | [n]          | loss tokens of each sequence, not counting its first token     |

The first token of a sequence is never predicted, so it does not contribute to the loss. The group `tokenizer` contains
each file of the tokenizer under its name, as a dataset of bytes, uint8 [num_bytes].

Attributes of the file: `format`, `version`, `vocab_size`, `max_token_id`, `vocabulary` (`vocabulary_digest`), `content`
(digest of tokens and loss mask), `tokenizer` and `source` (names, for display), `num_untrained_dropped` and
`num_bad_lines` (see `PrepareReport`), `request` (digest of the sources, options, tokenizer and versions that `prepare`
used) and `report` (counts of `prepare` as JSON). They are written last, so a file without them is unfinished.

This module does not use MPI. Any number of ranks may have a file open for reading.
"""

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.errors import UserError
from odc_mpi.hdf5_file import create_hdf5

FORMAT = "odc_mpi.dataset"
VERSION = 1

_CHUNK = 16_384  # elements; a random read fetches whole chunks, so about 80 KB for tokens and mask
_BUFFERED_TOKENS = 1 << 20  # written at once; bounds the writer's memory
#: HDF5 datasets covered by `content`. `Dataset` reads the others when it opens the file; `Dataset.digest` covers them.
_DIGESTED = ("tokens", "loss_mask")
TOKENIZER_GROUP = "tokenizer"
_TYPES = {"tokens": np.uint32, "loss_mask": np.uint8, "offsets": np.int64, "num_trained_tokens": np.int32}


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256 of a vocabulary, in hexadecimal. It covers all tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


class DatasetWriter(AbstractContextManager["DatasetWriter"]):
    """Context manager that writes a data set, sequence by sequence, in bounded memory.

    If an exception leaves the context, the file is closed unfinished, and `Dataset` rejects it. The attributes
    `num_sequences`, `num_tokens`, `num_trained_tokens` (loss tokens, without the first token of each sequence),
    `longest` (number of tokens of the longest sequence) and `max_token_id` refer to the sequences appended so far.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        source: str,
        vocabulary: str = "",
        tokenizer_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Create the file, which must not exist.

        Args:
            vocab_size: Number of tokens of the tokenizer.
            tokenizer: Name of the tokenizer, for display.
            source: Name of the source of the text, for display.
            vocabulary: `vocabulary_digest` of the tokenizer; empty if unknown.
            tokenizer_files: Contents of the tokenizer's files by name; None to store no tokenizer.
        """
        self.num_sequences = self.num_tokens = self.num_trained_tokens = self.longest = self.max_token_id = 0
        self._attributes: dict[str, int | str] = {}
        self.set_attributes(vocab_size=vocab_size, tokenizer=tokenizer, source=source, vocabulary=vocabulary)
        self._creation = create_hdf5(path)
        self._file = self._creation.__enter__()
        for name, dtype in _TYPES.items():
            self._file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(_CHUNK,), dtype=dtype)
        for name, content in (tokenizer_files or {}).items():
            self._file[f"{TOKENIZER_GROUP}/{name}"] = np.frombuffer(content, dtype=np.uint8)
        self._buffers: dict[str, list[npt.NDArray]] = {name: [] for name in _TYPES}
        self._buffers["offsets"].append(np.zeros(1, dtype=np.int64))
        self._num_buffered = 0
        self._digests = {name: hashlib.sha256() for name in _DIGESTED}

    def set_attributes(self, **attributes: int | str) -> None:
        """Add attributes of the file. They are written when the context ends without an exception."""
        self._attributes.update(attributes)

    def append(self, tokens: npt.NDArray[np.uint32], loss_mask: npt.NDArray[np.bool_]) -> None:
        """Append a sequence of at least two tokens. At least one token after the first must be a loss token.

        Args:
            tokens: Tokens of the sequence, uint32 [length].
            loss_mask: True for each loss token, bool [length].
        """
        num_trained = int(np.count_nonzero(loss_mask[1:]))
        assert len(tokens) == len(loss_mask) and num_trained, "expected a sequence with a loss token, got none"
        self.num_sequences += 1
        self.num_tokens += len(tokens)
        self.num_trained_tokens += num_trained
        self.longest = max(self.longest, len(tokens))
        self.max_token_id = max(self.max_token_id, int(tokens.max()))
        arrays = tokens, loss_mask, np.array([self.num_tokens]), np.array([num_trained])
        for name, values in zip(_TYPES, arrays, strict=True):
            self._buffers[name].append(values)
        self._num_buffered += len(tokens)
        if self._num_buffered >= _BUFFERED_TOKENS:
            self._write_buffers()

    def _write_buffers(self) -> None:
        for name, parts in self._buffers.items():
            if parts:
                values = np.concatenate(parts).astype(_TYPES[name])
                target = self._file[name]
                begin = len(target)
                target.resize((begin + len(values),))
                target[begin:] = values
                if name in self._digests:
                    self._digests[name].update(values.astype(values.dtype.newbyteorder("<")).tobytes())
                parts.clear()
        self._num_buffered = 0

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._write_buffers()
                content = hashlib.sha256(b"".join(self._digests[name].digest() for name in _DIGESTED)).hexdigest()
                self._file.attrs.update(
                    self._attributes, content=content, max_token_id=self.max_token_id, format=FORMAT, version=VERSION
                )
        finally:
            self._creation.__exit__(None, None, None)


class Dataset(AbstractContextManager["Dataset"]):
    """Data set opened for reading. Sequences are read from the file one at a time.

    The data set is a context manager that closes the file.

    Attributes:
        lengths: Number of tokens of each sequence, int64 [n].
        num_trained_tokens: Number of loss tokens of each sequence, not counting its first token, int64 [n].
        vocab_size: Number of tokens of the tokenizer.
        max_token_id: Largest token number in the file. The model's embedding must have more rows than this.
        vocabulary: `vocabulary_digest` of the tokenizer; empty if unknown.
    """

    def __init__(self, path: Path | str) -> None:
        """Open a file written by `prepare`. Each rank opens the file independently.

        Raises:
            UserError: The file is missing, damaged, written by a newer version, or not a data set.
        """
        self.path = Path(path)
        self._file = _open(self.path)
        try:
            _check_format(self._file, self.path)
            _check_shapes(self._file, self.path)
            self._offsets: npt.NDArray[np.int64] = self._file["offsets"][:]
            self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
            self.num_trained_tokens: npt.NDArray[np.int64] = self._file["num_trained_tokens"][:].astype(np.int64)
            self._check_counts()
            self.vocab_size = int(self._file.attrs["vocab_size"])
            self.max_token_id = int(self._file.attrs["max_token_id"])
            self.vocabulary = str(self._file.attrs["vocabulary"])
            self._content = str(self._file.attrs["content"])
        except BaseException:
            self.close()
            raise

    def _check_counts(self) -> None:
        """Check offsets and counts for consistency, without reading the tokens."""
        offsets, trained = self._offsets, self.num_trained_tokens
        if offsets[0] != 0 or offsets[-1] != len(self._file["tokens"]) or (self.lengths < 2).any():
            raise _damaged_error(self.path, "the offsets do not match the tokens")
        if ((trained < 1) | (trained >= self.lengths)).any():
            raise _damaged_error(self.path, "the numbers of loss tokens do not match the lengths")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read a sequence, and return its tokens, int64 [length], and its loss mask, bool [length]."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"expected a sequence from 0 to {len(self) - 1}, got {i}")
        part = slice(self._offsets[i], self._offsets[i + 1])
        return self._file["tokens"][part].astype(np.int64), self._file["loss_mask"][part].astype(np.bool_)

    def digest(self) -> str:
        """Return a digest of the data. Ranks with equal digests compute the same plans and train on the same data.

        The digest of the tokens and the loss mask is the one stored in the file, so this method does not read them.
        """
        texts = f"{self.vocabulary}{self._content}"
        parts = (self.lengths.tobytes(), self.num_trained_tokens.tobytes(), texts.encode())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files in a data set, by name.

    The result is empty if the data set contains no tokenizer, or if `path` is not a data set.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            group = file.get(TOKENIZER_GROUP)
            if file.attrs.get("format") != FORMAT or not isinstance(group, h5py.Group):
                return {}
            return {name: item[:].tobytes() for name, item in group.items() if isinstance(item, h5py.Dataset)}
    except OSError:  # missing, or not HDF5
        return {}


def find_counts(paths: Sequence[Path], request: str) -> dict[str, Any] | None:
    """Return the counts of the earlier call of `prepare` that wrote these data sets, by name.

    The result is None if a data set is missing, unfinished or damaged, or has a digest other than `request`.
    """
    reports = set()
    for path in paths:
        try:
            with h5py.File(path, "r", locking=False) as file:
                if file.attrs.get("format") != FORMAT or file.attrs.get("request") != request:
                    return None
                reports.add(str(file.attrs["report"]))
        except (OSError, KeyError):
            return None
    return json.loads(reports.pop()) if len(reports) == 1 else None


def _open(path: Path) -> h5py.File:
    """Open a file without locking it, since some network and read-only file systems do not support locks."""
    try:
        reason = None if path.is_file() else "no file"
    except OSError as error:  # no permission to search the directory, or a name too long
        reason = error.strerror
    if reason is not None:
        raise UserError(f"expected a data set at {str(path)!r}, got {reason}: change data.path, or run odc-mpi prepare")
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"expected an HDF5 file at {str(path)!r}, got one that does not open ({reason}): "
            "write one with odc-mpi prepare, or change data.path"
        ) from error


def _check_format(file: h5py.File, path: Path) -> None:
    found = file.attrs.get("format")
    if not isinstance(found, str) or found != FORMAT:
        raise UserError(
            f"expected a file of odc-mpi prepare at {str(path)!r}, got HDF5 without format={FORMAT!r}: change data.path"
        )
    version = file.attrs.get("version")
    if version != VERSION:
        raise UserError(
            f"expected version {VERSION} of the data set {str(path)!r}, got {version} (a newer odc_mpi wrote it): "
            "update odc_mpi, or change data.path"
        )


def _check_shapes(file: h5py.File, path: Path) -> None:
    for name, dtype in _TYPES.items():
        found = file.get(name)
        if not isinstance(found, h5py.Dataset) or found.dtype != dtype or found.ndim != 1:
            raise _damaged_error(path, f"{name!r} is not a vector of {np.dtype(dtype).name}")
    if missing := {"vocab_size", "max_token_id", "vocabulary", "content"} - file.attrs.keys():
        raise _damaged_error(path, f"{', '.join(sorted(missing))} is missing")
    if len(file["tokens"]) != len(file["loss_mask"]):
        raise _damaged_error(path, "tokens and loss_mask differ in length")
    if len(file["offsets"]) != len(file["num_trained_tokens"]) + 1:
        raise _damaged_error(path, "the lengths of offsets and num_trained_tokens do not match")
    if len(file["offsets"]) == 1:
        raise UserError(f"the data set {str(path)!r} is empty: prepare it again, or change data.path")


def _damaged_error(path: Path, description: str) -> UserError:
    return UserError(f"the data set {str(path)!r} is damaged: {description}: prepare it again, or change data.path")
