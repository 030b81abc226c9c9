"""Blocks of records (lines, elements or rows), which readers yield."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from odc_mpi.data.records.fields import InvalidRecordError, json_kind


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
