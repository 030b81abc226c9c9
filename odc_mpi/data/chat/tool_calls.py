"""The arguments of tool calls in the two forms that chat templates expect, and in the rendered text."""

import json
from collections.abc import Iterator
from typing import Any


def argument_forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the messages with the arguments of tool calls as objects, and as JSON text, which some templates require.

    Without tool calls, there is one form.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    return [messages, [_with_text_arguments(message) for message in messages]]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def called_functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the name and the arguments of each call in a message."""
    return [call["function"] for call in message.get("tool_calls", ())]


def contains_arguments(text: str, arguments: dict[str, Any]) -> bool:
    """Return True if a text contains arguments in one of the forms that published chat templates write.

    These are a JSON object; names and values, as GLM and Qwen3-Coder write them between tags; and the arguments of a
    call in Python, as LFM2 writes them.
    """
    if json.dumps(arguments, ensure_ascii=False) in text:
        return True
    if arguments and all(f"{name}={value!r}" in text for name, value in arguments.items()):
        return True
    if is_distorted(text, arguments):
        return False
    # Among names and values, Qwen3-Coder writes None and True.
    forms = (
        (str(leaf).strip(), *(json.dumps(leaf, ensure_ascii=is_ascii).strip('"') for is_ascii in (False, True)))
        for leaf in _leaves(arguments)
    )
    return all(any(form in text for form in each) for each in forms)


def is_distorted(text: str, arguments: dict[str, Any]) -> bool:
    """Return True if a text contains arguments in Python's representation, or as JSON text in a JSON string."""
    as_text = json.dumps(arguments, ensure_ascii=False)
    doubled = (json.dumps(as_text, ensure_ascii=is_ascii) for is_ascii in (False, True))
    return any(dump in text for dump in doubled) or any(repr(value) in text for value in _containers(arguments))


def _containers(value: Any) -> Iterator[Any]:
    """Yield the objects and lists in a value, also the value itself, that Python represents differently from JSON."""
    if isinstance(value, dict | list):
        if repr(value) != json.dumps(value, ensure_ascii=False):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the names and the values at any depth that are no objects or lists."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
