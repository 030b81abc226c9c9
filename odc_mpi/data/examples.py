"""Training examples, parsed from the records (lines or rows) of a source.

Records may have any of the forms that are common in published data sets (see `parse_example`). Error messages contain
the file and the line. Texts may be empty, and an example may have no text to train on (see `has_loss`). This module
neither tokenizes nor reads files.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from odc_mpi.data.readers.records import MAX_CHARS, InvalidRecordError, field_names, json_kind, text_field
from odc_mpi.errors import UserError
from odc_mpi.formatting import truncate_text

#: Roles of other data sets, with the corresponding role of chat templates. Templates receive all other roles unchanged.
_ROLES = dict.fromkeys(("human",), "user") | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool")
_ROLES |= {"developer": "system", "function_call": "assistant"}
_SHAREGPT_FIELDS = {"from": "role", "value": "content"}
#: Fields of a message that decide whether it contributes to the loss, and their values. Templates do not receive them.
_FLAGS: Mapping[str, tuple[Any, ...]] = {"weight": (0, 1), "train": (False, True)}
#: Formats of records, by their required fields. The first format whose fields are all present is used.
_FORMATS = (("messages",), ("prompt", "completion"), ("conversations",), ("instruction", "output"), ("text",))
_OPTIONAL = ("input", "system", "tools")


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
        context: Indices of the assistant's messages that are context without loss.
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
        return index not in self.context and has_loss(self.messages[index])


def has_loss(message: dict[str, Any]) -> bool:
    """Return True if the loss covers a message: an assistant message with text or tool calls."""
    return message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))


Example = PromptCompletion | Conversation


@dataclass(frozen=True)
class Columns:
    """Names of the fields of a source that has other names for them.

    Attributes:
        names: Name in the source of each renamed field, such as ``{"prompt": "question"}``. If a required field of a
            format is renamed, no other format is accepted.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise a UserError if a field does not exist, or the fields belong to several formats."""
        known = (*itertools.chain(*_FORMATS), *_OPTIONAL)
        for name, source in self.names.items():
            if name not in known or not source:
                raise UserError(
                    f"--columns: expected FIELD=NAME with a field among {', '.join(known)}, got "
                    f"{truncate_text(f'{name}={source}', MAX_CHARS)}"
                )
        if len(self._formats()) > 1:
            raise UserError(f"--columns: expected fields of one format, got {', '.join(self.names)}")

    def rename(self, record: Mapping[str, Any], location: str) -> Mapping[str, Any]:
        """Return a record with the fields' own names, and only with the required fields of the accepted format.

        Raises:
            InvalidRecordError: A required field of this format is missing.
        """
        if not self.names:
            return record
        renamed = {name: value for name, value in record.items() if name not in self.names}
        renamed |= {name: record[source] for name, source in self.names.items() if source in record}
        for required in self._formats():
            for name in required:
                if name not in renamed:
                    source = self.names.get(name, name)
                    raise InvalidRecordError(
                        f"{location}: expected the field {source!r}, got {field_names(record)}: change --columns"
                    )
            renamed = {name: value for name, value in renamed.items() if name in (*required, *_OPTIONAL)}
        return renamed

    def _formats(self) -> list[tuple[str, ...]]:
        """Return the formats with a renamed required field."""
        return [required for required in _FORMATS if not self.names.keys().isdisjoint(required)]


def parse_example(record: Mapping[str, Any], location: str, columns: Columns | None = None) -> Example:
    """Return the example that a record contains.

    The form of the record is the first of these whose fields are all present: `messages`; `prompt` and `completion`,
    both texts or both lists of messages; `conversations`, a list of objects with `from` and `value`; `instruction` and
    `output`, optionally with `input`; `text`. Conversations also use the fields `tools`, a list or its JSON text, and
    `system`, unless the first message is a system message. `columns` renames the fields.

    Raises:
        InvalidRecordError: The record has none of these forms, or a field has an invalid value.
    """
    record = (columns or Columns()).rename(record, location)
    required = next((names for names in _FORMATS if record.keys() >= set(names)), ())
    if "prompt" in required:
        return _prompt_and_completion(record, location)
    if "text" in required:
        return PromptCompletion(location, "", text_field(record, "text", location))
    if "instruction" in required:
        return _conversation(record, _instruction(record, location), location)
    for name in required:
        return _conversation(record, _messages(record[name], name, location), location)
    if "chosen" in record:
        raise InvalidRecordError(
            f"{location}: pairs of chosen and rejected answers are not supported: to train on the chosen ones, add "
            f"--columns {'completion' if 'prompt' in record else 'text'}=chosen"
        )
    raise InvalidRecordError(
        f"{location}: expected the fields 'messages', or 'prompt' and 'completion', or 'conversations', or "
        f"'instruction' and 'output', or 'text', got {field_names(record)}: name yours with --columns"
    )


def parse_prompt(record: Mapping[str, Any], location: str) -> Example:
    """Return the prompt of a record as an example without completion.

    The prompt is the field `messages`, or the field `prompt`, a text or a list of messages. Assistant messages at the
    end are removed, because the model generates them. Conversations also use the fields `system` and `tools`. All other
    fields are ignored.

    Raises:
        InvalidRecordError: The record has no prompt, or a field has an invalid value.
    """
    for name in ("messages", "prompt"):
        if (name == "messages" and name in record) or isinstance(record.get(name), list):
            messages = _messages(record[name], name, location)
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
            return _conversation(record, messages, location)
    if "prompt" in record:
        return PromptCompletion(location, text_field(record, "prompt", location), "")
    raise InvalidRecordError(f"{location}: expected the field 'prompt' or 'messages', got {field_names(record)}")


def _prompt_and_completion(record: Mapping[str, Any], location: str) -> Example:
    """Return the example of a prompt and a completion, which are two texts or two lists of messages."""
    prompt, completion = record["prompt"], record["completion"]
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        text = text_field(record, "completion", location)
        return PromptCompletion(location, text_field(record, "prompt", location), text)
    messages = _messages([*prompt, *completion], "prompt", location)
    return _conversation(record, messages, location, num_context=len(prompt))


def _conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], location: str, num_context: int = 0
) -> Conversation:
    """Return a conversation of messages, with the system prompt and the tools from other fields of the record.

    Messages without loss: the first `num_context`, those whose flags say so, and an answer that no message precedes.
    """
    untrained = [
        index < num_context or any(message.get(flag) == values[0] for flag, values in _FLAGS.items())
        for index, message in enumerate(messages)
    ]
    messages = [{name: value for name, value in message.items() if name not in _FLAGS} for message in messages]
    if record.get("system") and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": text_field(record, "system", location)}, *messages]
        untrained = [True, *untrained]
    context = {i for i, each in enumerate(messages) if has_loss(each) and (untrained[i] or i == 0)}
    return Conversation(location, messages, _tools(record.get("tools"), location), frozenset(context))


def _instruction(record: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return an instruction and its output as messages."""
    parts = [text_field(record, "instruction", location)]
    if record.get("input"):
        parts.append(text_field(record, "input", location))
    return [
        {"role": "user", "content": "\n\n".join(parts)},
        {"role": "assistant", "content": text_field(record, "output", location)},
    ]


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
        raise InvalidRecordError(f"{location}: expected 'tools' to be a list of objects, got {json_kind(tools)}")
    return tools


def _messages(messages: Any, name: str, location: str) -> list[dict[str, Any]]:
    """Check a list of messages. Convert the content of each to one string, and its role to one of chat templates."""
    if not isinstance(messages, list):
        raise InvalidRecordError(f"{location}: expected {name!r} to be a list of objects, got {json_kind(messages)}")
    checked = []
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRecordError(f"{location}: expected each of {name!r} to be an object, got {json_kind(message)}")
        if "from" in message:
            message = {_SHAREGPT_FIELDS.get(key, key): value for key, value in message.items()}
        role = text_field(message, "role", location)
        # Tables have null for missing fields, and chat templates check whether a field exists.
        present = {key: value for key, value in message.items() if value is not None}
        for flag, allowed in _FLAGS.items():
            if flag in present and present[flag] not in allowed:
                raise InvalidRecordError(
                    f"{location}: expected {flag!r} to be {' or '.join(map(json.dumps, allowed))}, got "
                    f"{truncate_text(repr(present[flag]), MAX_CHARS)}"
                )
        present |= {"role": _ROLES.get(role, role), "content": _content(message, location)}
        checked.append(_with_tool_calls(present, location) if role == "function_call" else present)
    return checked


def _with_tool_calls(message: dict[str, Any], location: str) -> dict[str, Any]:
    """Convert a message whose content is the JSON text of one or more tool calls, as in LLaMA-Factory."""
    try:
        calls = json.loads(message["content"])
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"{location}: expected JSON text in a 'function_call', got {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise InvalidRecordError(f"{location}: expected objects with 'name' and 'arguments' in a 'function_call'")
    return message | {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _content(message: dict[str, Any], location: str) -> str:
    """Return the text of a message. Its content is a string, a list of parts of the type "text", or null."""
    content = message.get("content")
    if content is None and ("content" in message or message.get("tool_calls")):
        return ""
    if not isinstance(content, list):
        return text_field(message, "content", location)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = (
                truncate_text(repr(part["type"]), MAX_CHARS)
                if isinstance(part, dict) and "type" in part
                else json_kind(part)
            )
            raise InvalidRecordError(f"{location}: expected parts of the type 'text' in 'content', got {kind}")
    return "".join(text_field(part, "text", location) for part in content)
