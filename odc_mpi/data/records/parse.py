"""Conversion of records to training examples and to prompts for generation."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from odc_mpi.data.examples import Conversation, Example, ExampleGroup, PromptCompletion
from odc_mpi.data.records.block import to_record
from odc_mpi.data.records.conversations import conversation, is_chat, refuse_fields_beside, turns
from odc_mpi.data.records.fields import InvalidRecordError, field_names, text_field
from odc_mpi.data.records.messages import parse_messages
from odc_mpi.data.records.schema import ANSWERS, WITH_MESSAGES, Columns, check_loss_fields, read_label, rename

_OBJECTS = re.compile(r"\s*\[\s*\{")


def parse_example(value: Any, location: str, columns: Columns | None = None) -> Example | ExampleGroup:
    """Return the example, pair or labeled answer that a record contains, given its value and location in a `Block`.

    The epilog of `odc-mpi prepare --help` lists the formats. The first one whose fields are all present is used. Raises
    an `InvalidRecordError` if the record does not match any format, or if a field has an invalid value.
    """
    record: Mapping[str, Any] = to_record(value, location)
    required, record = rename(record, location, columns or {})
    record = _decode_messages(record)
    check_loss_fields(record, location)
    if "chosen" in required:
        return preference_pair(record, required[0], location)
    if "text" in required:
        refuse_fields_beside(record, "'text'", "'messages', or 'prompt' and 'completion'", location)
        return PromptCompletion(location, "", text_field(record, "text", location))
    if len(required) == 1:
        return conversation(record, parse_messages(record[required[0]], required[0], location), location)
    if required:
        example = _prompt_and_answer(record, location, *required)
        label = read_label(record) if required == ("prompt", "completion") else None
        return example if label is None else ExampleGroup([example], label)
    raise InvalidRecordError(
        f"{location}: expected the fields 'messages', or 'prompt' and 'completion', or 'conversations', or "
        f"'instruction' and 'output', or 'text', or 'chosen' and 'rejected', got {field_names(record)}: name yours "
        "with --columns"
    )


def _prompt_and_answer(record: Mapping[str, Any], location: str, prompt: str, answer: str) -> Example:
    are_lists = isinstance(record[prompt], list) and isinstance(record[answer], list)
    if not are_lists:
        texts = [text_field(record, name, location) for name in (prompt, answer)]
        if prompt == "prompt" and not is_chat(record):
            return PromptCompletion(location, *texts)
    messages = turns(record, prompt, "user", location)
    answers = turns(record, answer, "assistant", location)
    return conversation(record, [*messages, *answers], location, len(answers) if are_lists else None)


def parse_prompt(record: Mapping[str, Any], location: str) -> Example:
    """Return the prompt of a record as an example without a completion.

    The prompt is a list of messages in the field `messages`, or a string or list of messages in the field `prompt`.
    Assistant messages at the end are removed, but the first message is always kept. With one of the
    fields `history`, `system` and `tools`, a string is the message of a user. Raises an `InvalidRecordError` if there
    is no prompt or one of these fields is invalid.
    """
    record = _decode_messages(record)
    name = "messages" if "messages" in record else "prompt"
    if name not in record:
        raise InvalidRecordError(f"{location}: expected the field 'prompt' or 'messages', got {field_names(record)}")
    if name == "prompt" and not isinstance(record[name], list):
        if not is_chat(record):
            return PromptCompletion(location, text_field(record, name, location), "")
        return conversation(record, turns(record, name, "user", location), location)
    messages = parse_messages(record[name], name, location)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    return conversation(record, messages, location)


def _decode_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record in which lists of messages given as JSON text are decoded."""
    decoded = dict(record)
    for name in WITH_MESSAGES:
        if isinstance(text := record.get(name), str) and _OBJECTS.match(text):
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
                if all(isinstance(each, dict) and ("role" in each or "from" in each) for each in value):
                    decoded[name] = value
    return decoded


def preference_pair(record: Mapping[str, Any], prompt: str, location: str) -> ExampleGroup:
    """Return a pair of answers. `prompt` is the field with the prompt, or "chosen" if both answers begin with it."""
    are_texts = all(isinstance(record[name], str) for name in (prompt, *ANSWERS))
    sides: Sequence[Example]
    if are_texts and (prompt == "chosen" or (prompt == "prompt" and not is_chat(record))):
        refuse_fields_beside(record, "texts without it", "the field 'prompt'", location)
        context = text_field(record, "prompt", location) if prompt == "prompt" else ""
        sides = [PromptCompletion(location, context, text_field(record, name, location)) for name in ANSWERS]
    else:
        sides = _pair_of_conversations(record, prompt, location)
    for name, side in zip(ANSWERS, sides, strict=True):
        if not side.has_loss:
            raise InvalidRecordError(f"{location}: expected an answer with text in {name!r}, got none")
    return ExampleGroup(sides)


def _pair_of_conversations(record: Mapping[str, Any], prompt: str, location: str) -> list[Conversation]:
    """Return one conversation for each answer. The messages with which both begin have no loss."""
    context = [] if prompt == "chosen" else turns(record, prompt, "user", location)
    answers = [turns(record, name, "assistant", location) for name in ANSWERS]
    num_shared = 0
    while num_shared < min(map(len, answers)) - 1 and answers[0][num_shared] == answers[1][num_shared]:
        num_shared += 1
    shared = [_role_and_text(message) for message in answers[0][:num_shared]]
    if all(_role_and_text(message) in shared for message in context):
        context = []  # data sets with complete conversations as answers often repeat the prompt in a separate field
    elif isinstance(record[prompt], str) and any(each[0]["role"] != "assistant" for each in answers if each):
        raise InvalidRecordError(
            f"{location}: expected answers that begin with the assistant, or with the messages of the prompt, got "
            f"other messages before the answer: remove the field {prompt!r}, or change 'chosen' and 'rejected'"
        )
    if not context and not num_shared:
        raise InvalidRecordError(
            f"{location}: expected a prompt, got 'chosen' and 'rejected' without a message that both begin with"
        )
    return [conversation(record, [*context, *each], location, len(each) - num_shared) for each in answers]


def _role_and_text(message: dict[str, Any]) -> tuple[str, str]:
    return message["role"], message["content"].strip()
