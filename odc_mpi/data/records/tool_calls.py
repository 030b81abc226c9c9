"""Checking tools and the calls of tools, and converting them to the form that chat templates expect."""

import json
from typing import Any

from odc_mpi.data.records.fields import InvalidRecordError, field_names, from_json, json_kind
from odc_mpi.errors import one_line_message

#: Fields of a call that stand beside `function`, also if the call has no such field.
_OUTER = ("id", "type", "index")


def parse_calls(calls: Any, name: str, location: str) -> list[dict[str, Any]]:
    """Return a list of calls, each as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.

    `calls` is the value of the field `name`: a call, a list of calls, JSON text of one of these, or empty. A call has
    this form, or is the inner object alone. Its arguments are an object, JSON text of one, or missing. Raises an
    `InvalidRecordError` if `calls` is something else.
    """
    if isinstance(calls, str) and (calls.strip() or name == "function_call"):
        calls = from_json(calls, f"{location}: expected JSON text in {_article(name)}")
    if calls is None or calls == "" or calls == []:
        return []
    return [_parse_call(call, name, location) for call in (calls if isinstance(calls, list) else [calls])]


def _parse_call(call: Any, name: str, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        kind = f"the fields {field_names(function)}" if isinstance(function, dict) else json_kind(function)
        raise InvalidRecordError(
            f"{location}: expected each call in {_article(name)} to be an object with 'name', got {kind}"
        )
    if function is call:
        call = {key: value for key, value in call.items() if key in _OUTER}
        function = {key: value for key, value in function.items() if key not in _OUTER}
    arguments = {"arguments": _parse_arguments(function, location)}
    call = {key: value for key, value in call.items() if value is not None}
    return {"type": "function"} | call | {"function": function | arguments}


def _parse_arguments(function: dict[str, Any], location: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Missing, null and empty arguments are `{}`."""
    arguments = function.get("arguments")
    if arguments is None and function.keys() - {"name", "arguments", "description"}:
        raise InvalidRecordError(f"{location}: expected 'name' and 'arguments' in a call, got {field_names(function)}")
    expected = f"{location}: expected the arguments of {function['name']!r} to be an object or JSON text of one"
    if isinstance(arguments, str) and arguments.strip():
        arguments = from_json(arguments, expected)
    elif arguments is None or isinstance(arguments, str):
        return {}
    if not isinstance(arguments, dict):
        raise InvalidRecordError(f"{expected}, got {json_kind(arguments)}")
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # times and bytes in tables, NaN
        raise InvalidRecordError(f"{expected}, got {one_line_message(error)}") from error
    return arguments


def _article(name: str) -> str:
    return f"a {name!r}" if name == "function_call" else repr(name)
