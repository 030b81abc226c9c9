"""Conversion of records with messages, instructions or texts to conversations."""

from collections.abc import Mapping
from typing import Any

from odc_mpi.data.examples import Conversation, can_have_loss
from odc_mpi.data.records.fields import text_field
from odc_mpi.data.records.messages import LOSS_FLAGS, parse_messages, parse_tools


def turns(record: Mapping[str, Any], name: str, role: str, location: str) -> list[dict[str, Any]]:
    """Return the messages in a field: a list of messages, one message, or the text of a message from `role`."""
    value = record[name]
    if isinstance(value, str):
        return [{"role": role, "content": text_field(record, name, location)}]
    return parse_messages([value] if isinstance(value, dict) else value, name, location)


def conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], location: str, num_context: int = 0
) -> Conversation:
    """Return a conversation with the system prompt and the tools from other fields of the record.

    Messages have no loss if `LOSS_FLAGS` exclude them, or if they are at index 0 or among the first `num_context`.
    """
    untrained = [
        index < num_context or any(message.get(flag) == values[0] for flag, values in LOSS_FLAGS.items())
        for index, message in enumerate(messages)
    ]
    messages = [{name: value for name, value in message.items() if name not in LOSS_FLAGS} for message in messages]
    if record.get("system") and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": text_field(record, "system", location)}, *messages]
        untrained = [True, *untrained]
    context = {i for i, each in enumerate(messages) if can_have_loss(each) and (untrained[i] or i == 0)}
    return Conversation(location, messages, parse_tools(record.get("tools"), location), frozenset(context))


def instruction(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return the fields `instruction` and `input` as one user message."""
    parts = [text_field(record, "instruction", location)]
    if record.get("input"):
        parts.append(text_field(record, "input", location))
    return [{"role": "user", "content": "\n\n".join(parts)}]
