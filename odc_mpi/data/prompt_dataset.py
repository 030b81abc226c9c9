"""Prompts for generation, and columns for reward functions, from a file in any format that `prepare` reads."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.format import vocabulary_digest
from odc_mpi.data.encoding.encode import encode_prompts
from odc_mpi.data.examples import Conversation, Example
from odc_mpi.data.records.block import to_record
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_prompt
from odc_mpi.data.records.schema import BESIDE
from odc_mpi.data.sources import DataSource, suggest_name
from odc_mpi.errors import UserError, warn

_NO_COLUMNS = ("prompt", "messages", *BESIDE)  # fields that make up the prompt
#: Names of the arguments that reward functions receive besides the columns.
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
_HDF5 = b"\x89HDF\r\n\x1a\n"


class PromptRecord(NamedTuple):
    """A prompt and its columns.

    Attributes:
        tokens: Tokens of the prompt; never empty.
        prompt: Text of the prompt, or a list of messages with `role` and `content`.
        columns: Keyword arguments for reward functions: all fields in the file that are not part of prompts. A field
            that is missing from this record is None.
    """

    tokens: list[int]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """True if the prompt consists of messages."""
        return not isinstance(self.prompt, str)


def read_prompts(path: Path, setting: str) -> Iterator[list[tuple[Example, dict[str, Any]]]]:
    """Yield a file's prompts in blocks, each prompt with the record that contains it.

    `setting` is the name of the setting that specifies the file, for error messages. Raises a `UserError` if the file
    cannot be read, contains no records or is HDF5, and an `InvalidRecordError` if a record contains no valid prompt.
    """
    expected = f"{setting}: expected a file of prompts, such as JSON lines or Parquet, got {path}, which"
    try:
        if not path.is_file():
            raise UserError(f"{expected} is not a file{suggest_name(path)}")
        with path.open("rb") as file:
            begin = file.read(len(_HDF5))
    except OSError as error:  # no permission, or a name too long
        raise UserError(f"{expected} cannot be read: {error.strerror}") from error
    if begin == _HDF5:
        raise UserError(f"{expected} is HDF5: give the file of prompts itself, without odc-mpi prepare")
    empty = True
    for block in DataSource(str(path), None, (path,)).read(lambda _: None):
        empty = False
        records = ((to_record(value, location), location) for location, value in block.records())
        yield [(parse_prompt(record, location), record) for record, location in records]
    if empty:
        raise UserError(f"{expected} contains no prompt")


def warn_ignored(setting: str, ignored: Mapping[str, int], num_prompts: int) -> None:
    """Print a warning for each part of prompts that the chat template leaves out.

    `setting` is the name of the setting that specifies the prompts, and `ignored` has the number of prompts for each
    part (see `PromptDataset.ignored`).
    """
    for part, count in ignored.items():
        warn(f"WARNING: {setting}: {part} is ignored in {count:,} of {num_prompts:,} prompts")


class PromptDataset:
    """All prompts in a file, held in memory. For `vocab_size`, `max_token_id` and `vocabulary`, see `Dataset`.

    Attributes:
        lengths: Number of tokens in each prompt, int64 [n].
        ignored: Numbers of prompts, keyed by a description of what the chat template leaves out of them.
        columns: Names of all columns, as keys with the value None, which stands for a column that a prompt lacks.
        locations: File and line or row of each prompt, for error messages.
    """

    def __init__(self, path: Path | str, tokenizer: Any, setting: str = "data.path") -> None:
        """Tokenize all prompts. Raises the errors of `read_prompts` and `encode_prompts`.

        An `InvalidRecordError` is also raised for a column that has a reserved name or that JSON cannot represent.
        """
        self.path, self.tokenizer = Path(path), tokenizer
        self.vocab_size, self.vocabulary = len(tokenizer), vocabulary_digest(tokenizer.get_vocab())
        self.locations: list[str] = []
        self._tokens: list[npt.NDArray[np.int64]] = []
        self.ignored: Counter[str] = Counter()
        self.columns: dict[str, None] = {}
        self._texts: list[bytes] = []  # as JSON, which needs less memory than its objects
        for block in read_prompts(self.path, setting):
            self._tokens += map(np.array, encode_prompts(tokenizer, [example for example, _ in block], self.ignored))
            for example, record in block:
                prompt = example.messages if isinstance(example, Conversation) else example.prompt
                columns = _columns(record, example.location)
                self.columns |= dict.fromkeys(columns)
                self._texts.append(_json({"prompt": prompt, "columns": columns}, example.location))
                self.locations.append(example.location)
        self.lengths: npt.NDArray[np.int64] = np.array([len(tokens) for tokens in self._tokens])
        self.max_token_id = max(int(tokens.max()) for tokens in self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> PromptRecord:
        """Return the prompt with this index, and its columns."""
        content = json.loads(self._texts[index])
        return PromptRecord(self._tokens[index].tolist(), content["prompt"], self.columns | content["columns"])

    def digest(self) -> str:
        """Return a digest of the prompts with their tokens and columns, and of the tokenizer's vocabulary."""
        parts = (self.vocabulary.encode(), self.lengths.astype("<i8"), *(each.astype("<i8") for each in self._tokens))
        return hashlib.sha256(b"".join([*map(bytes, parts), *(text + b"\n" for text in self._texts)])).hexdigest()


def _columns(record: Mapping[str, Any], location: str) -> dict[str, Any]:
    columns = {name: value for name, value in record.items() if name not in _NO_COLUMNS}
    if reserved := next((name for name in REWARD_ARGUMENTS if name in columns), None):
        raise InvalidRecordError(
            f"{location}: expected columns without the names {', '.join(REWARD_ARGUMENTS)}, got {reserved!r}: rename it"
        )
    return columns


def _json(content: Any, location: str) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # times and bytes in tables, NaN and lone surrogates in text files
        raise InvalidRecordError(f"{location}: expected columns that JSON can represent, got {error}") from error
