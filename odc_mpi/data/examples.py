"""Training examples, parsed from the records (lines or rows) of a source.

Records may have any of the forms that are common in published data sets (see `parse_example`). Error messages contain
the file and the line. Texts may be empty, and an example may have no text to train on (see `has_loss`). This module
neither tokenizes nor reads files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

_ROLES = ("system", "user", "assistant", "tool")
#: Roles in the field `conversations` of ShareGPT and similar data sets, with the corresponding role in `_ROLES`.
_SHAREGPT_ROLES = dict.fromkeys(("human",), "user")
_SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_SHAREGPT_ROLES |= dict.fromkeys(("observation", "function_response"), "tool")
_SHAREGPT_FIELDS = {"from": "role", "value": "content"}
_MAX_EXAMPLES = 3
_MAX_CHARS = 200  # of a text from a file, in a message


class InvalidRecordError(UserError):
    """Error that a line or row cannot be used. The message contains the file and the line."""


class InvalidRecords:
    """Counter of skipped invalid records.

    Args:
        skip: True to skip invalid records; False to raise a UserError for the first one.

    Attributes:
        num_skipped: Number of records skipped so far.
        first: Error messages of the first three skipped records.
    """

    def __init__(self, skip: bool = False) -> None:
        self._skip = skip
        self.num_skipped = 0
        self.first: list[str] = []

    def add(self, error: InvalidRecordError) -> None:
        """Count an invalid record and keep its message. Raises a UserError unless invalid records are skipped."""
        if not self._skip:
            raise UserError(f"{error}. To skip such lines, use --bad-lines skip") from error
        self.num_skipped += 1
        if len(self.first) < _MAX_EXAMPLES:
            self.first.append(str(error))


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion. The model is trained on the completion only.

    Attributes:
        location: File and line of the record, for error messages.
        prompt: Context without loss. It is empty for records that have only `text`.
        completion: Text to train on. It is empty if only the prompt is used, for generation.
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
    """Chat messages. The model is trained on those of the assistant.

    Attributes:
        location: File and line of the record, for error messages.
        messages: Messages, without their null fields. Each message has the strings `role` and `content`.
        tools: Definitions of the tools that the assistant may call, for the chat template; None without tools.
        num_context: Number of initial messages that are context without loss, including those of the assistant.
    """

    location: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    num_context: int = 0

    @property
    def has_loss(self) -> bool:
        """True if the model is trained on at least one message."""
        return any(self.message_has_loss(i) for i in range(len(self.messages)))

    def message_has_loss(self, index: int) -> bool:
        """Return True if the model is trained on message `index`."""
        return index >= self.num_context and has_loss(self.messages[index])


def has_loss(message: dict[str, Any]) -> bool:
    """Return True for a message of the assistant that contains text or tool calls."""
    return message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))


Example = PromptCompletion | Conversation


@dataclass(frozen=True)
class FieldNames:
    """Names of the fields that contain prompt and completion. If a name differs from its default, both are required."""

    prompt: str = "prompt"
    completion: str = "completion"


def parse_json(line: bytes, location: str) -> dict[str, Any]:
    """Decode a line into a record.

    Args:
        line: Line of the file.
        location: File and line number, for error messages.

    Raises:
        InvalidRecordError: The line is not a JSON object in UTF-8.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRecordError(
            f"{location}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidRecordError(
            f"{location}: expected a JSON object, got invalid JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, lists nested thousands deep
        raise InvalidRecordError(f"{location}: expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise InvalidRecordError(f"{location}: expected a JSON object, got {_kind(record)}")
    return record


def parse_example(record: Mapping[str, Any], location: str, fields: FieldNames) -> Example:
    """Return the example that a record contains.

    The form of the record is the first of these whose fields are all present: `messages`; `prompt` and `completion`,
    both texts or both lists of messages; `conversations`, a list of objects with `from` and `value`; `instruction` and
    `output`, optionally with `input`; `text`. Conversations also use the fields `tools`, a list or its JSON text, and
    `system`, unless the first message is a system message. If `fields` has custom names, no other form is accepted.

    Raises:
        InvalidRecordError: The record has none of these forms, or a field has an invalid value.
    """
    if fields != FieldNames() or ({fields.prompt, fields.completion} <= record.keys() and "messages" not in record):
        return _prompt_and_completion(record, location, fields)
    if "messages" in record:
        return _conversation(record, _messages(record["messages"], "messages", location), location)
    if "conversations" in record:
        return _conversation(
            record, _messages(_from_sharegpt(record["conversations"]), "conversations", location), location
        )
    if {"instruction", "output"} <= record.keys():
        return _conversation(record, _instruction(record, location), location)
    if "text" in record:
        return PromptCompletion(location, "", _text(record, "text", location))
    raise InvalidRecordError(
        f"{location}: expected the fields 'messages', or 'prompt' and 'completion', or 'conversations', or "
        f"'instruction' and 'output', or 'text', got {_names(record)}: name yours with --prompt-field and "
        "--completion-field"
    )


def parse_prompt(record: Mapping[str, Any], location: str) -> Example:
    """Return the prompt of a record as an example without completion.

    The prompt is the field `messages`, or the field `prompt`, a text or a list of messages. Assistant messages at the
    end are removed, because the model generates them. Conversations also use the fields `system` and `tools`. All other
    fields are ignored.

    Raises:
        InvalidRecordError: The record has no prompt, or a field has an invalid value.
    """
    for field in ("messages", "prompt"):
        if (field == "messages" and field in record) or isinstance(record.get(field), list):
            messages = _messages(record[field], field, location)
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
            return _conversation(record, messages, location)
    if "prompt" in record:
        return PromptCompletion(location, _text(record, "prompt", location), "")
    raise InvalidRecordError(f"{location}: expected the field 'prompt' or 'messages', got {_names(record)}")


def _prompt_and_completion(record: Mapping[str, Any], location: str, fields: FieldNames) -> Example:
    """Return the example of a prompt and a completion, which are two texts or two lists of messages."""
    prompt, completion = record.get(fields.prompt), record.get(fields.completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        text = _text(record, fields.completion, location)
        return PromptCompletion(location, _text(record, fields.prompt, location), text)
    messages = _messages([*prompt, *completion], fields.prompt, location)
    return _conversation(record, messages, location, num_context=len(prompt))


def _conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], location: str, num_context: int = 0
) -> Conversation:
    """Return a conversation of messages, with the system prompt and the tools from other fields of the record."""
    if record.get("system") and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text(record, "system", location)}, *messages]
        num_context += bool(num_context)
    if messages and not num_context and has_loss(messages[0]):
        raise InvalidRecordError(
            f"{location}: expected a system or user message before the assistant's first, got none"
        )
    return Conversation(location, messages, _tools(record.get("tools"), location), num_context)


def _instruction(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return an instruction and its output as messages."""
    parts = [_text(record, "instruction", location)]
    if record.get("input"):
        parts.append(_text(record, "input", location))
    return [
        {"role": "user", "content": "\n\n".join(parts)},
        {"role": "assistant", "content": _text(record, "output", location)},
    ]


def _from_sharegpt(turns: Any) -> Any:
    """Rename the fields `from` and `value` of each turn to `role` and `content`, and translate the roles."""
    if not isinstance(turns, list):
        return turns
    renamed = []
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get("from"), str):
            turn = {_SHAREGPT_FIELDS.get(name, name): value for name, value in turn.items()}
            turn["role"] = _SHAREGPT_ROLES.get(turn["role"], turn["role"])
        renamed.append(turn)
    return renamed


def _tools(tools: Any, location: str) -> list[Any] | None:
    """Return the list of tools, or None. Tables contain the list as JSON text, since its fields differ between rows."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise InvalidRecordError(
                f"{location}: expected 'tools' to be a list or JSON text of one, got {error}"
            ) from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRecordError(f"{location}: expected 'tools' to be a list of objects, got {_kind(tools)}")
    return tools


def _messages(messages: Any, field: str, location: str) -> list[dict[str, Any]]:
    """Check the types of a list of messages, and convert the content of each message to one string."""
    if not isinstance(messages, list):
        raise InvalidRecordError(f"{location}: expected {field!r} to be a list of objects, got {_kind(messages)}")
    checked = []
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRecordError(f"{location}: expected each of {field!r} to be an object, got {_kind(message)}")
        role = _text(message, "role", location)
        if role not in _ROLES:
            raise InvalidRecordError(
                f"{location}: expected a role among {', '.join(_ROLES)}, got {truncate_text(repr(role), _MAX_CHARS)}"
            )
        # Tables have null for missing fields, and chat templates check whether a field exists.
        present = {name: value for name, value in message.items() if value is not None}
        checked.append(present | {"content": _content(message, location)})
    return checked


def _content(message: dict[str, Any], location: str) -> str:
    """Return the text of a message. Its content is a string, a list of parts of the type "text", or null."""
    content = message.get("content")
    if content is None and ("content" in message or message.get("tool_calls")):
        return ""
    if not isinstance(content, list):
        return _text(message, "content", location)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = (
                truncate_text(repr(part["type"]), _MAX_CHARS)
                if isinstance(part, dict) and "type" in part
                else _kind(part)
            )
            raise InvalidRecordError(f"{location}: expected parts of the type 'text' in 'content', got {kind}")
    return "".join(_text(part, "text", location) for part in content)


def _text(record: Mapping[str, Any], field: str, location: str) -> str:
    """Return the text of a required field."""
    if field not in record:
        raise InvalidRecordError(
            f"{location}: expected the field {field!r}, got {_names(record)}: see --prompt-field and --completion-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise InvalidRecordError(f"{location}: expected {field!r} to be a string, got {_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair; tokenizers reject it
        raise InvalidRecordError(
            f"{location}: expected text in {field!r}, got a lone surrogate at {error.start}"
        ) from error
    return text


def _names(record: Mapping[str, Any]) -> str:
    return truncate_text(", ".join(map(repr, record)), _MAX_CHARS) or "no fields"


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
