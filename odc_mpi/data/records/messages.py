"""Checking the messages and tools of conversations, and converting them to the form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from odc_mpi.data.records.fields import MAX_CHARS, InvalidRecordError, field_names, json_kind, text_field
from odc_mpi.errors import one_line_message
from odc_mpi.formatting import truncate_text

#: Roles in published data sets, with the corresponding roles of chat templates. Other roles are not changed.
_ROLES = dict.fromkeys(("human",), "user") | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool")
_ROLES |= {"developer": "system", "function_call": "assistant"}
_SHAREGPT_FIELDS = {"from": "role", "value": "content"}
#: Fields of a message that determine whether it has loss, with their allowed values. Templates do not receive them.
LOSS_FLAGS: Mapping[str, tuple[Any, ...]] = {"weight": (0, 1), "train": (False, True)}


def parse_tools(tools: Any, location: str) -> list[Any] | None:
    """Return the list `tools`, decoded if it is JSON, or None if empty. Raises an `InvalidRecordError` if invalid."""
    if isinstance(tools, str) and tools.strip():
        tools = _from_json(tools, f"{location}: expected 'tools' to be a list or JSON text of one")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InvalidRecordError(f"{location}: expected 'tools' to be a list of objects, got {json_kind(tools)}")
    for tool in tools:
        if not isinstance(tool, dict):
            raise InvalidRecordError(f"{location}: expected each of 'tools' to be an object, got {json_kind(tool)}")
    return tools


def parse_messages(messages: Any, name: str, location: str) -> list[dict[str, Any]]:
    """Check the messages in the field `name`, and return them in the form that chat templates expect.

    The content of each message becomes one string. Roles are translated, null fields are removed, `from` and `value`
    are renamed, and "function_call" messages become tool calls. Raises an `InvalidRecordError` for invalid messages.
    """
    if not isinstance(messages, list):
        kind = json_kind(messages) + (" that is not the JSON text of messages" if isinstance(messages, str) else "")
        raise InvalidRecordError(f"{location}: expected {name!r} to be a list of objects, got {kind}")
    checked = []
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRecordError(f"{location}: expected each of {name!r} to be an object, got {json_kind(message)}")
        if "from" in message:
            message = {_SHAREGPT_FIELDS.get(key, key): value for key, value in message.items()}
        role = text_field(message, "role", location)
        # Tables have null for missing fields, and chat templates check whether a field exists.
        present = {key: value for key, value in message.items() if value is not None}
        for flag, allowed in LOSS_FLAGS.items():
            if flag in present and present[flag] not in allowed:
                raise InvalidRecordError(
                    f"{location}: expected {flag!r} to be {' or '.join(map(json.dumps, allowed))}, got "
                    f"{truncate_text(repr(present[flag]), MAX_CHARS)}"
                )
        present |= {"role": _ROLES.get(role, role), "content": _content(message, location)}
        checked.append(_with_tool_calls(present, location) if role == "function_call" else present)
    return checked


def _with_tool_calls(message: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a message with the tool calls that its content contains as JSON text, as in LLaMA-Factory."""
    calls = _from_json(message["content"], f"{location}: expected JSON text in a 'function_call'")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            kind = f"the fields {field_names(call)}" if isinstance(call, dict) else json_kind(call)
            raise InvalidRecordError(
                f"{location}: expected each call in a 'function_call' to be an object with 'name', got {kind}"
            )
    return message | {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _from_json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"{expected}, got invalid JSON ({one_line_message(error)})") from error


def _content(message: dict[str, Any], location: str) -> str:
    """Return the text of a message, whose content is a string, a list of parts of the type "text", or null."""
    content = message.get("content")
    if content is None and ("content" in message or message.get("tool_calls")):
        return ""
    if not isinstance(content, list):
        return text_field(message, "content", location)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = (
                truncate_text(repr(part["type"]), MAX_CHARS)
                if isinstance(part, dict) and "type" in part
                else json_kind(part)
            )
            raise InvalidRecordError(f"{location}: expected parts of the type 'text' in 'content', got {kind}")
    return "".join(text_field(part, "text", location) for part in content)
