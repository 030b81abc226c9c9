"""Chat templates: rendering conversations, and finding the assistant's answers in the rendered text.

To find an answer, two renderings are compared. The first contains the messages before the answer, and the generation
prompt, which is the text that the model continues at inference. The second contains the messages up to and including
the answer. The loss begins where the two texts differ. If a template marks the answers with `{% generation %}`, only
the marked text has loss, and the comparison only serves to find the marks of a single answer.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NamedTuple

from odc_mpi.data.examples import Conversation
from odc_mpi.data.readers.records import InvalidRecordError
from odc_mpi.errors import UserError, one_line_message

CharSpan = tuple[int, int]
SplitTurns = Literal["auto", "always", "never"]
_REPLACE = "replace the tokenizer's chat template with --chat-template FILE"


class Rendered(NamedTuple):
    """Text of one training example.

    Attributes:
        spans: Character ranges (begin, end) with loss: each trained answer including its end-of-turn token, or the
            parts that the chat template marks.
        omitted: End of the generation prompt that is missing from `text`, such as "<think>"; empty if none is missing.
    """

    text: str
    spans: list[CharSpan]
    omitted: str = ""


class ChatRenderer:
    """Renderer that applies the chat template of a tokenizer to conversations.

    Rendering raises a `UserError` if the tokenizer has no chat template, and an `InvalidRecordError` if the template
    rejects the messages. If `split_turns` is "never", there is one example per conversation. If it is "always", there
    is one example for each answer to train on, which ends with that answer. "auto" means "always" for conversations in
    which later messages change the text of earlier ones, except special tokens after a turn, and "never" otherwise.
    """

    def __init__(self, tokenizer: Any, split_turns: SplitTurns = "auto") -> None:
        self._tokenizer = tokenizer
        self._split_turns = split_turns

    @functools.cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(self._tokenizer.get_added_vocab())  # slow: the tokenizer builds a dictionary

    def render_prompt(self, chat: Conversation, *, for_generation: bool = True) -> str:
        """Render all messages of a conversation, followed by the generation prompt if `for_generation` is True."""
        return self._render(chat, [len(chat.messages)], for_generation=for_generation)[0].text

    def render_answers(self, chat: Conversation) -> list[Rendered]:
        """Render a conversation as training examples in which each trained answer has loss exactly once.

        Raises an `InvalidRecordError` if the chat template omits part of an answer, or if changes that later messages
        make to earlier text prevent finding an answer or, if `split_turns` is "never", sharing an example.
        """
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        trained = [i for i in answers if chat.message_has_loss(i)]
        is_marked = self._is_marked(chat)
        if is_marked and trained == answers and self._split_turns != "always":
            [marked] = self._render(chat, [len(chat.messages)], with_marks=True)
            if _find_problem(chat, trained, marked) is None:
                return [marked]
        examples, text = self._find_answers(chat, trained)
        groups, counts = [[i] for i in trained], [i + 1 for i in trained]
        if (shared := self._share(chat, text, dict(zip(trained, examples, strict=True)))) is not None:
            groups, examples, counts = [trained], [shared], [len(chat.messages)]
        if is_marked:
            pairs = zip(examples, self._render(chat, counts, with_marks=True), strict=True)
            examples = [Rendered(each.text, _overlapping(marked.spans, each.spans)) for each, marked in pairs]
        for group, example in zip(groups, examples, strict=True):
            if problem := _find_problem(chat, group, example):
                raise InvalidRecordError(f"{chat.location}: the chat template {problem}: {_REPLACE}")
        return examples

    def end_of_turn(self, turn: str) -> int:
        """Return the number of characters in a turn, excluding whitespace after the special token that ends it."""
        stripped = turn.rstrip()
        return len(stripped) if self._special and stripped.endswith(self._special) else len(turn)

    def _find_answers(self, chat: Conversation, trained: Sequence[int]) -> tuple[list[Rendered], str]:
        """Return one example for each trained answer, which ends with this answer, and the text of all messages."""
        prompts = self._render(chat, trained, for_generation=True)
        turns = self._render(chat, sorted({*(i + 1 for i in trained), len(chat.messages)}))
        answers = []
        for i, (prompt, *_), (turn, *_) in zip(trained, prompts, turns, strict=False):
            begin = len(prompt) if turn.startswith(prompt) else self._num_common(prompt, turn)
            if begin < len(prompt):
                [context] = self._render(chat, [i])
                if begin < self._num_common(prompt, context.text):
                    raise InvalidRecordError(
                        f"{chat.location}: the chat template changes earlier text when message {i + 1} is added, so "
                        f"this answer cannot be found: {_REPLACE}"
                    )
            answers.append(Rendered(turn, [(begin, self.end_of_turn(turn))], prompt[begin:]))
        return answers, turns[-1].text

    def _share(self, chat: Conversation, text: str, examples: Mapping[int, Rendered]) -> Rendered | None:
        """Return one example with all answers, or None if each needs its own.

        `text` is the rendering of all messages. `examples` contains the example of each answer, keyed by its message.
        Special tokens after the end-of-turn token may be missing in `text`: Phi 3 ends only the last answer with an
        end-of-text token. An answer whose end-of-turn token differs needs its own example: gpt-oss ends only the last
        answer with <|return|>, which stops generation.
        """
        if self._split_turns == "always":
            return None
        spans = []
        for i, example in examples.items():
            turn = example.text
            if not text.startswith(turn):
                turn = text[: self._num_common(turn, text)]
                missing = self._special_tokens.sub("", example.text[len(turn) :]).strip()  # without special tokens
                if missing or not turn.rstrip().endswith(self._special):
                    if self._split_turns == "auto":
                        return None
                    raise InvalidRecordError(
                        f"{chat.location}: the chat template changes message {i + 1} when messages are "
                        f"added, so answers cannot share a sequence: use --split-turns auto, or {_REPLACE}"
                    )
            spans.append((example.spans[0][0], self.end_of_turn(turn)))
        return Rendered(text, spans, next((each.omitted for each in examples.values() if each.omitted), ""))

    def _num_common(self, a: str, b: str) -> int:
        """Return the length of the common prefix of two texts, without an incomplete special token at the end."""
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
        longest = max(map(len, self._special), default=0)
        cut_at = [
            match.start()
            for text in (a, b)
            for match in self._special_tokens.finditer(text, max(0, low - longest), low + longest)
            if match.start() < low < match.end()
        ]
        return min([low, *cut_at])

    @functools.cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _is_marked(self, chat: Conversation) -> bool:
        with suppress(ValueError):  # without a template, or a default among named ones, which `_render` reports
            return _has_marks(self._tokenizer.get_chat_template(tools=chat.tools))
        return False

    def _render(
        self, chat: Conversation, counts: Sequence[int], *, for_generation: bool = False, with_marks: bool = False
    ) -> list[Rendered]:
        """Render the first `count` messages for each `count` in `counts`. The spans are those that the template marks.

        One call renders all counts, because converting tools and special tokens takes as long as rendering.
        """
        if not counts:
            return []
        if not self._tokenizer.chat_template:
            raise UserError(
                f"{chat.location}: 'messages' need a chat template, but the tokenizer has none: use another tokenizer, "
                "or --chat-template FILE of odc-mpi prepare"
            )
        try:
            forms = _argument_forms(chat.messages)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRecordError(
                f"{chat.location}: expected arguments of tool calls in JSON, got {one_line_message(error)}"
            ) from error
        first_error: Exception | None = None
        for messages in forms:
            try:
                if 0 in counts:
                    raise ValueError("expected a message, got none")
                conversations = [messages[:count] for count in counts]
                return _apply(self._tokenizer, conversations, chat.tools, for_generation, with_marks)
            except Exception as error:  # templates may raise any exception
                first_error = first_error or error
        assert first_error is not None
        raise InvalidRecordError(
            f"{chat.location}: the tokenizer's chat template rejects the messages ({one_line_message(first_error)})"
        ) from first_error


def fix_time(tokenizer: Any, time: str) -> None:
    """Let a tokenizer's chat templates render the date of `time`, in ISO format, instead of the current date.

    A macro replaces the function `strftime_now`, because transformers' renderer accepts no functions as arguments.
    """

    def fix(template: str) -> str:
        codes = dict.fromkeys(re.findall(r"%[-_^#]?\w", template) if "strftime_now" in template else ())
        replaced = "".join(f" | replace({code!r}, {datetime.fromisoformat(time).strftime(code)!r})" for code in codes)
        # Jinja removes the line break, which keeps the whitespace at the start of the template.
        return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"

    if isinstance(named := tokenizer.chat_template, dict):
        tokenizer.chat_template = {name: fix(template) for name, template in named.items()}
    elif named:
        tokenizer.chat_template = fix(named)


def _apply(
    tokenizer: Any, conversations: list[Any], tools: list[Any] | None, for_generation: bool, with_marks: bool
) -> list[Rendered]:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations,
        tools,
        chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=with_marks,
        add_generation_prompt=for_generation,
        **tokenizer.special_tokens_map,
    )
    texts, marks = rendered
    for text in texts:
        text.encode("utf-8")  # fields besides the content may contain half of a surrogate pair
    marks = marks or [[] for _ in texts]
    return [Rendered(text, [(begin, end) for begin, end in spans]) for text, spans in zip(texts, marks, strict=True)]


@functools.lru_cache
def _has_marks(template: str) -> bool:
    without_comments = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", without_comments) is not None


def _overlapping(spans: list[CharSpan], others: list[CharSpan]) -> list[CharSpan]:
    return [span for span in spans if any(span[0] < end and begin < span[1] for begin, end in others)]


def _find_problem(chat: Conversation, indices: Sequence[int], example: Rendered) -> str | None:
    """Return an error description for the first message that does not match the spans of an example, or None.

    The content of each message in `indices` and the names of the functions that it calls must be in the spans, in
    order. The content may begin in the generation prompt. The content of a user message must not occur only in spans.
    """
    text, spans, position = example.text, list(example.spans), 0
    is_one_each = len(spans) == len(indices)  # marks may divide an answer into several spans
    for number, i in enumerate(indices):
        content, end = chat.messages[i]["content"].strip(), None
        while spans and (end := _find_content(text, content, position, spans[0])) is None:
            spans.pop(0)
        answer_spans = example.spans[number : number + 1] if is_one_each else spans
        trained = "".join(text[begin:stop] for begin, stop in answer_spans)
        if end is None or not all(name in trained for name in _called_names(chat.messages[i])):
            return f"drops a part of message {i + 1}, an answer to train on"
        position = end
    bounds = [0, *itertools.chain(*example.spans), len(text)]
    context = "\0".join(text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
    for i, message in enumerate(chat.messages):
        content = message["content"].strip()
        if message["role"] == "user" and content not in context and content in text:
            return f"has message {i + 1}, of the user, in an answer"
    return None


def _find_content(text: str, content: str, position: int, span: CharSpan) -> int | None:
    """Return the end of `content`, which begins at `position` or later and ends in the span, or None.

    The template may have changed the whitespace.
    """
    begin, end = span
    start = max(position, begin - len(content) + 1)
    if (at := text.find(content, start, end)) >= 0:
        return at + len(content)
    before, inside, expected = ("".join(part.split()) for part in (text[start:begin], text[begin:end], content))
    return end if (before + inside).find(expected, max(0, len(before) - len(expected) + 1)) >= 0 else None


def _called_names(message: dict[str, Any]) -> list[str]:
    if not (calls := message.get("tool_calls")):
        return []
    calls = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [call["name"] for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)]


def _argument_forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the messages with the arguments of tool calls as objects, and as JSON text, which some templates require.

    Without tool calls, there is one form.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    return [[_with_arguments(message, form) for message in messages] for form in (_as_object, _as_text)]


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    converted = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function = function | {"arguments": form(function["arguments"])}
            call = call | {"function": function} if "function" in call else function
        converted.append(call)
    return message | {"tool_calls": converted}


def _as_object(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
