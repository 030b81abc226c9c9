"""Conversion of records with two answers to pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

from odc_mpi.data.examples import Conversation, Example, ExampleGroup, PromptCompletion
from odc_mpi.data.records.conversations import conversation, is_chat, refuse_fields_beside, turns
from odc_mpi.data.records.fields import InvalidRecordError, text_field
from odc_mpi.data.records.schema import ANSWERS


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
