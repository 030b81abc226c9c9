"""Types of settings, and conditions on their values beyond types. Local."""

from collections.abc import Callable
from typing import Any, NamedTuple, NewType

#: A number of bytes, also written as text such as 512M.
Size = NewType("Size", int)


class Check(NamedTuple):
    """A condition on a value beyond its type, with the words that follow "expected" when it fails."""

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Check("above 0", lambda value: value > 0)
NOT_NEGATIVE = Check("0 or more", lambda value: value >= 0)
ONE_OR_MORE = Check("1 or more", lambda value: value >= 1)
NAMES = Check("not empty", lambda value: bool(value) and all(isinstance(name, str) and name for name in value))
