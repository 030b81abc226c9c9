r"""Rewards that come along, by the names that `rl.reward_funcs` takes.

    exact_match    1 if the completion is the column `answer`, spaces at the ends aside
    final_number   1 if the last number of the completion is that of the column `answer`, where it follows ``####`` or
                   is the last one, too, as in GSM8K
    regex          1 if the column `pattern`, a regular expression, is found in the completion
    length         the number of tokens of the completion; of a negative weight: shorter is better

A prompt without the column makes them return None.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def completion_text(completion: Any) -> str:
    """Return a completion's text; of a chat that of its messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def exact_match(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Compare with the column `answer`."""
    return _each(completions, columns.get("answer"), lambda text, answer: float(text.strip() == str(answer).strip()))


def final_number(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Compare the last number with that of the column `answer`."""

    def compare(text: str, answer: Any) -> float | None:
        expected = last_number(str(answer))
        return None if expected is None else float(last_number(text) == expected)

    return _each(completions, columns.get("answer"), compare)


def regex(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Look for the column `pattern`."""
    return _each(completions, columns.get("pattern"), lambda text, pattern: float(bool(re.search(pattern, text))))


def length(completion_ids: Sequence[Sequence[int]], **columns: Sequence[Any]) -> list[float | None]:
    """Count tokens."""
    return [float(len(tokens)) for tokens in completion_ids]


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, behind ``####`` if there is one; commas between digits are ignored."""
    found = _NUMBER.findall(text.rpartition("####")[2])
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def _each(
    completions: Sequence[Any], column: Sequence[Any] | None, compare: Callable[[str, Any], float | None]
) -> list[float | None]:
    expected = column or [None] * len(completions)
    return [
        None if value is None else compare(completion_text(completion), value)
        for completion, value in zip(completions, expected, strict=True)
    ]


REWARDS: Mapping[str, Callable[..., list[float | None]]] = {
    "exact_match": exact_match,
    "final_number": final_number,
    "regex": regex,
    "length": length,
}
