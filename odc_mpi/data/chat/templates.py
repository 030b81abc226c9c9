"""Chat templates: rendering conversations, and finding the assistant's answers in the rendered text.

To find an answer, two renderings are compared. The first contains the messages before the answer, and the generation
prompt, which is the text that the model continues at inference. The second contains the messages up to and including
the answer. The loss begins where the two texts differ. If a template marks the answers with `{% generation %}`, only
the marked text has loss, and the comparison only serves to find the marks of a single answer.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal

from odc_mpi.data.chat.checks import COMMENT, CharSpan, Rendered, find_ignored, find_problem, names_in
from odc_mpi.data.chat.tool_calls import argument_forms, called_functions, contains_arguments, is_distorted
from odc_mpi.data.chat.turn_ends import TurnEnd, find_turn_end
from odc_mpi.data.examples import Conversation
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.messages import REASONING
from odc_mpi.errors import UserError, one_line_message

SplitTurns = Literal["auto", "always", "never"]
_REPLACE = "replace the tokenizer's chat template with --chat-template FILE"


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
    def turn_end(self) -> TurnEnd:
        """The end of an answer in this template."""
        return find_turn_end(
            lambda messages: self._render(Conversation("", list(messages)), [len(messages)])[0].text,
            self._special_tokens,
            self._tokenizer.eos_token,
            self._tokenizer.bos_token,
        )

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
        trained = [i for i in range(len(chat.messages)) if chat.message_has_loss(i)]
        examples = self._render_examples(chat, trained)
        notes = [f"ignored: {each}" for each in find_ignored(chat, trained, examples, self.template(chat))]
        if omitted := next((each.omitted for each in examples if each.omitted), ""):
            notes.append(
                "loss that begins before the end of the generation prompt, because the chat template leaves "
                f"{omitted!r} out of answers,"
            )
        ends = (each.text[begin:end].rstrip() for each in examples for begin, end in each.spans)
        if not any(end.endswith(self._special) for end in ends):
            token = self.turn_end.token or self._tokenizer.eos_token or "the eos token"
            notes.append(
                "warning: the model does not learn to stop (use another chat template, such as one of TRL's training "
                "templates, with --chat-template FILE): no answer ends with a loss token that stops generation, such "
                f"as {token!r},"
            )
        return [each._replace(notes=tuple(notes)) for each in examples]

    def _render_examples(self, chat: Conversation, trained: list[int]) -> list[Rendered]:
        is_marked = _has_marks(self.template(chat))
        num_answers = sum(message["role"] == "assistant" for message in chat.messages)
        if is_marked and len(trained) == num_answers and self._split_turns != "always":
            [marked] = self._render(chat, [len(chat.messages)], with_marks=True)
            if find_problem(chat, trained, marked) is None:
                return [marked]
        examples, text = self._find_answers(chat, trained, is_marked=is_marked)
        groups, counts = [[i] for i in trained], [i + 1 for i in trained]
        if (shared := self._share(chat, text, dict(zip(trained, examples, strict=True)))) is not None:
            groups, examples, counts = [trained], [shared], [len(chat.messages)]
        if is_marked:
            pairs = zip(examples, self._render(chat, counts, with_marks=True), strict=True)
            examples = [Rendered(each.text, _overlapping(marked.spans, each.spans)) for each, marked in pairs]
        for group, example in zip(groups, examples, strict=True):
            if problem := find_problem(chat, group, example):
                raise InvalidRecordError(f"{chat.location}: the chat template {problem}: {_REPLACE}")
        return examples

    def close_turn(self, text: str) -> str:
        """Return a rendered text that ends with an answer such that its last token is the end-of-turn token.

        Text after this token is removed, and the token is added if the template writes it only before another message.
        Without such a token, the text is returned unchanged.
        """
        text = text.removesuffix(self.turn_end.rest) + self.turn_end.closing
        return text[: self._length_of_turn(text)]

    def _length_of_turn(self, turn: str) -> int:
        """Return the number of characters in a turn, excluding whitespace after the special token that ends it."""
        stripped = turn.rstrip()
        return len(stripped) if self._special and stripped.endswith(self._special) else len(turn)

    def _find_answers(
        self, chat: Conversation, trained: Sequence[int], *, is_marked: bool
    ) -> tuple[list[Rendered], str]:
        """Return one example for each trained answer, which ends with this answer, and the text of all messages."""
        prompts = self._render(chat, trained, for_generation=True)
        counts = sorted({*(i + 1 for i in trained), len(chat.messages)})
        texts = {count: each.text for count, each in zip(counts, self._render(chat, counts), strict=True)}
        if not is_marked:  # a template with marks decides itself where an answer ends
            for i in trained:
                turn = texts[i + 1].removesuffix(self.turn_end.rest)
                texts[i + 1] = turn + self._closing(chat, i, turn)
        answers = []
        for i, (prompt, *_) in zip(trained, prompts, strict=True):
            turn = texts[i + 1]
            begin = len(prompt) if turn.startswith(prompt) else self._num_common(prompt, turn)
            if begin < len(prompt):
                [context] = self._render(chat, [i])
                if begin < self._num_common(prompt, context.text):
                    raise InvalidRecordError(
                        f"{chat.location}: the chat template changes earlier text when message {i + 1} is added, so "
                        f"this answer cannot be found: {_REPLACE}"
                    )
            answers.append(Rendered(turn, [(begin, self._length_of_turn(turn))], prompt[begin:]))
        return answers, texts[len(chat.messages)]

    def _closing(self, chat: Conversation, index: int, turn: str) -> str:
        """Return the text to append to a turn that ends with answer `index`, so that it ends with a special token."""
        if self.turn_end.closing and "tool_calls" in chat.messages[index]:
            # The next turn is the tool's, which may begin with another token.
            messages = [*chat.messages[: index + 1], {"role": "tool", "content": "0"}]
            with suppress(InvalidRecordError):
                [longer] = self._render(Conversation(chat.location, messages, chat.tools), [len(messages)])
                following = longer.text.removeprefix(turn).lstrip()
                if longer.text.startswith(turn) and (token := self._special_tokens.match(following)):
                    return token[0]
        return self.turn_end.closing

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
            spans.append((example.spans[0][0], self._length_of_turn(turn)))
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

    def _render(
        self, chat: Conversation, counts: Sequence[int], *, for_generation: bool = False, with_marks: bool = False
    ) -> list[Rendered]:
        """Render the first `count` messages for each `count` in `counts`. The spans are those that the template marks.

        One call renders all counts, because converting tools and special tokens takes as long as rendering.
        """
        if not counts:
            return []
        error: Exception | None = None
        without_arguments: list[Rendered] | None = None
        forms = argument_forms(chat.messages)
        for form in forms:
            try:
                rendered = self._render_form(chat, form, counts, for_generation, with_marks)
            except Exception as problem:  # templates may raise any exception
                error = error or problem
                continue
            if len(forms) == 1:  # without calls
                return rendered
            calls = [
                (each.text, function["arguments"])
                for each, count in zip(rendered, counts, strict=True)
                for function in called_functions(chat.messages[:count])
            ]
            if all(contains_arguments(*call) for call in calls):
                return rendered
            if any(is_distorted(*call) for call in calls):
                error = ValueError("it writes the arguments of tool calls neither as JSON nor as names and values")
            else:
                without_arguments = without_arguments or rendered
        if without_arguments is not None:
            return without_arguments  # the template leaves calls out, which `checks` reports
        assert error is not None
        raise _rejection(chat, error) from error

    def _render_form(
        self, chat: Conversation, form: list[dict[str, Any]], counts: Sequence[int], for_generation: bool, marks: bool
    ) -> list[Rendered]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if 0 in counts:
            raise ValueError("expected a message, got none")
        template, stored = self.template(chat), REASONING[0]
        if (name := next((name for name in REASONING if name in names_in(template)), stored)) != stored:
            form = [message | {name: message[stored]} if stored in message else message for message in form]
        rendered: Any = render_jinja_template(
            [form[:count] for count in counts],
            chat.tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=for_generation,
            **self._tokenizer.special_tokens_map,
        )
        texts, spans = rendered
        for text in texts:
            text.encode("utf-8")  # fields besides the content may contain half of a surrogate pair
        return list(map(Rendered, texts, spans or [[] for _ in texts]))

    def template(self, chat: Conversation) -> str:
        """Return the template for a conversation. Raises a `UserError` if the tokenizer has none."""
        if not self._tokenizer.chat_template:
            raise UserError(
                f"{chat.location}: 'messages' need a chat template, but the tokenizer has none: use another tokenizer, "
                "or --chat-template FILE of odc-mpi prepare"
            )
        try:
            template: str = self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:  # named templates without a default
            raise _rejection(chat, error) from error
        return template


def _rejection(chat: Conversation, error: Exception) -> InvalidRecordError:
    reason = one_line_message(error)
    return InvalidRecordError(f"{chat.location}: the tokenizer's chat template rejects the messages ({reason})")


def fix_time(tokenizer: Any, time: str) -> None:
    """Change a tokenizer's chat templates so that they write the date of `time`, in ISO format, instead of today's.

    A macro replaces the function `strftime_now`, because transformers' renderer accepts no functions as arguments.
    """

    def fix(template: str) -> str:
        codes = dict.fromkeys(re.findall(r"%[-_^#]?\w", template) if "strftime_now" in template else ())
        replaced = "".join(f" | replace({code!r}, {datetime.fromisoformat(time).strftime(code)!r})" for code in codes)
        # Jinja removes the line break, which keeps the whitespace at the start of the template.
        return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"

    _change_templates(tokenizer, fix)


def set_variables(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Change a tokenizer's chat templates so that they render as with `values` as `chat_template_kwargs`."""
    # Python's literals are also those of Jinja. Jinja removes the line breaks.
    lines = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in values.items())
    _change_templates(tokenizer, lambda template: f"{lines}{template}")


def _change_templates(tokenizer: Any, change: Callable[[str], str]) -> None:
    named = tokenizer.chat_template
    tokenizer.chat_template = (
        {key: change(named[key]) for key in named} if isinstance(named, dict) else named and change(named)
    )


@functools.lru_cache
def _has_marks(template: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", COMMENT.sub("", template)) is not None


def _overlapping(spans: list[CharSpan], others: list[CharSpan]) -> list[CharSpan]:
    return [span for span in spans if any(span[0] < end and begin < span[1] for begin, end in others)]
