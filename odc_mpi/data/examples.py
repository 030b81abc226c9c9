"""Training examples: texts, conversations, pairs of answers, and answers with labels."""

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
class PreferencePair:
    """Two answers to the same prompt, stored as two examples that each consist of the prompt and one answer.

    If there is no prompt, the text that both completions begin with serves as the prompt.
    """

    kind: ClassVar[Kind] = "pairs"
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


@dataclass(frozen=True)
class LabeledAnswer:
    """A prompt with one answer, and whether the answer is desirable. `answer` contains the prompt."""

    kind: ClassVar[Kind] = "labels"
    answer: Example
    is_desirable: bool

    @property
    def location(self) -> str:
        """File and line of the record, for error messages."""
        return self.answer.location

    @property
    def has_loss(self) -> bool:
        """True if the answer is not empty."""
        return self.answer.has_loss
