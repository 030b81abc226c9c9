"""Blocks of records (lines, elements or rows) from a source, and checks of their fields."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

MAX_CHARS = 200  # of a text from a file, in a message


class InvalidRecordError(UserError):
    """Error for a record that cannot be used. The message begins with the location: the file and the line or row."""


def text_field(record: Mapping[str, Any], field: str, location: str) -> str:
    """Return a required field's text. Raises an `InvalidRecordError` if the field is missing or not Unicode text."""
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
    """Return the names of a record's fields as text for an error message."""
    return truncate_text(", ".join(map(repr, record)), MAX_CHARS) or "no fields"


def json_kind(value: Any) -> str:
    """Return the JSON type of a value, with an article, such as "an object"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")


@dataclass(frozen=True)
class Block:
    """Records of one file or data set, in order.

    Attributes:
        name: Path of the file, or name of the data set.
        unit: Unit in which records are numbered, such as "row".
        items: The number of each record, counted from 1, and its value: the parsed record, an unparsed line of JSON, or
            an error if the record is invalid.
    """

    name: str
    unit: str
    items: list[tuple[int, Any]]

    def select(self, selection: Iterator[bool]) -> "Block":
        """Return a block of the records for which `selection` yields True."""
        return Block(self.name, self.unit, [item for item in self.items if next(selection, False)])

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield each record's location, for error messages, and its value, which `to_record` converts to the record."""
        return ((f"{self.name}, {self.unit} {number}", value) for number, value in self.items)


def to_record(value: Any, location: str) -> dict[str, Any]:
    """Return the record for a value from `Block.items`, parsing the value if it is a line of JSON.

    Raises an `InvalidRecordError` if the value is an error, cannot be parsed, or is not a JSON object.
    """
    if isinstance(value, InvalidRecordError):
        raise InvalidRecordError(f"{location}: {value}")
    try:
        value = json.loads(value.decode("utf-8")) if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        problem = f"UTF-8, got byte 0x{error.object[error.start]:02x} at {error.start}"
        raise InvalidRecordError(f"{location}: expected {problem}") from error
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits, lists nested thousands deep
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InvalidRecordError(f"{location}: expected a JSON object, got invalid JSON ({reason})") from error
    if not isinstance(value, dict):
        raise InvalidRecordError(f"{location}: expected a JSON object, got {json_kind(value)}")
    return value
