"""Reading training examples from JSON lines, plain or gzipped.

A line has one of a few forms; errors name file and line. Nothing here knows tokenizers.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from odc_mpi.errors import UserError

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion to learn.

    Attributes:
        where: File and line, for messages.
        prompt: Context without loss; empty for a line with `text` only.
        completion: Text with loss.
    """

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Chat messages; those of the assistant are to be learnt.

    Attributes:
        where: File and line, for messages.
        messages: As in the file; each has at least `role` and `content`, both strings.
    """

    where: str
    messages: list[dict[str, Any]]


Example = Pair | Conversation


@dataclass(frozen=True)
class Fields:
    """Names of the fields that hold prompt and completion; names other than these defaults are then required."""

    prompt: str = "prompt"
    completion: str = "completion"

    @property
    def renamed(self) -> bool:
        """Whether the user chose the names; then all other fields of a line are ignored."""
        return self != Fields()


def read(file: BinaryIO, name: str, fields: Fields) -> Iterator[Example]:
    """Yield the examples of a file in its order, skipping blank lines.

    A line is an object with `messages`, or with prompt and completion, or with `text`, in this order of precedence.

    Local.

    Args:
        file: Opened for reading bytes; decompressed here where `name` ends in .gz.
        name: Its name, for messages.
        fields: Names of the prompt and completion fields.

    Raises:
        UserError: A line cannot be read or understood; the message names file and line.
    """
    for where, line in _lines(file, name):
        if line.strip():
            yield _example(_parse(line, where), where, fields)


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield file and line number for messages, and the line."""
    stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            # Editors on Windows like to begin a file with a byte order mark.
            yield f"{name}, line {number}", line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}, line {number + 1}: cannot be read ({error}): is SOURCE complete?") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    """Decode one line into an object."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: expected a JSON object, got invalid JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists thousands deep
        raise UserError(f"{where}: expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {_kind(record)}")
    return record


def _example(record: dict[str, Any], where: str, fields: Fields) -> Example:
    """Return the example of a line, by the first known form."""
    if fields.renamed or ({fields.prompt, fields.completion} <= record.keys() and "messages" not in record):
        completion = _text(record, fields.completion, where)
        return Pair(where, _text(record, fields.prompt, where), _not_empty(completion, fields.completion, where))
    if "messages" in record:
        return Conversation(where, _messages(record["messages"], where))
    if "text" in record:
        return Pair(where, "", _not_empty(_text(record, "text", where), "text", where))
    raise UserError(
        f"{where}: expected the fields 'messages', or 'prompt' and 'completion', or 'text', got {_names(record)}: "
        "name yours with --prompt-field and --completion-field"
    )


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Check a conversation down to the types of its contents."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: expected 'messages' to be a list of objects, got {_kind(messages)}")
    for message in messages:
        role = _text(message, "role", where)
        if role not in _ROLES:
            raise UserError(f"{where}: expected a role among {', '.join(_ROLES)}, got {role!r}")
        content = _text(message, "content", where)
        if role == "assistant":
            _not_empty(content, "content", where)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise UserError(f"{where}: expected a message of the assistant to learn from, got the roles {roles}")
    if roles[0] == "assistant":
        raise UserError(f"{where}: expected a system or user message before the assistant's first, got none")
    return messages


def _text(record: dict[str, Any], field: str, where: str) -> str:
    """Return a field that must be there and must be text."""
    if field not in record:
        raise UserError(
            f"{where}: expected the field {field!r}, got {_names(record)}: see --prompt-field and --completion-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: expected {field!r} to be a string, got {_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        raise UserError(f"{where}: expected text in {field!r}, got a lone surrogate at {error.start}") from error
    return text


def _not_empty(text: str, field: str, where: str) -> str:
    if not text:
        raise UserError(f"{where}: expected text in {field!r}, got an empty string")
    return text


def _names(record: dict[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "no fields"


def _kind(value: Any) -> str:
    """Name a JSON value's type in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
