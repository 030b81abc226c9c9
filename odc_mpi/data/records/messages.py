"""Checking the messages of conversations and their calls of tools, and converting them to the form of templates."""

import json
from typing import Any

from odc_mpi.data.records.fields import (
    LOSS_FLAGS,
    MAX_CHARS,
    InvalidRecordError,
    field_names,
    from_json,
    json_kind,
    text_field,
)
from odc_mpi.errors import one_line_message
from odc_mpi.formatting import truncate_text

#: Roles in published data sets, with the corresponding roles of chat templates. Other roles are not changed.
_ROLES = dict.fromkeys(("human",), "user") | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool")
_ROLES |= {"developer": "system", "function_call": "assistant"}
_SHAREGPT_FIELDS = {"from": "role", "value": "content"}
#: Names of a message's reasoning in published data sets and templates. Messages have it under the first one.
REASONING = ("reasoning_content", "reasoning", "thinking")
#: Fields of a call that stand beside `function`, also if the call has no such field.
_OUTER = ("id", "type", "index")
_MOVED = {"tool_calls", "function_call", "refusal", *REASONING}


def parse_messages(messages: Any, name: str, location: str) -> list[dict[str, Any]]:
    """Check the messages in the field `name`, and return them in the form that chat templates expect.

    The content of each message becomes one string. Roles are translated, and null fields removed. `from` becomes
    `role`, and `value` becomes `content`. Calls become `tool_calls` in the form of `parse_calls`, whether they are in
    this field, in `function_call`, or the content of a message with the role "function_call". Reasoning becomes
    `reasoning_content`. Raises an `InvalidRecordError` if a message is invalid.
    """
    if not isinstance(messages, list):
        kind = json_kind(messages) + (" that is not the JSON text of messages" if isinstance(messages, str) else "")
        raise InvalidRecordError(f"{location}: expected {name!r} to be a list of objects, got {kind}")
    return [_parse_message(message, name, location) for message in messages]


def _parse_message(message: Any, name: str, location: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRecordError(f"{location}: expected each of {name!r} to be an object, got {json_kind(message)}")
    if "from" in message:
        message = {_SHAREGPT_FIELDS.get(key, key): value for key, value in message.items()}
    role = text_field(message, "role", location)
    # Tables have null for missing fields, and chat templates check whether a field exists.
    parsed = {key: value for key, value in message.items() if value is not None}
    for flag, value in parsed.items():
        if flag in LOSS_FLAGS and value not in (0, 1):
            got = truncate_text(repr(value), MAX_CHARS)
            raise InvalidRecordError(f"{location}: expected {flag!r} to be 0, 1, false or true, got {got}")
    moved = {} if _MOVED.isdisjoint(parsed) else {key: parsed.pop(key) for key in _MOVED & parsed.keys()}
    calls = moved.get("tool_calls") or moved.get("function_call")
    content = _content(parsed, location, is_optional="content" in message or bool(calls))
    name = "tool_calls"
    if role == "function_call":  # LLaMA-Factory: the content is the JSON text of calls
        content, calls, name = "", content, role
    parsed |= {"role": _ROLES.get(role, role), "content": content}
    if "refusal" in moved:  # OpenAI: instead of the content
        parsed["content"] = _one_text(moved | {"content": content}, ("content", "refusal"), location)
    if calls is not None and (calls := parse_calls(calls, name, location)):
        parsed["tool_calls"] = calls
    if moved and (reasoning := _one_text(moved, REASONING, location)):
        parsed[REASONING[0]] = reasoning
    return parsed


def _content(message: dict[str, Any], location: str, *, is_optional: bool) -> str:
    """Return the text of a message, whose content is a string, a list of parts of the type "text", or null."""
    content = message.get("content")
    if content is None and is_optional:
        return ""
    if not isinstance(content, list):
        return text_field(message, "content", location)
    for part in content:
        if (kind := part.get("type") if isinstance(part, dict) else None) != "text":
            got = json_kind(part) if kind is None else truncate_text(repr(kind), MAX_CHARS)
            raise InvalidRecordError(f"{location}: expected parts of the type 'text' in 'content', got {got}")
    return "".join(text_field(part, "text", location) for part in content)


def _one_text(message: dict[str, Any], names: tuple[str, ...], location: str) -> str:
    """Return the text that is in one of the fields `names`, or "" if all are missing or empty."""
    texts = {text_field(message, name, location) for name in names if name in message} - {""}
    if len(texts) > 1:
        raise InvalidRecordError(
            f"{location}: expected one of {', '.join(map(repr, names))} in a message, got several: keep one"
        )
    return texts.pop() if texts else ""


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
