"""Conversion of the parts of records to the messages of a conversation."""

from collections.abc import Mapping
from typing import Any

from odc_mpi.data.examples import Conversation, can_have_loss
from odc_mpi.data.records.fields import LOSS_FLAGS, InvalidRecordError, json_kind, list_field, text_field
from odc_mpi.data.records.messages import parse_messages
from odc_mpi.data.records.schema import BESIDE


def turns(record: Mapping[str, Any], name: str, role: str, location: str) -> list[dict[str, Any]]:
    """Return the messages in a field: a list of messages, one message, or the text of a message from `role`.

    The field `instruction` is one message of a user, which also contains the text in `input`.
    """
    value = record[name]
    if isinstance(value, str):
        names = (name, "input") if name == "instruction" and record.get("input") else (name,)
        return [{"role": role, "content": "\n\n".join(text_field(record, each, location) for each in names)}]
    return parse_messages([value] if isinstance(value, dict) else value, name, location)


def conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], location: str, num_last: int | None = None
) -> Conversation:
    """Return a conversation of the history in a record and `messages`, with the system prompt and the tools in fields.

    A message has no loss if one of `LOSS_FLAGS` is 0 or false, if it begins the conversation, or if it is not among the
    last `num_last` messages.
    """
    messages = [*_history(record, location), *messages]
    ignored: dict[str, None] = {}
    if record.get("system") and messages:
        system = {"role": "system", "content": text_field(record, "system", location)}
        if messages[0]["role"] != "system":
            messages.insert(0, system)
        elif messages[0]["content"] != system["content"]:
            ignored["`system` beside a system message"] = None
    context = set()
    first = 1 if num_last is None else max(1, len(messages) - num_last)
    for i, message in enumerate(messages):
        flags = {}
        if not LOSS_FLAGS.isdisjoint(message):
            flags = {name: value for name, value in message.items() if name in LOSS_FLAGS}
            messages[i] = {name: value for name, value in message.items() if name not in flags}
            if message["role"] != "assistant":
                ignored |= {f"`{name}` of messages that are not the assistant's": None for name in flags if flags[name]}
        if (i < first or not all(flags.values())) and can_have_loss(message):
            context.add(i)
    tools = list_field(record, "tools", location)
    for tool in tools:
        if not isinstance(tool, dict):
            raise InvalidRecordError(f"{location}: expected each of 'tools' to be an object, got {json_kind(tool)}")
    return Conversation(location, messages, tools or None, frozenset(context), tuple(ignored))


def _history(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return the earlier turns in `history`: pairs of a user's and an assistant's text (LLaMA-Factory), or messages."""
    history = list_field(record, "history", location)
    if all(isinstance(turn, dict) for turn in history):
        return parse_messages(history, "history", location)
    if not all(isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in history):
        raise InvalidRecordError(
            f"{location}: expected 'history' to be a list of messages or of pairs of a user's and an assistant's text"
        )
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in history for role, text in zip(roles, turn, strict=True)]


def is_chat(record: Mapping[str, Any]) -> bool:
    """Return True if texts in a record are messages of a chat, since it has a field for system, tools or history."""
    return any(record.get(name) is not None for name in BESIDE)


def refuse_fields_beside(record: Mapping[str, Any], texts: str, expected: str, location: str) -> None:
    """Raise an `InvalidRecordError` if `BESIDE` is not empty in a record whose texts cannot become a chat."""
    for name in BESIDE:
        if record.get(name) not in (None, "", "[]", []):
            raise InvalidRecordError(f"{location}: expected {name!r} together with {expected}, got it with {texts}")
