"""Reading training examples from JSON lines, plain or gzipped.

A line has one of a few forms; errors name file and line. Empty texts are legal: an example may have nothing to learn,
which its `trains` tells. Nothing here knows tokenizers.
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
_NUM_NAMED = 3


class BadLine(UserError):  # noqa: N818
    """A line that cannot be used; the message names file and line."""


class BadLines:
    """The lines of a file that cannot be used.

    Args:
        skip: Whether to go on without them; otherwise the first one is an error.

    Attributes:
        skip: As given.
        num_skipped: Lines left out so far.
        first: What is wrong with the first three of them.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.num_skipped = 0
        self.first: list[str] = []

    def add(self, error: BadLine) -> None:
        """Count a line. Local.

        Raises:
            UserError: Such lines are not to be skipped.
        """
        if not self.skip:
            raise UserError(f"{error}; to leave such lines out: --bad-lines skip") from error
        self.num_skipped += 1
        if len(self.first) < _NUM_NAMED:
            self.first.append(str(error))


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

    @property
    def trains(self) -> bool:
        """Whether there is anything to learn. Local."""
        return bool(self.completion)


@dataclass(frozen=True)
class Conversation:
    """Chat messages; those of the assistant are to be learnt.

    Attributes:
        where: File and line, for messages.
        messages: As in the file, without fields that are null; each has at least `role` and `content`, both strings.
    """

    where: str
    messages: list[dict[str, Any]]

    @property
    def trains(self) -> bool:
        """Whether there is anything to learn. Local."""
        return any(is_learnt(message) for message in self.messages)


def is_learnt(message: dict[str, Any]) -> bool:
    """Return whether a message is of the assistant, which says or calls something in it. Local."""
    return message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))


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


def read(file: BinaryIO, name: str, fields: Fields, bad_lines: BadLines) -> Iterator[Example]:
    """Yield the examples of a file in its order, skipping blank lines.

    A line is an object with `messages`, or with prompt and completion, or with `text`, in this order of precedence.

    Local.

    Args:
        file: Opened for reading bytes; decompressed here where `name` ends in .gz.
        name: Its name, for messages.
        fields: Names of the prompt and completion fields.
        bad_lines: Takes the lines that cannot be understood.

    Raises:
        UserError: The file cannot be read, or a line cannot be understood; the message names file and line.
    """
    for where, line in _lines(file, name):
        if line.strip():
            try:
                example = _example(_parse(line, where), where, fields)
            except BadLine as error:
                bad_lines.add(error)
            else:
                yield example


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
        raise BadLine(f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}") from error
    except json.JSONDecodeError as error:
        raise BadLine(
            f"{where}: expected a JSON object, got invalid JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists thousands deep
        raise BadLine(f"{where}: expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise BadLine(f"{where}: expected a JSON object, got {_kind(record)}")
    return record


def _example(record: dict[str, Any], where: str, fields: Fields) -> Example:
    """Return the example of a line, by the first known form."""
    if fields.renamed or ({fields.prompt, fields.completion} <= record.keys() and "messages" not in record):
        completion = _text(record, fields.completion, where)
        return Pair(where, _text(record, fields.prompt, where), completion)
    if "messages" in record:
        return Conversation(where, _messages(record["messages"], where))
    if "text" in record:
        return Pair(where, "", _text(record, "text", where))
    raise BadLine(
        f"{where}: expected the fields 'messages', or 'prompt' and 'completion', or 'text', got {_names(record)}: "
        "name yours with --prompt-field and --completion-field"
    )


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Check a conversation down to the types of its contents; each content becomes one string."""
    if not isinstance(messages, list):
        raise BadLine(f"{where}: expected 'messages' to be a list of objects, got {_kind(messages)}")
    checked = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadLine(f"{where}: expected each of 'messages' to be an object, got {_kind(message)}")
        role = _text(message, "role", where)
        if role not in _ROLES:
            raise BadLine(f"{where}: expected a role among {', '.join(_ROLES)}, got {_cut(repr(role))}")
        # Tables write what a row does not have as null, and chat templates ask whether a field is there.
        present = {name: value for name, value in message.items() if value is not None}
        checked.append(present | {"content": _content(message, where)})
    if checked and is_learnt(checked[0]):
        raise BadLine(f"{where}: expected a system or user message before the assistant's first, got none")
    return checked


def _content(message: dict[str, Any], where: str) -> str:
    """Return the text of a message: a string, a list of parts, or null, as where the assistant calls a tool."""
    content = message.get("content")
    if content is None and ("content" in message or message.get("tool_calls")):
        return ""
    if not isinstance(content, list):
        return _text(message, "content", where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = _cut(repr(part["type"])) if isinstance(part, dict) and "type" in part else _kind(part)
            raise BadLine(f"{where}: expected parts of the type 'text' in 'content', got {kind}")
    return "".join(_text(part, "text", where) for part in content)


def _text(record: dict[str, Any], field: str, where: str) -> str:
    """Return a field that must be there and must be text."""
    if field not in record:
        raise BadLine(
            f"{where}: expected the field {field!r}, got {_names(record)}: see --prompt-field and --completion-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise BadLine(f"{where}: expected {field!r} to be a string, got {_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        raise BadLine(f"{where}: expected text in {field!r}, got a lone surrogate at {error.start}") from error
    return text


def _names(record: dict[str, Any]) -> str:
    return _cut(", ".join(map(repr, record))) or "no fields"


def _cut(text: str) -> str:
    """Cut what a file may hold to what a message may hold."""
    return text if len(text) <= 200 else f"{text[:197]}..."


def _kind(value: Any) -> str:
    """Name a JSON value's type in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
