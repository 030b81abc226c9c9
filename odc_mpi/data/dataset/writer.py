"""Writer of data sets."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.format import (
    CHUNK,
    COLUMNS,
    FORMAT,
    REPORT,
    TOKENIZER_GROUP,
    TYPES,
    VERSION,
    Kind,
    content_digest,
    encode_text,
    sequence_checksum,
)
from odc_mpi.hdf5_file import create_hdf5

_BUFFERED_TOKENS = 1 << 20  # written at once; bounds the writer's memory


class DatasetWriter(AbstractContextManager["DatasetWriter"]):
    """Context manager that writes a data set, sequence by sequence, in bounded memory.

    If an exception leaves the `with` body, `Dataset` rejects the unfinished file. Leaving the body raises an `OSError`
    if the file cannot be written. The attributes `kind`, `num_sequences`, `num_tokens`, `num_trained_tokens` (loss
    tokens, not counting the first token of each sequence), `num_prompt_tokens` (of pairs), `num_desirable` (answers
    with the label 1), `longest` (maximum number of tokens in a sequence) and `max_token_id` describe the sequences
    appended so far.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        vocab_size: int,
        tokenizer: str,
        source: str,
        vocabulary: str = "",
        tokenizer_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Create the file, which must not exist yet.

        `tokenizer` and `source` are names for display. `vocabulary` is the `vocabulary_digest` of the tokenizer, or
        empty if unknown. `tokenizer_files` contains the contents of the tokenizer's files to store, keyed by file name.
        """
        self.num_sequences = self.num_tokens = self.num_trained_tokens = self.num_prompt_tokens = 0
        self.num_desirable = self.longest = self.max_token_id = 0
        self.kind: Kind = "sequences"
        self._attributes: dict[str, int | str] = {}
        self.set_attributes(vocab_size=vocab_size, tokenizer=tokenizer, source=source, vocabulary=vocabulary)
        self._stack = ExitStack()
        # The first version with checksums in all metadata. Older libraries could not read the latest one.
        self._file: h5py.File = self._stack.enter_context(create_hdf5(path, libver=("v110", "v110")))
        for name, dtype in TYPES.items():
            self._create(name, np.empty(0, dtype=dtype))
        for name, content in (tokenizer_files or {}).items():
            self._create(f"{TOKENIZER_GROUP}/{name}", np.frombuffer(content, dtype=np.uint8))
        self._buffers: dict[str, list[npt.NDArray]] = {name: [] for name in TYPES}
        self._buffers["offsets"].append(np.zeros(1, dtype=np.int64))
        self._num_buffered = 0

    def _create(self, name: str, values: npt.NDArray) -> None:
        self._file.create_dataset(name, data=values, maxshape=(None,), chunks=(CHUNK,), fletcher32=True)

    def set_attributes(self, **attributes: int | str) -> None:
        """Set attributes to write when the `with` body ends normally. `report` is written as an HDF5 dataset."""
        self._attributes.update(attributes)

    def append(
        self, tokens: npt.NDArray[np.uint32], loss_mask: npt.NDArray[np.bool_], columns: Mapping[str, int] | None = None
    ) -> None:
        """Append a sequence, given its tokens, uint32 [length], and its loss mask, bool [length].

        At least one token after the first must be a loss token. `columns` has the same names, those of one kind in
        `COLUMNS`, for all sequences.
        """
        num_trained = int(np.count_nonzero(loss_mask[1:]))
        assert len(tokens) == len(loss_mask) and num_trained, "expected a sequence with a loss token, got none"
        columns = columns or {}
        if not self.num_sequences:
            self.kind = next(kind for kind, names in COLUMNS.items() if names == tuple(columns))
            for name in columns:
                self._create(name, np.empty(0, dtype=np.int32))
                self._buffers[name] = []
        self.num_sequences += 1
        self.num_tokens += len(tokens)
        self.num_trained_tokens += num_trained
        self.num_prompt_tokens += columns["num_prompt_tokens"] if self.kind == "pairs" else 0
        self.num_desirable += columns.get("label", 0)
        self.longest = max(self.longest, len(tokens))
        self.max_token_id = max(self.max_token_id, int(tokens.max()))
        stored = tokens.astype(np.uint32), loss_mask.astype(np.uint8)
        numbers = self.num_tokens, num_trained, sequence_checksum(*stored)
        arrays: list[npt.NDArray] = [*stored, *(np.array([number]) for number in (*numbers, *columns.values()))]
        for name, values in zip(self._buffers, arrays, strict=True):
            self._buffers[name].append(values)
        self._num_buffered += len(tokens)
        if self._num_buffered >= _BUFFERED_TOKENS:
            self._write_buffers()

    def _write_buffers(self) -> None:
        for name, parts in self._buffers.items():
            if parts:
                target = self._file[name]
                values = np.concatenate(parts).astype(target.dtype)
                begin = len(target)
                target.resize((begin + len(values),))
                target[begin:] = values
                parts.clear()
        self._num_buffered = 0

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._write_buffers()
                arrays = (self._file[name][:] for name in self._buffers if name not in ("tokens", "loss_mask"))
                self.set_attributes(
                    content=content_digest(*arrays), max_token_id=self.max_token_id, format=FORMAT, version=VERSION
                )
                for name, value in self._attributes.items():
                    if name == REPORT:
                        self._create(name, np.frombuffer(str(value).encode(), dtype=np.uint8))
                    else:
                        self._file.attrs[name] = encode_text(value) if isinstance(value, str) else value
