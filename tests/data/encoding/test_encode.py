"""Tokens and loss masks of texts and conversations; the completion's text follows the prompt's."""

from datetime import datetime

import numpy as np
import pytest
from number_words import number_words
from published_templates import with_template
from record_files import invalid
from tiny_tokenizers import KINDS, TURN, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from user_errors import refused

from odc_mpi.data.chat.templates import ChatRenderer, fix_time, set_variables
from odc_mpi.data.encoding.encode import encode, encode_prompts, tokenize_pairs
from odc_mpi.data.examples import Conversation, PromptCompletion

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say ä, please.\n"},
    {"role": "assistant", "content": "\n  Well: ä 🙂 \n"},
    {"role": "user", "content": "Well: ä"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]


def trained_runs(tokenizer, encoded):
    """Decode each run of trained tokens, exactly."""
    runs = np.split(np.arange(len(encoded.tokens)), 1 + np.flatnonzero(np.diff(encoded.loss_mask)))
    return [tokenizer.decode(encoded.tokens[run]) for run in runs if encoded.loss_mask[run[0]]]


def test_pairs_train_the_completion_and_the_end(tokenizer):
    texts = (("What is ä?\n", "A letter."), ("", "Only text"), ("p", " "))
    pairs = [PromptCompletion("", prompt, completion) for prompt, completion in texts]
    for pair, [encoded] in zip(pairs, encode(tokenizer, pairs), strict=True):
        assert encoded.tokens.dtype == np.uint32 and encoded.loss_mask.dtype == np.bool_
        assert tokenizer.decode(encoded.tokens) == pair.prompt + pair.completion + "<|endoftext|>"
        assert trained_runs(tokenizer, encoded) == [pair.completion + "<|endoftext|>"]


def test_chats_train_the_assistant_and_its_end_of_turn(tokenizer):
    [[encoded]] = encode(tokenizer, [Conversation("", CHAT)])
    assert tokenizer.decode(encoded.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    # One token has the newline at the end of the generation prompt and that of the answer, as with Qwen2's tokenizer.
    assert trained_runs(tokenizer, encoded) == ["\n\n  Well: ä 🙂 \n<|im_end|>", "No.<|im_end|>"]

    # An empty turn is context.
    silent = [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]
    [[encoded]] = encode(tokenizer, [Conversation("", [*silent, *CHAT[:3], *silent])])
    assert trained_runs(tokenizer, encoded) == ["\n\n  Well: ä 🙂 \n<|im_end|>"]


def test_a_prompt_without_a_message_is_refused(tokenizer):
    invalid("here: ...expected a message, got none", ChatRenderer(tokenizer).render_prompt, Conversation("here", []))


def test_a_template_without_end_token_keeps_the_whole_turn(tokenizer):
    plain = with_template(
        tokenizer,
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    )
    [rendered] = ChatRenderer(plain).render_answers(Conversation("", CHAT[3:5]))
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["No.\n\n"]
    # A token may hold both the blank of the prompt and the first word: the word must be a loss token.
    [[encoded]] = encode(plain, [Conversation("", CHAT[3:5])])
    assert trained_runs(plain, encoded)[0].lstrip() == "No.\n\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "need a chat template"),
        ({"rag": "{{ messages[0].content }}"}, "rejects the messages"),  # named ones without a default
        ("{{ raise_exception('roles must\nalternate') }}", "rejects the messages (roles must alternate)"),
        ("{{ messages[99].content }}", "rejects the messages"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "changes earlier text"),
        ("{% for m in messages %}{{ m.content.split('Well')[-1] }}{% endfor %}", "drops a part of message 3"),
    ],
)
def test_templates_that_do_not_serve(tokenizer, template, expected):
    changed = with_template(tokenizer, template)
    refused(f"x.jsonl, line 7: ...{expected}", encode, changed, [Conversation("x.jsonl, line 7", CHAT)])


def llama_like():
    """A tokenizer that glues blanks to words, begins each sequence with <s>, and has no end token yet."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.train_from_iterator(["[INST] Well hello there, who is there? [/INST] It is me again. "] * 5, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", clean_up_tokenization_spaces=False)


def test_sequences_begin_as_the_tokenizer_says_and_need_an_end_token():
    tokenizer, pair = llama_like(), PromptCompletion("", "who is", " me")
    refused("eos_token...--tokenizer", encode, tokenizer, [pair])
    tokenizer.eos_token = "</s>"
    [[encoded]] = encode(tokenizer, [pair])
    assert tokenizer.convert_ids_to_tokens(encoded.tokens) == ["<s>", "▁who", "▁is", "▁me", "</s>"]
    assert encoded.loss_mask.tolist() == [False, False, False, True, True]


def test_masks_with_glued_blanks():
    tokenizer = llama_like()
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "who is there?"}, {"role": "assistant", "content": "It is me"}] * 2
    [[encoded]] = encode(tokenizer, [Conversation("", chat)])
    tokens = tokenizer.convert_ids_to_tokens(encoded.tokens)
    assert tokens.count("<s>") == 1, "the template writes it, the tokenizer must not"
    trained = [token for token, mask in zip(tokens, encoded.loss_mask, strict=True) if mask]
    assert "".join(trained).replace("▁", " ") == " It is me</s> It is me</s>"


def test_bos_and_eos_are_not_added_to_texts_that_have_them():
    found = number_words(end=60)
    found.add_special_tokens({"bos_token": "59"})
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(single="59 $A", special_tokens=[("59", 59)])
    texts = ("1 2", "59 1 2", "1 2 60", "59 1 2 60\n", "1 60 2")
    encoded = [each for [each] in encode(found, [PromptCompletion("", "", text) for text in texts])]
    assert [each.tokens.tolist() for each in encoded] == [[59, 1, 2, 60]] * 4 + [[59, 1, 60, 2, 60]]
    assert [bool(each.notes) for each in encoded] == [False, True, True, True, False]
    prompts = encode_prompts(found, [PromptCompletion("", text, "") for text in ("1 2", "59 1 2")])
    assert prompts == [[59, 1, 2]] * 2, "as in training"
    [[pair]] = encode(found, [PromptCompletion("", "59 1", "2 60")])
    assert (pair.tokens.tolist(), pair.loss_mask.tolist()) == ([59, 1, 2, 60], [False, False, True, True])


def test_prompts_may_have_the_date_of_another_day():
    """Templates write `strftime_now`, such as Llama 3.1's, which transformers' `apply_chat_template` sets to today."""
    body = "{%- set day = strftime_now('%-d %m %y') %}\n{{ day }} {{ messages[0].content }}"
    chat, today = Conversation("", [{"role": "user", "content": "7"}]), datetime.now().strftime("%-d %m %y")
    for begin in ("", "\n\n", "  {% if true %} 9\n  {% endif %}\n", "{# %b #}"):
        for named in (False, True):
            found, template = number_words(end=60), begin + body
            found.chat_template = {"default": template, "tool_use": "{{ none }}"} if named else template
            of_today = ChatRenderer(found).render_prompt(chat)
            fix_time(found, "2024-12-01T23:59:59")
            assert ChatRenderer(found).render_prompt(chat) == of_today.replace(f"{today} 7", "1 12 24 7") != of_today
    assert found.decode(encode_prompts(found, [chat])[0]) == "1 12 24 7"
    fix_time(without := number_words(end=60), "2024-12-01T23:59:59")
    assert without.chat_template is None


def test_variables_are_those_of_transformers():
    body = "{% macro a() %}{{ mode }}{% endmacro %}{% if deep is defined and not deep %}1 {% endif %}"
    body += "{{ a() }}{% for each in some %} {{ each }}{% endfor %}{{ 5 if none_at_all is none }}{{ other | length }}"
    values = {"deep": False, "mode": "it's\n%}{{ 2 }}", "some": [1, "2"], "none_at_all": None, "other": {"a": 1}}
    chat, messages = Conversation("", CHAT[1:2]), CHAT[1:2]
    for named in (False, True):
        found, wanted = number_words(end=60), number_words(end=60)
        found.chat_template = {"default": body, "tool_use": "{{ none }}"} if named else body
        wanted.chat_template = body
        set_variables(found, values)
        text = wanted.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values)
        assert ChatRenderer(found).render_prompt(chat) == text != wanted.apply_chat_template(messages, tokenize=False)
    set_variables(without := number_words(end=60), values)
    assert without.chat_template is None


#: Kinds whose tokens keep all text.
EXACT = [kind for kind in KINDS if kind not in ("t5", "wordpiece", "words")]
PAIRS = (("Who is", "me"), ("Who is ", "me"), ("Who is", " me"), ("Who is\n", "me again"), ("Q:", "//me"), ("", "me"))


@pytest.mark.parametrize("kind", EXACT)
def test_no_space_is_inserted(kind):
    tokenizer = tiny_tokenizer(kind)
    for prompt, completion in (*PAIRS, (f"{TURN}me{TURN} ", f"Who is{TURN}"), ("a", ": a"), ("12", "345 ")):
        [prompt_ids], [completion_ids] = tokenize_pairs(tokenizer, [prompt], [completion])
        assert prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        joined = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([*prompt_ids, *completion_ids]) == tokenizer.decode(joined)
        assert completion_ids


def test_words_are_not_joined():
    tokenizer = tiny_tokenizer("wordpiece")
    ids = tokenize_pairs(tokenizer, ["un", "un"], ["a", " a"])
    assert [tokenizer.convert_ids_to_tokens(each) for each in ids[1]] == [["##a"], ["a"]]
