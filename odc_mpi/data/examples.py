"""Training examples, parsed from the records (lines or rows) of a source."""

import itertools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from odc_mpi.data.readers.messages import LOSS_FLAGS, parse_messages, parse_tools
from odc_mpi.data.readers.records import MAX_CHARS, InvalidRecordError, field_names, text_field, to_record
from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

#: Record formats, each given by its required fields. The first format whose fields are all present is used.
_PLAIN_FORMATS = (("messages",), ("prompt", "completion"), ("conversations",), ("instruction", "output"), ("text",))
#: Fields that may contain the prompt of a pair. Without them, the prompt is the beginning that both answers share.
_PROMPTS = ("prompt", "conversations", "instruction")
_ANSWERS = ("chosen", "rejected")
_FORMATS = (*((name, *_ANSWERS) for name in _PROMPTS), _ANSWERS, *_PLAIN_FORMATS)
_OPTIONAL = ("input", "system", "tools")
#: Fields that may contain messages, also as JSON text, because table cells contain only text.
_WITH_MESSAGES = ("messages", "conversations", "prompt", "completion", *_ANSWERS)
#: Names that a source uses for fields of this module. Maps each renamed field to its name in the source, such as
#: ``{"prompt": "question"}``. If required fields are renamed, only formats that require all of them are accepted.
Columns = Mapping[str, str]
_OBJECTS = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion. The model is trained only on the completion.

    Attributes:
        location: File and line of the record, for error messages.
        prompt: Text that precedes the completion and has no loss; may be empty.
        completion: Text to train on; empty if the prompt is used for generation.
    """

    location: str
    prompt: str
    completion: str

    @property
    def has_loss(self) -> bool:
        """True if the completion is not empty."""
        return bool(self.completion)


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat. The model is trained on the assistant messages whose indices are not in `context`.

    Attributes:
        location: File and line of the record, for error messages.
        messages: Messages without null fields. Each message contains the strings `role` and `content`.
        tools: Definitions of the tools that the assistant may call, for the chat template.
        context: Indices of the assistant messages that have no loss.
    """

    location: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    context: frozenset[int] = frozenset()

    @property
    def has_loss(self) -> bool:
        """True if the model is trained on at least one message."""
        return any(self.message_has_loss(i) for i in range(len(self.messages)))

    def message_has_loss(self, index: int) -> bool:
        """Return True if the model is trained on message `index`."""
        return index not in self.context and _can_have_loss(self.messages[index])


def _can_have_loss(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))


Example = PromptCompletion | Conversation


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to the same prompt, stored as two examples that each consist of the prompt and one answer.

    If there is no prompt, the text that both completions begin with serves as the prompt.
    """

    chosen: Example
    rejected: Example

    @property
    def location(self) -> str:
        """File and line of the record, for error messages."""
        return self.chosen.location

    @property
    def has_loss(self) -> bool:
        """True if the model is trained on both answers."""
        return self.chosen.has_loss and self.rejected.has_loss


def check_columns(columns: Columns) -> None:
    """Raise a `UserError` if a field is unknown or has an empty name, or if no format contains all renamed fields."""
    known = list(dict.fromkeys((*itertools.chain(*_FORMATS), *_OPTIONAL)))
    for name, source in columns.items():
        if name not in known or not source:
            raise UserError(
                f"--columns: expected FIELD=NAME with a field among {', '.join(known)}, got "
                f"{truncate_text(f'{name}={source}', MAX_CHARS)}"
            )
    if not _formats(columns):
        raise UserError(f"--columns: expected fields of one format, got {', '.join(columns)}")


def _rename(record: Mapping[str, Any], location: str, columns: Columns) -> Mapping[str, Any]:
    """Return a record in which the renamed fields have the names that this module expects.

    If a required field is renamed, the result contains only the optional fields and those of the first accepted format
    that is complete. Raises an `InvalidRecordError` if no accepted format is complete.
    """
    renamed = {name: value for name, value in record.items() if name not in columns}
    renamed |= {name: record[source] for name, source in columns.items() if source in record}
    if (formats := _formats(columns)) == list(_FORMATS):
        return renamed
    missing = [[name for name in required if name not in renamed] for required in formats]
    fewest = min(missing, key=len)
    if fewest:
        source = columns.get(fewest[0], fewest[0])
        raise InvalidRecordError(
            f"{location}: expected the field {source!r}, got {field_names(record)}: change --columns"
        )
    required = formats[missing.index(fewest)]
    return {name: value for name, value in renamed.items() if name in (*required, *_OPTIONAL)}


def _formats(columns: Columns) -> list[tuple[str, ...]]:
    renamed = columns.keys() - set(_OPTIONAL)
    return [required for required in _FORMATS if renamed <= set(required)]


def parse_example(value: Any, location: str, columns: Columns | None = None) -> Example | PreferencePair:
    """Return the example or pair that a record contains, given its value and location from `Block.records`.

    The epilog of `odc-mpi prepare --help` lists the formats. The first one whose fields are all present is used. Raises
    an `InvalidRecordError` if the record does not match any format, or if a field has an invalid value.
    """
    record: Mapping[str, Any] = to_record(value, location)
    label = record.get("label")
    is_unwanted = label is False or label in ("false", "False")  # of unpaired preferences; text in CSV
    record = _decode_messages(_rename(record, location, columns) if columns else record)
    required = next((names for names in _FORMATS if record.keys() >= set(names)), ())
    if "chosen" in required:
        return _preference_pair(record, required[0], location)
    if "prompt" in required:
        if is_unwanted:
            raise InvalidRecordError(
                f"{location}: expected a completion to train on, got one with 'label' false: remove the record"
            )
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            messages = parse_messages([*prompt, *completion], "prompt", location)
            return _conversation(record, messages, location, num_context=len(prompt))
        text = text_field(record, "completion", location)
        return PromptCompletion(location, text_field(record, "prompt", location), text)
    if "text" in required:
        return PromptCompletion(location, "", text_field(record, "text", location))
    if "instruction" in required:
        answer = {"role": "assistant", "content": text_field(record, "output", location)}
        return _conversation(record, [*_instruction(record, location), answer], location)
    for name in required:
        return _conversation(record, parse_messages(record[name], name, location), location)
    raise InvalidRecordError(
        f"{location}: expected the fields 'messages', or 'prompt' and 'completion', or 'conversations', or "
        f"'instruction' and 'output', or 'text', or 'chosen' and 'rejected', got {field_names(record)}: name yours "
        "with --columns"
    )


def parse_prompt(record: Mapping[str, Any], location: str) -> Example:
    """Return the prompt of a record as an example without a completion.

    The prompt is a list of messages in the field `messages`, or a string or list of messages in the field `prompt`.
    Assistant messages at the end are removed, but the first message is always kept. Conversations may also have the
    fields `system` and `tools`. Raises an `InvalidRecordError` if there is no prompt or one of these fields is invalid.
    """
    record = _decode_messages(record)
    for name in ("messages", "prompt"):
        if (name == "messages" and name in record) or isinstance(record.get(name), list):
            messages = parse_messages(record[name], name, location)
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
            return _conversation(record, messages, location)
    if "prompt" in record:
        return PromptCompletion(location, text_field(record, "prompt", location), "")
    raise InvalidRecordError(f"{location}: expected the field 'prompt' or 'messages', got {field_names(record)}")


def _decode_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record in which lists of messages given as JSON text are decoded."""
    decoded = dict(record)
    for name in _WITH_MESSAGES:
        if isinstance(text := record.get(name), str) and _OBJECTS.match(text):
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
                if all(isinstance(each, dict) and ("role" in each or "from" in each) for each in value):
                    decoded[name] = value
    return decoded


def _preference_pair(record: Mapping[str, Any], prompt: str, location: str) -> PreferencePair:
    """Return a pair of answers. `prompt` is the field with the prompt, or "chosen" if both answers begin with it."""
    are_texts = all(isinstance(record[name], str) for name in (prompt, *_ANSWERS))
    chosen: Example
    rejected: Example
    if are_texts and (prompt == "chosen" or (prompt == "prompt" and not {"system", "tools"} & record.keys())):
        if record.get("system"):
            raise InvalidRecordError(f"{location}: expected the field 'prompt' beside 'system', got texts without it")
        context = text_field(record, "prompt", location) if prompt == "prompt" else ""
        chosen, rejected = (
            PromptCompletion(location, context, text_field(record, name, location)) for name in _ANSWERS
        )
    else:
        chosen, rejected = _pair_of_conversations(record, prompt, location)
    for name, side in zip(_ANSWERS, (chosen, rejected), strict=True):
        if not side.has_loss:
            raise InvalidRecordError(f"{location}: expected an answer with text in {name!r}, got none")
    return PreferencePair(chosen, rejected)


def _pair_of_conversations(record: Mapping[str, Any], prompt: str, location: str) -> list[Conversation]:
    """Return one conversation for each answer. The messages with which both begin have no loss."""
    context: list[dict[str, Any]] = []
    if prompt == "instruction":
        context = _instruction(record, location)
    elif prompt != "chosen":
        context = _turns(record, prompt, "user", location)
    answers = [_turns(record, name, "assistant", location) for name in _ANSWERS]
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
    num_context = len(context) + num_shared
    return [_conversation(record, [*context, *answer], location, num_context) for answer in answers]


def _role_and_text(message: dict[str, Any]) -> tuple[str, str]:
    return message["role"], message["content"].strip()


def _turns(record: Mapping[str, Any], name: str, role: str, location: str) -> list[dict[str, Any]]:
    """Return the messages in a field: a list of messages, one message, or the text of a message from `role`."""
    value = record[name]
    if isinstance(value, str):
        return [{"role": role, "content": text_field(record, name, location)}]
    return parse_messages([value] if isinstance(value, dict) else value, name, location)


def _conversation(
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
    context = {i for i, each in enumerate(messages) if _can_have_loss(each) and (untrained[i] or i == 0)}
    return Conversation(location, messages, parse_tools(record.get("tools"), location), frozenset(context))


def _instruction(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    parts = [text_field(record, "instruction", location)]
    if record.get("input"):
        parts.append(text_field(record, "input", location))
    return [{"role": "user", "content": "\n\n".join(parts)}]
