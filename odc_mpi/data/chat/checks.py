"""Checks of rendered conversations: does each part of an answer have loss, and which parts does the template drop?"""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from odc_mpi.data.chat.tool_calls import called_functions, contains_arguments
from odc_mpi.data.examples import Conversation
from odc_mpi.data.records.messages import REASONING
from odc_mpi.data.records.schema import METADATA

CharSpan = tuple[int, int]
_DROPPED = "(the chat template leaves it out)"
#: Fields of messages that are checked, or name the author of a message; the other ones are metadata or unknown.
_KNOWN = METADATA | {"role", "content", "tool_calls", "tool_call_id", "name", "type", REASONING[0]}


class Rendered(NamedTuple):
    """Text of one training example.

    Attributes:
        text: Complete text, which is tokenized.
        spans: Character ranges (begin, end) with loss: each trained answer including its end-of-turn token, or the
            parts that the chat template marks.
        omitted: Last part of the generation prompt, such as "<think>", if `text` lacks it; otherwise empty.
        ignored: Descriptions of the parts of the record that `text` does not contain.
        unended: Empty if an answer ends with a special token that has loss. Otherwise the token that should end one.
    """

    text: str
    spans: list[CharSpan]
    omitted: str = ""
    ignored: tuple[str, ...] = ()
    unended: str = ""


def find_problem(chat: Conversation, indices: Sequence[int], example: Rendered) -> str | None:
    """Return an error description for the first message that does not match the spans of an example, or None.

    The content of each message in `indices` (the reasoning, if it has nothing else) and its calls must be in the spans,
    in order. The content may begin in the generation prompt. The content of a user
    message must not occur only in spans.
    """
    text, spans, position = example.text, list(example.spans), 0
    is_one_each = len(spans) == len(indices)  # marks may divide an answer into several spans
    for number, i in enumerate(indices):
        message, end = chat.messages[i], None
        functions = called_functions(message)
        content = (message["content"] or ("" if functions else message.get(REASONING[0], ""))).strip()
        while spans and (end := _find_content(text, content, position, spans[0])) is None:
            spans.pop(0)
        answer_spans = example.spans[number : number + 1] if is_one_each else spans
        trained = "".join(text[begin:stop] for begin, stop in answer_spans)
        if end is None or not all(
            each["name"] in trained and contains_arguments(trained, each["arguments"]) for each in functions
        ):
            return f"drops a part of message {i + 1}, an answer to train on"
        position = end
    bounds = [0, *itertools.chain(*example.spans), len(text)]
    context = "\0".join(text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
    for i, message in enumerate(chat.messages):
        content = message["content"].strip()
        if message["role"] == "user" and content not in context and content in text:
            return f"has message {i + 1}, of the user, in an answer"
    return None


def _find_content(text: str, content: str, position: int, span: CharSpan) -> int | None:
    """Return the end of `content`, which begins at `position` or later and ends in the span, or None.

    The template may have changed the whitespace.
    """
    begin, end = span
    start = max(position, begin - len(content) + 1)
    if (at := text.find(content, start, end)) >= 0:
        return at + len(content)
    before, inside, expected = ("".join(part.split()) for part in (text[start:begin], text[begin:end], content))
    return end if (before + inside).find(expected, max(0, len(before) - len(expected) + 1)) >= 0 else None


def find_ignored(chat: Conversation, indices: Sequence[int], example: Rendered, template: str) -> Iterator[str]:
    """Yield a description of each part of a conversation that an example does not contain.

    These are the reasoning of the answers in `indices`, tools, calls in other messages, and fields of messages that
    `template` does not mention.
    """
    yield from chat.ignored
    reasoning = [_without_space(chat.messages[i].get(REASONING[0], "")) for i in indices]
    trained = "".join(example.text[begin:end] for begin, end in example.spans) if any(reasoning) else ""
    if any(each not in _without_space(trained) for each in reasoning):
        yield f"reasoning of messages {_DROPPED}"
    names = [tool.get("function", tool) for tool in chat.tools or ()]
    if any(isinstance(each, dict) and str(each.get("name", "")) not in example.text for each in names):
        yield f"`tools` {_DROPPED}"
    messages = chat.messages[: max(indices) + 1]
    if any(each["name"] not in example.text for message in messages for each in called_functions(message)):
        yield f"`tool_calls` of messages {_DROPPED}"
    fields = {field for message in messages for field, value in message.items() if value not in ("", [], {})}
    for field in sorted(fields - _KNOWN - names_in_template(template)):
        yield f"`{field}` of messages {_DROPPED}"


def _without_space(text: str) -> str:
    return "".join(text.split())


@functools.lru_cache
def names_in_template(template: str) -> frozenset[str]:
    """Return the attributes and the keys in quotes that a template mentions outside comments."""
    return frozenset(re.findall(r"(?<=\.)[A-Za-z_]\w*|(?<=['\"])[A-Za-z_]\w*(?=['\"])", without_comments(template)))


def without_comments(template: str) -> str:
    """Return the source of a Jinja template without its comments."""
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
