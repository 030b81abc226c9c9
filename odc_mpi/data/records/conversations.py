"""Conversion of records with messages, instructions or texts to conversations."""

from collections.abc import Mapping
from typing import Any

from odc_mpi.data.examples import Conversation, can_have_loss
from odc_mpi.data.records.fields import LOSS_FLAGS, InvalidRecordError, from_json, text_field
from odc_mpi.data.records.messages import parse_messages
from odc_mpi.data.records.schema import BESIDE
from odc_mpi.data.records.tool_calls import parse_tools


def turns(record: Mapping[str, Any], name: str, role: str, location: str) -> list[dict[str, Any]]:
    """Return the messages in a field: a list of messages, one message, or the text of a message from `role`."""
    value = record[name]
    if isinstance(value, str):
        return [{"role": role, "content": text_field(record, name, location)}]
    return parse_messages([value] if isinstance(value, dict) else value, name, location)


def conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], location: str, num_context: int = 0
) -> Conversation:
    """Return a conversation of `messages`, with the system prompt, the history and the tools in fields of the record.

    The history precedes `messages`. A message has no loss if one of `LOSS_FLAGS` is 0 or false, or if it begins the
    conversation. The first `num_context` of `messages` have no loss; unless this is 0, the history has none, either.
    """
    history = _history(record, location)
    messages, num_context = [*history, *messages], num_context and num_context + len(history)
    flags = [[name for name in LOSS_FLAGS if name in message] for message in messages]
    untrained = [
        index < num_context or any(not message[name] for name in names)
        for index, (message, names) in enumerate(zip(messages, flags, strict=True))
    ]
    ignored = [
        f"`{name}` of messages that are not the assistant's"
        for message, names in zip(messages, flags, strict=True)
        for name in names
        if message[name] and message["role"] != "assistant"
    ]
    messages = [{name: value for name, value in message.items() if name not in LOSS_FLAGS} for message in messages]
    if record.get("system") and messages:
        system = {"role": "system", "content": text_field(record, "system", location)}
        if messages[0]["role"] != "system":
            messages, untrained = [system, *messages], [True, *untrained]
        elif messages[0] != system:
            ignored.append("`system` beside a system message")
    context = {i for i, each in enumerate(messages) if can_have_loss(each) and (untrained[i] or i == 0)}
    tools = parse_tools(record.get("tools"), location)
    return Conversation(location, messages, tools, frozenset(context), tuple(dict.fromkeys(ignored)))


def _history(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return the earlier turns in `history`: pairs of a user's and an assistant's text (LLaMA-Factory), or messages."""
    history = record.get("history")
    if isinstance(history, str) and history.strip():
        history = from_json(history, f"{location}: expected 'history' to be a list or JSON text of one")
    if not history or isinstance(history, str):
        return []
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        return parse_messages(history, "history", location)
    if not isinstance(history, list) or not all(map(_is_pair_of_texts, history)):
        raise InvalidRecordError(
            f"{location}: expected 'history' to be a list of messages or of pairs of a user's and an assistant's text"
        )
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in history for role, text in zip(roles, turn, strict=True)]


def _is_pair_of_texts(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def is_chat(record: Mapping[str, Any]) -> bool:
    """Return True if texts in a record are messages of a chat, since it has a field for system, tools or history."""
    return any(record.get(name) is not None for name in BESIDE)


def refuse_fields_beside(record: Mapping[str, Any], texts: str, expected: str, location: str) -> None:
    """Raise an `InvalidRecordError` if `BESIDE` is not empty in a record whose texts cannot become a chat."""
    for name in BESIDE:
        if record.get(name) not in (None, "", "[]", []):
            raise InvalidRecordError(f"{location}: expected {name!r} together with {expected}, got it with {texts}")


def instruction(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return the fields `instruction` and `input` as one user message."""
    parts = [text_field(record, "instruction", location)]
    if record.get("input"):
        parts.append(text_field(record, "input", location))
    return [{"role": "user", "content": "\n\n".join(parts)}]
