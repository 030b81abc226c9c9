"""Blocks of records: lines, elements or rows of a source."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from odc_mpi.data.readers.records import InvalidRecordError, check_object, parse_json

#: Characters of text in a block: enough to keep a process busy, and few enough to keep the tokens' offsets in memory.
_BLOCK_CHARS = 1 << 19
_BLOCK_RECORDS = 1024

#: Function that returns how often to use a record. It is called once for each, in the order of the file.
RepeatFn = Callable[[], int]
T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file or data set. Blocks are pickled to be sent to worker processes.

    Attributes:
        name: Path of the file, or name of the data set.
        unit: What the numbers count, such as "row".
        numbers: Number of each record, from 1.
        values: The records; lines of JSON, which are not parsed yet; or an error for each record that is invalid.
    """

    name: str
    unit: str
    numbers: list[int]
    values: list[Any]

    def records(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield, for each record, its location for error messages and a function that returns the record.

        The function raises an InvalidRecordError if the record cannot be parsed, or is not an object.
        """
        for number, value in zip(self.numbers, self.values, strict=True):
            location = f"{self.name}, {self.unit} {number}"
            yield location, lambda value=value, where=location: _to_record(value, where)  # type: ignore[misc]


def _to_record(value: Any, location: str) -> dict[str, Any]:
    if isinstance(value, bytes):
        return parse_json(value, location)
    if isinstance(value, InvalidRecordError):
        raise InvalidRecordError(f"{location}: {value}")
    return check_object(value, location)


def split_into_blocks(
    items: Iterable[tuple[int, T, int]], num_repeats: RepeatFn
) -> Iterator[tuple[list[int], list[T]]]:
    """Yield the numbers and the values of the items of each block.

    Args:
        items: Number, value and number of characters of each item.
        num_repeats: Function that returns how often to use an item.
    """
    numbers: list[int] = []
    values: list[T] = []
    size = 0
    for number, value, num_chars in items:
        for _ in range(num_repeats()):
            numbers.append(number)
            values.append(value)
            size += num_chars
            if size >= _BLOCK_CHARS or len(values) >= _BLOCK_RECORDS:
                yield numbers, values
                numbers, values, size = [], [], 0
    if values:
        yield numbers, values


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the fields that are null, in all its structures.

    A field that one record of a table has is null in all other records.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
