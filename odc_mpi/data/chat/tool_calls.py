"""The arguments of tool calls in the two forms that chat templates expect, and in the rendered text."""

import copy
import json
from collections.abc import Iterator
from typing import Any


def called_functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the name and the arguments of each call in messages."""
    return [call["function"] for message in messages if "tool_calls" in message for call in message["tool_calls"]]


def argument_forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the messages with the arguments of tool calls as objects, and as JSON text, which some templates require.

    Without tool calls, there is one form.
    """
    if not called_functions(messages):
        return [messages]
    with_text = copy.deepcopy(messages)
    for function in called_functions(with_text):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return [messages, with_text]


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
        (str(part).strip(), *(json.dumps(part, ensure_ascii=is_ascii).strip('"') for is_ascii in (False, True)))
        for part in _parts(arguments)
        if not isinstance(part, dict | list)
    )
    return all(any(form in text for form in each) for each in forms)


def is_distorted(text: str, arguments: dict[str, Any]) -> bool:
    """Return True if a text contains arguments in Python's representation, or as JSON text in a JSON string."""
    as_text = json.dumps(arguments, ensure_ascii=False)
    forms = [json.dumps(as_text, ensure_ascii=is_ascii) for is_ascii in (False, True)]
    for part in _parts(arguments):
        if isinstance(part, dict | list) and repr(part) != json.dumps(part, ensure_ascii=False):
            forms.append(repr(part))
    return any(form in text for form in forms)


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value, and the names and values at any depth in it."""
    yield value
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _parts(item)
