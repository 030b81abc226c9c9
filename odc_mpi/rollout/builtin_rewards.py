"""Built-in reward functions, which are selected by name in `rl.reward_funcs`.

If the prompt lacks the column that a function needs, such as `answer`, the function returns None for each completion.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from odc_mpi.rollout import math_reward

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def completion_text(completion: Any) -> str:
    """Return the text of a completion. For a list of messages, this is the concatenation of their contents."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def exact_match(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Return 1 for each completion that equals the column `answer` except for surrounding whitespace, else 0."""
    return _each(completions, columns.get("answer"), lambda text, answer: float(text.strip() == str(answer).strip()))


def final_number(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Return 1 for each completion whose last number equals the last number in the column `answer`, and 0 otherwise.

    Numbers before the last ``####`` in a string are ignored, as in GSM8K. The reward is None if `answer` has no number.
    """

    def compare(text: str, answer: Any) -> float | None:
        expected = last_number(str(answer))
        return None if expected is None else float(last_number(text) == expected)

    return _each(completions, columns.get("answer"), compare)


def math(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    r"""Return 1 for each completion whose last mathematical value equals the column `answer`, and 0 otherwise.

    Values may be LaTeX, such as ``\boxed{\frac12}``. The reward is None if `answer` has no value.
    """
    return _each(completions, columns.get("answer"), lambda text, answer: math_reward.compare(text, str(answer)))


def regex(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
    """Return 1 for each completion that contains a match for the regular expression in the column `pattern`, else 0.

    The reward is None if the pattern is None.
    """
    return _each(completions, columns.get("pattern"), lambda text, pattern: float(bool(re.search(pattern, text))))


def length(completion_ids: Sequence[Sequence[int]], **columns: Sequence[Any]) -> list[float | None]:
    """Return the number of tokens in each completion. A negative weight rewards shorter completions."""
    return [float(len(tokens)) for tokens in completion_ids]


def last_number(text: str) -> Decimal | None:
    """Return the last number in a string, or None. Text before the last ``####`` and commas in numbers are ignored."""
    numbers = _NUMBER.findall(text.rpartition("####")[2])
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
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
    function.__name__: function for function in (exact_match, final_number, math, regex, length)
}
