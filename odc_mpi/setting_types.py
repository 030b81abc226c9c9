"""Types of settings, checks on their values, and descriptions of types and values for error messages.

A section of settings is a frozen dataclass whose fields are annotated with a type, a help text, and checks.
"""

import functools
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NewType, Union, get_args, get_origin, get_type_hints

from odc_mpi.errors import UserError
from odc_mpi.formatting import parse_size, truncate_text
from odc_mpi.yaml_dialect import is_utf8, read_value

#: Number of bytes. Users can also write it with a unit, as in 512M.
if TYPE_CHECKING:
    Size = int  # type checkers accept any integer
else:
    Size = NewType("Size", int)

_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    list[str]: "a list of names",
    list[float]: "a list of numbers",
    list[int]: "a list of integers",
    Size: "a size such as 512M",
}
_SHORT_NAMES: dict[Any, str] = {types.NoneType: "null", Size: "bytes, such as 512M", dict[str, Any]: "dict"}


class Check(NamedTuple):
    """Condition on a setting's value, in addition to its type. Error messages show `description` after the type."""

    description: str
    is_valid: Callable[[Any], bool]


class Setting(NamedTuple):
    """A setting, which is a field of a section, with its type, help text, checks and default value.

    `explain` returns the end of the error for a value of the wrong type. If it is None, the error may suggest quotes.
    """

    type: Any
    help: str
    checks: list[Check]
    default: Any
    explain: Callable[[Any], str] | None = None


POSITIVE = Check("above 0", lambda value: value > 0)
NOT_NEGATIVE = Check("0 or more", lambda value: value >= 0)
ONE_OR_MORE = Check("1 or more", lambda value: value >= 1)
NAMES = Check("each not empty", lambda value: value != "" and all(isinstance(name, str) and name for name in value))
NON_EMPTY_NAMES = Check("not empty", lambda value: bool(value) and NAMES.is_valid(value))


@functools.cache
def settings_of(section: type) -> Mapping[str, Setting]:
    """Return the settings of a section, keyed by field name, in the order of the fields."""
    hints, settings = get_type_hints(section, include_extras=True), {}
    for item in fields(section):
        hint, description, *checks = get_args(hints[item.name])
        settings[item.name] = Setting(hint, description, checks, item.default)
    return settings


def validate_value(name: str, setting: Setting, value: Any) -> Any:
    """Check a value read from YAML, and return it converted to its setting's type.

    Raises `UserError`, with a message that begins with `name`, if a check fails or the type is wrong.
    """
    members, expected = union_members(setting.type), f"{name}: expected {type_name(setting.type)}"
    if isinstance(value, str) and not any(_fits(value, kind) for kind in members):
        # A list without brackets: one item, or several with commas. In a list of numbers, all items must be numbers.
        names = [name.strip() for name in value.split(",")]
        lists: dict[Any, list[Any]] = {list[str]: names, list[float]: [*map(read_value, names)]}
        lists[list[int]] = lists[list[float]]
        value = next((option for kind, option in lists.items() if kind in members and _fits(option, kind)), value)
    if not any(_fits(value, kind) for kind in members):
        remedy = " (put it in quotes)" if str in members and not isinstance(value, dict | list) else ""
        raise UserError(f"{expected}, got {format_value(value)}{setting.explain(value) if setting.explain else remedy}")
    if isinstance(value, str) and not is_utf8(value):
        raise UserError(f"{expected} in UTF-8, without NUL, got {format_value(value)}")
    if Size in members and isinstance(value, str):
        size = parse_size(value)
        value = value if size is None else size
    for check in setting.checks:
        if value is not None and not check.is_valid(value):
            raise UserError(f"{expected}, {check.description}, got {format_value(value)}")
    if str in members and isinstance(value, str):
        return _expand_home(value)
    if list[str] in members and isinstance(value, list):
        return [_expand_home(name) for name in value]
    return float(value) if float in members and isinstance(value, int) else value


def _expand_home(text: str) -> str:
    return os.path.expanduser(text) if "/" in text else text  # noqa: PTH111 - fails for no user, unlike that of Path


def is_verbatim(hint: Any, text: str) -> bool:
    """Return True if a setting of type `hint` takes command-line `text` verbatim, or False if it is parsed as YAML."""
    members = union_members(hint)
    if (list[str] in members and text.startswith("[")) or (types.NoneType in members and text == "null"):
        return False
    literals = [kind for kind in members if get_origin(kind) is Literal]
    if any(text in get_args(kind) for kind in literals):
        return True
    return str in members or (bool(literals) and not {int, float, bool, Size} & {*members})


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or `(hint,)` if it is not a union."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:  # excludes bool, nan and inf
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if get_origin(kind) is list:
        return type(value) is list and all(any(_fits(each, member) for member in get_args(kind)) for each in value)
    if kind is Size:
        return (type(value) is int and value >= 0) or (isinstance(value, str) and parse_size(value) is not None)
    return type(value) is (get_origin(kind) or kind)


def type_name(hint: Any) -> str:
    """Return a description of a type for error messages, such as "an integer or null"."""
    return _join_members(hint, " or ", lambda kind: _TYPE_NAMES.get(kind, "a mapping"))


def type_signature(hint: Any) -> str:
    """Return a type in the notation of Python annotations, such as "int | null"."""
    return _join_members(
        hint, " | ", lambda kind: _SHORT_NAMES.get(kind) or (str(kind) if get_origin(kind) else kind.__name__)
    )


def _join_members(hint: Any, separator: str, name_of: Callable[[Any], str]) -> str:
    return separator.join(
        separator.join(get_args(kind)) if get_origin(kind) is Literal else name_of(kind) for kind in union_members(hint)
    )


def format_value(value: Any) -> str:
    """Format a value as JSON, truncated to 80 characters, for error messages."""
    return truncate_text(json.dumps(value, ensure_ascii=False, skipkeys=True, default=str), 80)
