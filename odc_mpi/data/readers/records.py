"""Records of a source (lines or rows) as objects, checks of their fields, and errors that name file and line."""

import json
from collections.abc import Mapping
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

MAX_CHARS = 200  # of a text from a file, in a message
_MAX_EXAMPLES = 3


class InvalidRecordError(UserError):
    """Error that a line or row cannot be used. The message contains the file and the line."""


class InvalidRecords:
    """Counter of skipped invalid records.

    Args:
        skip: True to skip invalid records; False to raise a UserError for the first one.

    Attributes:
        num_skipped: Number of records skipped so far.
        first: Error messages of up to three skipped records, the first ones.
    """

    def __init__(self, skip: bool = False) -> None:
        self._skip = skip
        self.num_skipped = 0
        self.first: list[str] = []

    def add(self, error: InvalidRecordError) -> None:
        """Count an invalid record and keep its message. Raises a UserError unless invalid records are skipped."""
        if not self._skip:
            raise UserError(f"{error}. To skip such lines, use --bad-lines skip") from error
        self.num_skipped += 1
        if len(self.first) < _MAX_EXAMPLES:
            self.first.append(str(error))


def parse_json(line: bytes, location: str) -> dict[str, Any]:
    """Decode a line into a record. Raises an InvalidRecordError if it is not a JSON object in UTF-8."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRecordError(
            f"{location}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidRecordError(
            f"{location}: expected a JSON object, got invalid JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, lists nested thousands deep
        raise InvalidRecordError(f"{location}: expected a JSON object, got invalid JSON ({error})") from error
    return check_object(record, location)


def check_object(value: Any, location: str) -> dict[str, Any]:
    """Return the value if it is a JSON object. Otherwise raise an InvalidRecordError that names `location`."""
    if not isinstance(value, dict):
        raise InvalidRecordError(f"{location}: expected a JSON object, got {json_kind(value)}")
    return value


def text_field(record: Mapping[str, Any], field: str, location: str) -> str:
    """Return the text of a required field. Raises an InvalidRecordError if it is missing or not Unicode text."""
    if field not in record:
        raise InvalidRecordError(f"{location}: expected the field {field!r}, got {field_names(record)}")
    text = record[field]
    if not isinstance(text, str):
        raise InvalidRecordError(f"{location}: expected {field!r} to be a string, got {json_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair; tokenizers reject it
        raise InvalidRecordError(
            f"{location}: expected text in {field!r}, got a byte that is not UTF-8 or a lone surrogate at {error.start}"
        ) from error
    return text


def field_names(record: Mapping[str, Any]) -> str:
    """Return the names of a record's fields, for a message."""
    return truncate_text(", ".join(map(repr, record)), MAX_CHARS) or "no fields"


def json_kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")
