"""Chat templates: those of published models, which the package trl contains, and small ones for single cases."""

from typing import get_args

import pytest
from published_templates import PATHS, TEXT_TEMPLATES, with_published_template, with_template
from record_files import invalid

from odc_mpi.data.chat.templates import ChatRenderer, SplitTurns
from odc_mpi.data.encoding.encode import encode, end_of_turn_token
from odc_mpi.data.examples import Conversation
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.messages import parse_messages

#: Templates without tools.
NO_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"}
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}, "required": ["word"]}
LOOKUP = {"name": "lookup", "description": "Look up a word.", "parameters": WORD}
TOOLS = [{"type": "function", "function": LOOKUP}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALLED = {"type": "function", "id": "call12345", "function": {"name": "lookup", "arguments": '{"word": "zebra"}'}}
[CALL] = parse_messages([{"role": "assistant", "content": "", "tool_calls": [CALLED]}], "messages", "here")
RESULT = {"role": "tool", "name": "lookup", "tool_call_id": "call12345", "content": "User result: four."}


def turn(i):
    return [{"role": "user", "content": f"User question {i}?"}, {"role": "assistant", "content": f"Reply {i}, done."}]


CONVERSATIONS = {
    "one": Conversation("one", turn(1)),
    "two": Conversation("two", [*turn(1), *turn(2)]),
    "system": Conversation("system", [SYSTEM, *turn(1), *turn(2)]),
    "three": Conversation("three", [*turn(1), *turn(2), *turn(3)]),
    "tools": Conversation("tools", [*turn(1), turn(2)[0], CALL, RESULT, *turn(3)[1:], *turn(4)], TOOLS),
}


def trained_text(tokenizer, encoded):
    return "".join(tokenizer.decode(each.tokens[each.loss_mask], skip_special_tokens=False) for each in encoded)


@pytest.mark.skipif(not PATHS, reason="no trl (extra test-peers)")
def test_published_templates_train_each_answer_once_and_nothing_of_the_user(tokenizer):
    assert len(TEXT_TEMPLATES) >= 34
    plain, split, omitted, refused = tokenizer, {}, set(), {}
    for name in TEXT_TEMPLATES:
        tokenizer = with_published_template(plain, name)
        for case, chat in CONVERSATIONS.items():
            try:
                [encoded] = encode(tokenizer, [chat])
            except InvalidRecordError as error:
                refused.setdefault(name, {})[case] = str(error)
                continue
            text = trained_text(tokenizer, encoded)
            answers = [each["content"] for each in chat.messages if each["role"] == "assistant" and each["content"]]
            assert [text.count(answer) for answer in answers] == [1] * len(answers)
            assert text.count("zebra") == (case == "tools"), (name, case)
            assert "User" not in text and "Be brief" not in text, (name, case)
            if case == "three" and len(encoded) > 1:
                split[name] = len(encoded)
            omitted |= {name} if any(note.startswith("loss that begins") for note in encoded[0].notes) else set()
    # The published gpt-oss stops at <|return|>, which is in the last answer only; the others think in it only.
    assert split == dict.fromkeys(("gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), 3)
    assert {"deepseek_r1_distill", "deepseekv3", "nemotron_3_nano"} <= omitted
    assert not omitted - {name for name in omitted if name.startswith(("deepseek", "nemotron", "qwen3_5_nothink"))}
    assert set(refused) == NO_TOOLS and all(set(cases) <= {"tools", "system"} for cases in refused.values())
    assert {name for name, cases in refused.items() if "system" in cases} == {"gemma"}
    texts = [text for cases in refused.values() for text in cases.values()]
    assert all("rejects the messages (" in text or "--chat-template FILE" in text for text in texts)


@pytest.mark.slow
@pytest.mark.skipif(not PATHS, reason="no trl (extra test-peers)")
def test_masks_equal_the_marks_in_the_training_variants_of_published_templates(tokenizer):
    """Marks may begin in the generation prompt, and may include white space after the end-of-turn token.

    With tools, those of diffusion_gemma leave out <|tool_response>, at which it stops.
    """
    names, other = [name for name in TEXT_TEMPLATES if f"{name}_training" in PATHS], set()
    for name in names:
        plain = with_published_template(tokenizer, name)
        marked = with_published_template(tokenizer, f"{name}_training", special_of=name)
        for case, chat in CONVERSATIONS.items():
            if (name, case) == ("gemma", "system") or (case == "tools" and name in NO_TOOLS | {"diffusion_gemma"}):
                continue
            ours, theirs = (ChatRenderer(each, "always").render_answers(chat) for each in (plain, marked))
            indices = [i for i in range(len(chat.messages)) if chat.message_has_loss(i)]
            for i, found, expected in zip(indices, ours, theirs, strict=True):
                if found.text != expected.text:
                    other.add(name)
                    continue
                [(begin, end)] = found.spans
                first, last = expected.spans[0][0], expected.spans[-1][1]
                prompt = ChatRenderer(plain).render_prompt(Conversation("", chat.messages[:i]))
                assert first <= begin and prompt.removesuffix(found.omitted).endswith(found.text[first:begin]), name
                assert end <= last and not found.text[end:last].strip(), name
    assert other <= {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"} and len(names) >= 26


HEADER = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LAST_THINKS = (
    HEADER
    + "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT
)
MARKED = (
    HEADER + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)


def spans(tokenizer, chat, split_turns="auto"):
    rendered = ChatRenderer(tokenizer, split_turns).render_answers(chat)
    return [[each.text[begin:end] for begin, end in each.spans] for each in rendered]


def test_answers_that_depend_on_later_messages_are_split(tokenizer):
    chat = CONVERSATIONS["two"]
    changing = with_template(tokenizer, LAST_THINKS)
    together = [["Reply 1, done.<|im_end|>", "Reply 2, done.<|im_end|>"]]
    separate = [["<think>Reply 1, done.<|im_end|>"], ["<think>Reply 2, done.<|im_end|>"]]
    assert spans(changing, chat) == spans(changing, chat, "always") == separate
    words = "two: ...cannot share a sequence: use --split-turns auto, or ...FILE"
    invalid(words, spans, changing, chat, "never")
    assert spans(tokenizer, chat) == spans(tokenizer, chat, "never") == together
    assert spans(tokenizer, chat, "always") == [[text] for text in together[0]]
    # Answers without loss, and messages after the last answer, need no example.
    context = Conversation("", [*chat.messages, turn(3)[0]], context=frozenset({1}))
    assert spans(changing, context) == [["<think>Reply 2, done.<|im_end|>"]]
    begins = Conversation("", [turn(1)[1], *turn(2)], context=frozenset({0}))
    assert spans(tokenizer, begins) == [["Reply 2, done.<|im_end|>"]]


def test_marks_of_a_template_are_the_mask(tokenizer):
    marked = with_template(tokenizer, MARKED.replace("{{ m.content }}<|im_end|>{% end", "{{ m.content }}{% end", 1))
    chat = CONVERSATIONS["two"]
    assert spans(marked, chat) == [["Reply 1, done.", "Reply 2, done."]]
    assert spans(marked, chat, "always") == [["Reply 1, done."], ["Reply 2, done."]]
    assert spans(marked, Conversation("", chat.messages, context=frozenset({1}))) == [["Reply 2, done."]]
    # A comment is not a mark.
    commented = with_template(tokenizer, "{# {% generation %} #}" + tokenizer.chat_template)
    assert spans(commented, chat) == spans(tokenizer, chat)
    # Marks of other messages are not used, but one that covers several messages cannot be divided.
    everything = MARKED.replace("m.role == 'assistant'", "true")
    assert spans(with_template(tokenizer, everything), chat) == spans(tokenizer, chat)
    one_mark = everything.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    covering = with_template(tokenizer, "{% generation %}" + one_mark.replace(PROMPT, "{% endgeneration %}" + PROMPT))
    for split_turns in get_args(SplitTurns):
        invalid("message 1, of the user, in an answer", spans, covering, chat, split_turns)
    # Nor may a template without marks repeat a question in the answer only.
    repeating = "{{ messages[loop.index0 - 1].content }} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    repeating = "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n" + repeating + PROMPT
    invalid("message 1, of the user, in an answer", spans, with_template(tokenizer, repeating), chat)
    nothing = with_template(tokenizer, MARKED.replace("{{ m.content }}<|im_end|>{% end", "{% end", 1))
    invalid("drops a part of message 2", spans, nothing, chat)


@pytest.mark.parametrize("content", ["Yes", "<b>Yes", "A <think> B"])
def test_an_answer_may_lack_the_end_of_the_generation_prompt(tokenizer, content):
    opening = with_template(tokenizer, tokenizer.chat_template.replace("assistant\n'", "assistant\n<think>\n'"))
    opening.add_tokens("<think>")
    chat = Conversation("", [*turn(1), turn(2)[0], {"role": "assistant", "content": content}])
    assert spans(opening, chat) == [["Reply 1, done.<|im_end|>", f"{content}<|im_end|>"]]
    [rendered] = ChatRenderer(opening).render_answers(chat)
    assert rendered.omitted == "<think>\n"


def test_an_answer_that_a_template_shortens_is_refused(tokenizer):
    dropping = with_template(
        tokenizer, tokenizer.chat_template.replace("message['content']", "message['content'].split('</think>')[-1]")
    )
    thinking = Conversation("here", [turn(1)[0], {"role": "assistant", "content": "<think>Well.</think>Yes."}])
    invalid("here: ...drops a part of message 2, ...--chat-template FILE", encode, dropping, [thinking])
    # So are calls of functions, which the plain template does not know; the user's words do not replace the answer's.
    invalid("drops a part of message 4", encode, tokenizer, [CONVERSATIONS["tools"]])
    # Nor do the words of a later answer.
    later = [turn(1)[0], CALL, RESULT, {"role": "assistant", "content": "By lookup."}]
    invalid("drops a part of message 2", encode, tokenizer, [Conversation("", later)])
    silent = with_template(
        tokenizer, HEADER + "{% if m.role == 'user' %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
    )
    same = [{"role": role, "content": "I agree."} for role in ("user", "assistant")]
    invalid("drops a part of message 2", encode, silent, [Conversation("", same)])


def test_arguments_of_calls_are_json_in_the_text(tokenizer):
    """Templates get the form, object or text, that they write as JSON; GLM writes names and values."""
    render, as_json = "m.tool_calls[0].function.arguments", '{"word": "zebra", "n": null}'
    renderings = {
        f"{render} | tojson": as_json,
        f"'' + {render}": as_json,  # raises for objects
        f"{render}": as_json,  # would write objects as Python does
        f"'word=' ~ {render}.word ~ ' n=' ~ ({render}.n | tojson)": "word=zebra n=null",
        f"{render} | string | tojson": None,  # JSON text in a JSON string
        f"'word=' ~ {render}.word ~ ' n=' ~ {render}.n": "word=zebra n=None",  # as Qwen3-Coder
        f"'word=' ~ {render}.word": None,
        "'()'": None,
    }
    function = {"name": "lookup", "arguments": {"word": "zebra", "n": None}}
    [call] = parse_messages([{"role": "assistant", "tool_calls": [function]}], "", "")
    for rendering, expected in renderings.items():
        message = f"{{{{ m.content }}}}{{% if m.tool_calls %}}lookup{{{{ {rendering} }}}}{{% endif %}}<|im_end|>\n"
        changed = with_template(tokenizer, HEADER + message + "{% endfor %}" + PROMPT)
        if expected:
            assert spans(changed, Conversation("", [turn(1)[0], call])) == [[f"lookup{expected}<|im_end|>"]]
        else:
            line = invalid("", encode, changed, [Conversation("", [turn(1)[0], call])])
            assert "arguments of tool calls neither as JSON" in line or "drops a part of message 2" in line


END = "{{ m.content }}<|im_end|>\n{% endfor %}"
CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKED_CONTENT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
BETWEEN = "{{ m.content }}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}"
GLM += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "end", "unended", "token"),
    [
        (HEADER + END + PROMPT, "<|im_end|>", "", "<|im_end|>"),
        # Always writes the generation prompt, or goes on after the end of the turn.
        (HEADER + END + "{{ '<|im_start|>assistant\n' }}", "<|im_end|>", "", "<|im_end|>"),
        (HEADER + END + PROMPT.replace("{% endif %}", "{% else %}(end){% endif %}"), "<|im_end|>", "", "<|im_end|>"),
        # Writes the end between two turns only, or as the marker of the next role.
        (HEADER + BETWEEN + PROMPT, "<|im_end|>", "", "<|im_end|>"),
        (GLM, "<|user|>", "", "<|user|>"),
        # Marks answers without their ends, or writes no token.
        (MARKED_CONTENT, "", "<|im_end|>", "<|im_end|>"),
        (ROLES + "{% if add_generation_prompt %}assistant: {% endif %}", "\n", "<|endoftext|>", None),
        (ROLES + "assistant: ", "", "<|endoftext|>", None),
    ],
)
def test_the_loss_ends_with_the_token_that_ends_an_answer(tokenizer, template, end, unended, token):
    changed = with_template(tokenizer, template)
    changed.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
    chat = Conversation("", [*turn(1), *turn(2)])
    expected = [f"Reply {i}, done.{end}" for i in (1, 2)]
    [[encoded]] = encode(changed, [chat])
    # A token may have the space before a word, or the line break after one.
    text = trained_text(changed, [encoded]).replace(" Reply", "Reply")
    assert text.replace("\n", "") == "".join(expected).replace("\n", "")
    assert [note.rpartition("such as ")[2] for note in encoded.notes] == ([f"{unended!r},"] if unended else [])
    found = end_of_turn_token(changed)
    assert (found and changed.convert_ids_to_tokens(found)) == token
    [split] = encode(changed, [chat], "always")
    assert [trained_text(changed, [each]).strip() for each in split] == [text.strip() for text in expected]


def test_the_marker_of_the_tool_ends_a_call(tokenizer):
    """As in TRL's training template of GLM."""
    changed = with_template(tokenizer, GLM)
    changed.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
    [[encoded]] = encode(changed, [Conversation("", [turn(1)[0], CALL])])
    assert trained_text(changed, [encoded]).endswith("]<|tool|>")
    [[encoded]] = encode(changed, [Conversation("", [turn(1)[0], CALL, RESULT, *turn(2)[1:]])])
    assert trained_text(changed, [encoded]).endswith("]<|tool|>Reply 2, done.<|user|>")


def test_what_a_template_leaves_out_is_listed(tokenizer):
    user = {"role": "user", "content": "Hi", "mood": "calm", "id": 3}
    chat = parse_messages([user, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}], "", "")
    [[encoded]] = encode(tokenizer, [Conversation("", chat, TOOLS)])
    assert [each.split()[1] for each in encoded.notes] == ["reasoning", "`tools`", "`mood`"]
    # So is the reasoning of answers without loss, and tools that are only named in calls.
    context = parse_messages([user, *turn(1)[1:], CALL, RESULT, *turn(2)], "", "")
    context[1]["reasoning_content"] = "Hm."
    named = with_template(
        tokenizer, tokenizer.chat_template.replace("['content']", "['content'] ~ (message.tool_calls or '')")
    )
    [[encoded]] = encode(named, [Conversation("", context, TOOLS, frozenset({1, 2}))])
    assert [each.split()[1] for each in encoded.notes] == ["reasoning", "`tools`", "`mood`"]
    # Reasoning reaches a template under the name that it knows; without a name, an answer of reasoning alone is lost.
    message = "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
    thinking = with_template(tokenizer, HEADER + message + END + PROMPT)
    for name in ("reasoning", "reasoning_content", "thinking"):
        only = Conversation("", parse_messages([user, {"role": "assistant", "content": "", name: "Hm."}], "", ""))
        assert spans(thinking, only) == [["<think>Hm.</think><|im_end|>"]]
        invalid("drops a part of message 2", encode, tokenizer, [only])
