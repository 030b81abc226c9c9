"""Training examples: texts, conversations, pairs of answers, and answers with labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from odc_mpi.data.dataset.format import Kind


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion. The model is trained only on the completion.

    Attributes:
        location: File and line of the record, for error messages.
        prompt: Text that precedes the completion and has no loss; may be empty.
        completion: Text to train on; empty if the prompt is used for generation.
    """

    kind: ClassVar[Kind] = "sequences"
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
        ignored: Descriptions of what the record contains and this conversation does not, for the report.
    """

    kind: ClassVar[Kind] = "sequences"
    location: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    context: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = ()

    @property
    def has_loss(self) -> bool:
        """True if the model is trained on at least one message."""
        return any(self.message_has_loss(i) for i in range(len(self.messages)))

    def message_has_loss(self, index: int) -> bool:
        """Return True if the model is trained on message `index`."""
        return index not in self.context and can_have_loss(self.messages[index])


def can_have_loss(message: dict[str, Any]) -> bool:
    """Return True if a message is an assistant's and is not empty."""
    if message["role"] != "assistant":
        return False
    return bool(message["content"] or message.get("tool_calls") or message.get("reasoning_content"))


Example = PromptCompletion | Conversation


@dataclass(frozen=True)
class ExampleGroup:
    """Answers to one prompt: a chosen and a rejected answer, or one answer with a label.

    If a pair has no prompt, the text that both completions begin with serves as the prompt.

    Attributes:
        examples: For each answer, an example that consists of the prompt and the answer.
        label: True if the answer is desirable, False if it is not, None for a pair.
    """

    examples: Sequence[Example]
    label: bool | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the data sets that contain such groups."""
        return "pairs" if self.label is None else "labels"

    @property
    def location(self) -> str:
        """File and line of the record, for error messages."""
        return self.examples[0].location

    @property
    def has_loss(self) -> bool:
        """True if the model is trained on all answers."""
        return all(example.has_loss for example in self.examples)
