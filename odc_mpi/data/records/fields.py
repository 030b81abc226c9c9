"""Checks of the fields of a record, and the error for a record that cannot be used."""

import json
from collections.abc import Mapping
from typing import Any

from odc_mpi.errors import UserError, one_line_message
from odc_mpi.formatting import truncate_text

MAX_CHARS = 200  # of a text from a file, in a message
#: Fields of a message that determine whether it has loss: `weight` (OpenAI), `train` and `training` (axolotl), `loss`
#: and `loss_scale` (ms-swift), `loss_mask`. Templates do not receive them.
LOSS_FLAGS = frozenset(("weight", "train", "training", "loss", "loss_scale", "loss_mask"))


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


def list_field(record: Mapping[str, Any], field: str, location: str) -> list[Any]:
    """Return the list in an optional field, decoded if it is JSON text. Missing, null and empty values are [].

    Raises an `InvalidRecordError` if the value is something else.
    """
    value = record.get(field)
    if isinstance(value, str):
        expected = f"{location}: expected {field!r} to be a list or JSON text of one"
        value = from_json(value, expected) if value.strip() else None
    if value and not isinstance(value, list):
        raise InvalidRecordError(f"{location}: expected {field!r} to be a list, got {json_kind(value)}")
    return value or []


def field_names(record: Mapping[str, Any]) -> str:
    """Return the names of a record's fields as text for an error message."""
    return truncate_text(", ".join(map(repr, record)), MAX_CHARS) or "no fields"


def from_json(text: str, expected: str) -> Any:
    """Return the value of a JSON text. Raises an `InvalidRecordError`, which begins with `expected`, if invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"{expected}, got invalid JSON ({one_line_message(error)})") from error


def json_kind(value: Any) -> str:
    """Return the JSON type of a value, with an article, such as "an object"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")
