"""Checks of rendered conversations: does each part of an answer have loss, and which parts does the template drop?"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from odc_mpi.data.chat.tool_calls import called_functions, contains_arguments
from odc_mpi.data.examples import Conversation
from odc_mpi.data.records.messages import REASONING
from odc_mpi.data.records.schema import METADATA

CharSpan = tuple[int, int]
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)  # of Jinja
_DROPPED = " (the chat template leaves it out)"
#: Fields of messages that are checked, or name the author of a message; the other ones are metadata or unknown.
_KNOWN = METADATA | {"role", "content", "tool_calls", "tool_call_id", "name", "type", REASONING[0]}


class Rendered(NamedTuple):
    """Text of one training example.

    Attributes:
        text: Complete text, which is tokenized.
        spans: Character ranges (begin, end) with loss: each trained answer including its end-of-turn token, or the
            parts that the chat template marks.
        omitted: Last part of the generation prompt, such as "<think>", if `text` lacks it; otherwise empty.
        notes: What the report of `prepare` says about the conversation; see `encode.Encoded`.
    """

    text: str
    spans: list[CharSpan]
    omitted: str = ""
    notes: tuple[str, ...] = ()


def find_problem(chat: Conversation, indices: Sequence[int], example: Rendered) -> str | None:
    """Return an error description for the first message that does not match the spans of an example, or None.

    The content of each message in `indices` (the reasoning, if it has nothing else) and its calls must be in the spans,
    in order. The content may begin in the generation prompt. The content of a user message must not occur only in
    spans.
    """
    text, spans, position = example.text, list(example.spans), 0
    is_one_each = len(spans) == len(indices)  # marks may divide an answer into several spans
    for number, i in enumerate(indices):
        message, end = chat.messages[i], None
        functions = called_functions([message])
        content = (message["content"] or ("" if functions else message.get(REASONING[0], ""))).strip()
        while spans and (end := _find_content(text, content, position, spans[0])) is None:
            spans.pop(0)
        answer_spans = example.spans[number : number + 1] if is_one_each else spans
        trained = "".join(text[begin:stop] for begin, stop in answer_spans) if functions else ""
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
    if any(word not in text[start:end] for word in content.split(maxsplit=1)[:1]):  # faster than the comparison
        return None
    before, inside, expected = ("".join(part.split()) for part in (text[start:begin], text[begin:end], content))
    return end if (before + inside).find(expected, max(0, len(before) - len(expected) + 1)) >= 0 else None


def find_ignored(chat: Conversation, indices: Sequence[int], examples: Sequence[Rendered], template: str) -> list[str]:
    """Return a description of each part of a conversation that none of its examples contains.

    These are reasoning, tools, calls in messages without loss, and fields of messages that `template` does not use.
    Messages after the last of `indices`, the answers with loss, are not checked. Without any, all messages are.
    """
    ignored = list(chat.ignored)
    messages = chat.messages[: indices[-1] + 1] if indices else chat.messages
    text = "\0".join(each.text for each in examples)
    fields = {*itertools.chain(*messages)}
    if REASONING[0] in fields:
        spans = (each.text[begin:end] for each in examples for begin, end in each.spans)
        trained, everything = ("".join(each.split()) for each in ("".join(spans), text))
        reasoning = ["".join(message.get(REASONING[0], "").split()) for message in messages]
        if any(each not in (trained if i in indices else everything) for i, each in enumerate(reasoning)):
            ignored.append("reasoning of messages" + _DROPPED)
    called = Counter(each["name"] for each in called_functions(messages))
    if any(name not in text for name in called):
        ignored.append("`tool_calls` of messages" + _DROPPED)
    tools = [tool.get("function", tool) for tool in chat.tools or ()]
    names = [str(each.get("name", "")) for each in tools if isinstance(each, dict)]
    if any(examples[-1].text.count(name) <= called[name] for name in names):
        ignored.append("`tools`" + _DROPPED)
    for field in sorted(fields - _KNOWN - names_in(template)):
        if any(message.get(field) not in (None, "", [], {}) for message in messages):
            ignored.append(f"`{field}` of messages" + _DROPPED)
    return ignored


@functools.lru_cache
def names_in(template: str) -> frozenset[str]:
    """Return the attributes and the keys in quotes that a template mentions outside comments."""
    code = COMMENT.sub("", template)
    return frozenset(re.findall(r"(?<=\.)[A-Za-z_]\w*|(?<=['\"])[A-Za-z_]\w*(?=['\"])", code))
