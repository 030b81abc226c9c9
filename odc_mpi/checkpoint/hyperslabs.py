"""From a range of a flattened tensor to boxes of the tensor itself. Pure arithmetic."""

import math
from collections.abc import Iterator, Sequence

#: First and one past the last index in each dimension.
Box = tuple[tuple[int, int], ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
    """Cut elements `[start, stop)` of a flattened tensor into boxes, in order. Local.

    A range that begins and ends inside rows is the end of a row, whole rows, and the beginning of a row; the parts of
    rows are cut in the same way.

    Args:
        shape: Shape of the tensor, at least one dimension.
        start: First element.
        stop: One past the last.

    Yields:
        First and one past the last element of the flattened tensor, and their box, whose elements are in the same
        order.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield start, stop, ((start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    head = min(stop, first * row)
    if start < head:
        yield from _within_row(shape, start, head)
    if first < last:
        yield first * row, last * row, ((first, last), *((0, extent) for extent in shape[1:]))
    if last * row < stop and first <= last:
        yield from _within_row(shape, last * row, stop)


def _within_row(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
    row = math.prod(shape[1:])
    index = start // row
    for begin, end, box in boxes(shape[1:], start - index * row, stop - index * row):
        yield begin + index * row, end + index * row, ((index, index + 1), *box)
