"""Prompts to generate from, in an HDF5 file: tokens, the text they are of, and columns for rewards.

| dataset        | type   | shape        | holds                                                                     |
|----------------|--------|--------------|---------------------------------------------------------------------------|
| `tokens`       | uint32 | [num_tokens] | all prompts, one behind the other                                         |
| `offsets`      | int64  | [n + 1]      | where each prompt begins, and the end                                     |
| `text`         | uint8  | [num_bytes]  | JSON, UTF-8, of each: `prompt`, a text or messages, and `columns`         |
| `text_offsets` | int64  | [n + 1]      | where each of these begins, and the end                                   |

Attributes: `format`, `version`, `vocab_size`, `max_token_id`, `vocabulary`, `content` (a digest of all four), `source`;
the group `tokenizer` is that of `data.dataset`. They are written last: a file without them was never finished.

No communication. Any number of ranks may have the file open, for reading only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset import PROMPTS_FORMAT, TOKENIZER_GROUP
from odc_mpi.data.examples import Conversation, Example
from odc_mpi.errors import UserError

VERSION = 1
#: Fields of a record that are no columns: the prompt itself, and what goes into it.
NO_COLUMNS = ("prompt", "messages", "system", "tools")
#: Names of arguments that reward functions get besides columns.
RESERVED = ("prompts", "completions", "completion_ids")
_TYPES = {"tokens": np.uint32, "offsets": np.int64, "text": np.uint8, "text_offsets": np.int64}


class PromptRow(NamedTuple):
    """A prompt.

    Attributes:
        tokens: Not empty.
        prompt: The text, or the messages, each with role and content.
        columns: What rewards need, by name.
    """

    tokens: list[int]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is messages. Local."""
        return not isinstance(self.prompt, str)


def row_of(example: Example, record: Mapping[str, Any], tokens: Sequence[int]) -> PromptRow:
    """Return the row of a record. Local.

    Args:
        example: The record's prompt, as `examples.prompt_of` returned it.
        record: The fields by name.
        tokens: Of the prompt.

    Raises:
        UserError: A column has a name that is taken, or a value that JSON does not know.
    """
    columns = {name: value for name, value in record.items() if name not in NO_COLUMNS}
    taken = next((name for name in RESERVED if name in columns), None)
    if taken:
        raise UserError(f"{example.where}: expected columns of other names than {', '.join(RESERVED)}, got {taken!r}")
    prompt = example.messages if isinstance(example, Conversation) else example.prompt
    try:
        json.dumps(columns, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{example.where}: expected columns that JSON can hold, got {error}") from error
    return PromptRow(list(tokens), prompt, columns)


def write_prompts(
    path: Path,
    rows: Sequence[PromptRow],
    *,
    vocab_size: int,
    vocabulary: str,
    source: str,
    tokenizer_files: Mapping[str, bytes],
) -> None:
    """Write a file of prompts. Local.

    Args:
        path: A path where no file is yet.
        rows: The prompts, at least one.
        vocab_size: Tokens of the tokenizer.
        vocabulary: The tokenizer's `vocabulary_digest`.
        source: Name of the source, for people.
        tokenizer_files: Content of each file of the tokenizer, by name.

    Raises:
        OSError: The file exists or cannot be created.
    """
    texts = [json.dumps({"prompt": row.prompt, "columns": row.columns}, ensure_ascii=False).encode() for row in rows]
    arrays = {
        "tokens": np.concatenate([np.array(row.tokens, dtype=np.uint32) for row in rows]),
        "offsets": np.cumsum([0, *(len(row.tokens) for row in rows)]),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "text_offsets": np.cumsum([0, *map(len, texts)]),
    }
    with h5py.File(path, "x", locking=False) as file:
        digest = hashlib.sha256()
        for name, dtype in _TYPES.items():
            values = arrays[name].astype(dtype)
            file.create_dataset(name, data=values)
            digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
        for name, content in tokenizer_files.items():
            file[f"{TOKENIZER_GROUP}/{name}"] = np.frombuffer(content, dtype=np.uint8)
        file.attrs.update(
            vocab_size=vocab_size,
            max_token_id=int(arrays["tokens"].max()),
            vocabulary=vocabulary,
            source=source,
            content=digest.hexdigest(),
            format=PROMPTS_FORMAT,
            version=VERSION,
        )


class Prompts(AbstractContextManager["Prompts"]):
    """Prompts, read one at a time. A context manager; closes twice without harm.

    Attributes:
        path: The file.
        lengths: Tokens of each prompt, int64 [n].
        vocab_size: Tokens of the tokenizer.
        max_token_id: The largest token in the file.
        vocabulary: The tokenizer's `vocabulary_digest`.
    """

    def __init__(self, path: Path | str, setting: str = "data.path") -> None:
        """Open a file that `odc-mpi prepare --prompts-only` wrote, each rank for itself. Local.

        Args:
            path: The file.
            setting: That names it, for messages.

        Raises:
            UserError: It is missing, not of prompts, or damaged.
        """
        self.path = Path(path)
        cure = f"odc-mpi prepare PROMPTS.jsonl {path} --tokenizer DIR --prompts-only writes one"
        try:
            self._file = h5py.File(self.path, "r", locking=False)
        except OSError as error:
            found = "no HDF5 file" if self.path.is_file() else "no file"
            raise UserError(f"{setting}: expected a file of prompts at {str(path)!r}, got {found}: {cure}") from error
        try:
            found = self._file.attrs.get("format")
            if found != PROMPTS_FORMAT:
                what = "sequences to train on" if found else "an HDF5 file of something else"
                raise UserError(
                    f"{setting}: run.objective grpo expects a file of prompts, got {str(path)!r}, {what}: {cure}"
                )
            if self._file.attrs.get("version") != VERSION:
                raise UserError(f"{setting}: {str(path)!r} was written by a newer odc_mpi: update odc_mpi")
            self._read_index(setting)
        except BaseException:
            self.close()
            raise

    def _read_index(self, setting: str) -> None:
        damaged = UserError(f"{setting}: the file of prompts {str(self.path)!r} is damaged: prepare it again")
        for name, dtype in _TYPES.items():
            found = self._file.get(name)
            if not isinstance(found, h5py.Dataset) or found.dtype != dtype or found.ndim != 1:
                raise damaged
        self._offsets: npt.NDArray[np.int64] = self._file["offsets"][:]
        self._text_offsets: npt.NDArray[np.int64] = self._file["text_offsets"][:]
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
        ends = (self._offsets[-1], self._text_offsets[-1])
        fits = ends == (len(self._file["tokens"]), len(self._file["text"]))
        if not fits or len(self._offsets) != len(self._text_offsets) or not len(self.lengths) or self.lengths.min() < 1:
            raise damaged
        attributes = self._file.attrs
        self.vocab_size, self.max_token_id = int(attributes["vocab_size"]), int(attributes["max_token_id"])
        self.vocabulary, self._content = str(attributes["vocabulary"]), str(attributes["content"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> PromptRow:
        """Read one prompt from the file. Local."""
        tokens = self._file["tokens"][self._offsets[index] : self._offsets[index + 1]]
        text = self._file["text"][self._text_offsets[index] : self._text_offsets[index + 1]].tobytes()
        content = json.loads(text)
        return PromptRow(tokens.astype(np.int64).tolist(), content["prompt"], content["columns"])

    def digest(self) -> str:
        """Return a digest of the prompts and their columns: ranks with equal ones draw the same prompts. Local."""
        return hashlib.sha256(f"{self.vocabulary}{self._content}".encode()).hexdigest()

    def close(self) -> None:
        """Close the file. Local."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class PromptsReport:
    """The counts of a file of prompts.

    Attributes:
        path: The file.
        num_prompts: Prompts written.
        num_tokens: Tokens in them.
        longest: Tokens of the longest.
        columns: Names of columns that at least one prompt has.
        num_dropped: Prompts left out because they were longer than the maximal length.
        num_bad_lines: Lines left out because they cannot be used.
        bad_lines: What is wrong with the first three of them.
        eval_path: The file of what is held out; None if nothing is.
        num_eval_prompts: Prompts in that one.
    """

    path: Path
    num_prompts: int
    num_tokens: int
    longest: int
    columns: Sequence[str]
    num_dropped: int
    num_bad_lines: int
    bad_lines: Sequence[str]
    eval_path: Path | None = None
    num_eval_prompts: int = 0

    def describe(self) -> str:
        """Return the report in lines for people. Local."""
        told = f"{self.num_prompts:,} prompts, {self.num_tokens:,} tokens, the longest {self.longest:,}"
        lines = [f"{self.path}: {told}; columns: {', '.join(self.columns) or 'none'}"]
        if self.eval_path is not None:
            lines.append(f"{self.eval_path}: held out, {self.num_eval_prompts:,} prompts")
        if self.num_dropped:
            lines.append(f"{self.num_dropped:,} dropped: longer than --max-length")
        if self.num_bad_lines:
            lines.append(f"{self.num_bad_lines:,} lines that cannot be used, the first:")
            lines += [f"  {bad}" for bad in self.bad_lines]
        return "\n".join(lines)
