"""The forms of published data sets, as records; those of JSON lines are in test_readers."""

import json

import pytest
from record_files import invalid

from odc_mpi.data.examples import Conversation, ExampleGroup, PromptCompletion
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example, parse_prompt
from odc_mpi.data.records.schema import ignored_fields

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def parse_chat(record):
    example = parse_example(record, "here")
    assert isinstance(example, Conversation)
    return example


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, CHAT),
        ({"conversations": CHAT, "id": 3}, CHAT),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *CHAT]}, [SYSTEM, *CHAT]),
        ({"instruction": "Hi", "output": "Hello", "text": "all of it"}, CHAT),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, CHAT),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [
            {"role": "user", "content": "Add.\n\n1 2"},
            {"role": "assistant", "content": "3"},
        ]),
        ({"messages": CHAT, "system": "Be brief."}, [SYSTEM, *CHAT]),
        ({"messages": json.dumps(CHAT, indent=1)}, CHAT),
        ({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}, CHAT),
        ({"messages": [SYSTEM, *CHAT], "system": "Another."}, [SYSTEM, *CHAT]),
        ({"instruction": "Hi", "output": "Hello", "system": "Be brief."}, [SYSTEM, *CHAT]),
    ],
)  # fmt: skip
def test_forms(record, messages):
    chat = parse_chat(record)
    assert chat.messages == messages and chat.has_loss and chat.tools is None


def test_tools():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    for given, expected in ((tools, tools), (json.dumps(tools), tools), ([], None), ("", None), ("[]", None)):
        assert parse_chat({"messages": CHAT, "tools": given}).tools == expected
    for bad, words in (("[{", "JSON text"), ({"a": 1}, "got an object"), (["f"], "to be an object, got a string")):
        invalid(f"here: expected ...'tools' ...{words}", parse_chat, {"messages": CHAT, "tools": bad})


def test_only_the_completion_of_two_lists_of_messages_is_trained():
    chat = parse_chat({"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:], "system": "Be brief."})
    assert chat.messages == [SYSTEM, *CHAT, *CHAT]
    assert [chat.message_has_loss(i) for i in range(5)] == [False, False, False, False, True]
    assert not parse_chat({"prompt": CHAT, "completion": []}).has_loss


def test_flags_keep_answers_out_of_the_loss_and_from_the_template():
    user, answer = CHAT
    flags = ({"weight": 0}, {"weight": 1, "train": True}, {"train": False})
    messages = [message for each in flags for message in (user, answer | each)]
    chat = parse_chat({"messages": messages, "system": "Be brief."})
    assert chat.messages == [SYSTEM, *CHAT * 3]
    assert [i for i in range(7) if chat.message_has_loss(i)] == [4]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "train": False}]
    assert not parse_chat({"conversations": turns}).has_loss


def test_roles():
    """Those of other data sets are translated, unknown ones are not; an answer to nothing is context."""
    call = {"name": "f", "arguments": {"a": 1}}
    turns = [("gpt", "Hi"), ("human", "x"), ("function_call", json.dumps(call)), ("observation", "1"), ("gpt", "y")]
    chat = parse_chat({"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert [message["role"] for message in chat.messages] == ["assistant", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert [chat.message_has_loss(i) for i in range(5)] == [False, False, True, False, True]
    roles = {"developer": "system", "function": "tool", "ipython": "tool", "critic": "critic", "human": "user"}
    chat = parse_chat({"messages": [{"role": role, "content": "x"} for role in roles]})
    assert [message["role"] for message in chat.messages] == list(roles.values())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"conversations": [{"from": "human"}]}, "expected the field 'content'"),
        ({"messages": [CHAT[0] | {"weight": 0.5}]}, "'weight' to be 0, 1, false or true, got 0.5"),
        ({"messages": [CHAT[0] | {"train": "no"}]}, "'train' to be 0, 1, false or true, got 'no'"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "expected JSON text in a 'function_call'"),
        ({"conversations": [{"from": "function_call", "value": "[3]"}]}, "an object with 'name', got"),
        ({"instruction": "x", "output": 3}, "expected 'output' to be a string"),
        ({"instruction": "x"}, "or 'conversations', or 'instruction' and 'output'"),
        ({"messages": CHAT, "system": 3}, "expected 'system' to be a string"),
        ({"prompt": CHAT, "completion": "x"}, "expected 'prompt' to be a string, got a list"),
    ],
)
def test_bad_records(record, words):
    assert invalid(words, parse_example, record, "here").startswith("here: ")


def call(**function):
    calls = [{"function": function}]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]


def test_calls_of_functions():
    """Arguments are an object, its JSON text or empty; calls may be in `function_call`, without `function`, or text."""
    expected = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    for given in ({"a": None}, '{"a": null}'):
        function = {"name": "f", "arguments": given}
        for calls in ([{"function": function}], [function], json.dumps([function]), {"function": function}):
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
            assert parse_chat({"messages": messages}).messages[1]["tool_calls"] == [expected]
        messages[1] = {"role": "assistant", "content": "Now.", "function_call": function, "tool_calls": None}
        chat = parse_chat({"messages": messages})
        assert chat.messages[1] == {"role": "assistant", "content": "Now.", "tool_calls": [expected]}
    for empty in ({}, *({"arguments": each} for each in ("", " ", None, {}, "{}"))):
        [found] = parse_chat({"messages": call(name="f", **empty)}).messages[1]["tool_calls"]
        assert found["function"] == {"name": "f", "arguments": {}}
    for nothing in ([], None, "", "[]"):
        messages = [CHAT[0], CHAT[1] | {"tool_calls": nothing, "function_call": None}]
        assert parse_chat({"messages": messages}).messages == CHAT
    identified = {"id": "c1", "name": "f", "arguments": {}}
    messages = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [identified]}]
    [found] = parse_chat({"messages": messages}).messages[1]["tool_calls"]
    assert found == {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    "function",
    [
        *(
            {"arguments": each}
            for each in ("[1]", "{city: Bern}", "1", '"{}"', [1], 3, {"a": float("nan")}, {"a": b""})
        ),
        {"parameters": {"a": 1}},
    ],
)
def test_arguments_that_are_no_object(function):
    with pytest.raises(InvalidRecordError, match=r"^here: expected (the arguments of 'f'|'name' and 'arguments')"):
        parse_chat({"messages": call(name="f", **function)})


def test_refusals_and_reasoning():
    refused = parse_chat({"messages": [CHAT[0], {"role": "assistant", "content": None, "refusal": "No."}]})
    assert refused.messages[1] == {"role": "assistant", "content": "No."} and refused.has_loss
    thought = parse_chat({"messages": [CHAT[0], CHAT[1] | {"thinking": "Hm.", "reasoning": ""}]})
    assert thought.messages[1] == CHAT[1] | {"reasoning_content": "Hm."}
    for extra, words in (
        ({"refusal": "No."}, "one of 'content', 'refusal' in a message, got several: keep"),
        ({"thinking": "a", "reasoning": "b"}, "one of 'reasoning_content', 'reasoning', 'thinking' in"),
        ({"thinking": ["a"]}, "'thinking' to be a string"),
    ):
        with pytest.raises(InvalidRecordError, match=words):
            parse_chat({"messages": [CHAT[0], CHAT[1] | extra]})


@pytest.mark.parametrize("name", ["weight", "train", "training", "loss", "loss_scale", "loss_mask"])
def test_all_names_of_flags_keep_answers_out_of_the_loss(name):
    for value in (0, False, 0.0):
        chat = parse_chat({"messages": [*CHAT, CHAT[0], CHAT[1] | {name: value}]})
        assert chat.messages == [*CHAT, *CHAT] and chat.context == {3}
    invalid(f"'{name}' to be 0, 1, false", parse_chat, {"messages": [CHAT[0], CHAT[1] | {name: 0.5}]})
    assert parse_chat({"messages": [CHAT[0] | {name: True}, CHAT[1]]}).ignored
    for value in (False, [0, 1], "0"):
        record = {"prompt": "x", "completion": "y", name: value}
        invalid(f"expected '{name}' in messages only", parse_example, record, "here")


def test_earlier_turns_system_and_tools_beside_texts():
    earlier, both = [["Why?", "So."]], [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    alpaca = {"instruction": "Hi", "input": "", "output": "Hello"}
    for history in (earlier, json.dumps(earlier), both):
        chat = parse_chat(alpaca | {"history": history, "system": "Be brief."})
        assert chat.messages == [SYSTEM, *both, *CHAT] and chat.context == set()
    assert parse_chat(alpaca | {"history": []}).messages == CHAT
    texts = {"prompt": "Hi", "completion": "Hello"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = parse_chat(texts | {"system": "Be brief.", "history": earlier, "tools": tools})
    assert chat.messages == [SYSTEM, *both, *CHAT] and chat.tools == tools
    assert parse_prompt({"prompt": "Hi", "system": "Be brief."}, "here").messages == [SYSTEM, CHAT[0]]
    assert isinstance(parse_example(texts | {"system": None, "tools": None}, "here"), PromptCompletion)
    for bad in ("[", [["a"]], [["a", 1]], {"a": 1}, 3):
        invalid("'history' to be a list", parse_example, alpaca | {"history": bad}, "here")
    invalid("'system' together with 'messages', ...'text'", parse_example, {"text": "x", "system": "y"}, "here")
    assert parse_chat({"messages": [SYSTEM, *CHAT], "system": "Other."}).ignored


QUESTION = {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize(
    ("record", "columns", "ignored"),
    [
        ({"text": "a", "topic": "b", "id": 3, "source": "c", "empty": "", "none": None}, {}, ["topic"]),
        ({"messages": CHAT, "text": "a", "system": "b", "input": "c"}, {}, ["text", "input"]),
        ({"instruction": "a", "input": "b", "output": "c", "text": "d"}, {}, ["text"]),
        ({"question": "a", "answer": "b", "topic": "c", "prompt": "d"}, QUESTION, ["topic", "prompt"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": CHAT, "score": 1}, {}, ["messages", "score"]),
        ({"q": "a", "completion": "b", "history": [["c", "d"]]}, {"prompt": "q"}, []),
    ],
)
def test_fields_that_are_not_used(record, columns, ignored):
    assert ignored_fields(record, columns) == ignored


USER = {"role": "user", "content": "Which color?"}
BLUE, GREEN = ({"role": "assistant", "content": content} for content in ("Blue.", "Green."))
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "Again?"}


def parse_pair(record, **columns):
    pair = parse_example(record, "here", columns)
    assert isinstance(pair, ExampleGroup) and pair.location == "here"
    return pair


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "a ", "chosen": "b", "rejected": "c", "score_chosen": 3, "label": 0}, "a ", "b", "c"),
        ({"prompt": "a ", "chosen": "b", "rejected": "c", "completion": "d", "text": "e"}, "a ", "b", "c"),
        # hh-rlhf
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}, "",
         "\n\nHuman: Hi\n\nAssistant: Yes", "\n\nHuman: Hi\n\nAssistant: No"),
    ],
)  # fmt: skip
def test_pairs_of_texts(record, prompt, chosen, rejected):
    expected = ExampleGroup([PromptCompletion("here", prompt, text) for text in (chosen, rejected)])
    assert parse_pair(record) == expected


@pytest.mark.parametrize(
    ("record", "context", "chosen", "rejected"),
    [
        ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, [USER], [BLUE], [GREEN]),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER], [BLUE], [GREEN]),
        ({"chosen": [SYSTEM, USER, BLUE, AGAIN, BLUE], "rejected": [SYSTEM, USER, BLUE, AGAIN, GREEN]},
         [SYSTEM, USER, BLUE, AGAIN], [BLUE], [GREEN]),
        # One is the beginning of the other.
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE, AGAIN, GREEN]}, [USER], [BLUE], [BLUE, AGAIN, GREEN]),
        # Answers of several turns.
        ({"chosen": [USER, BLUE, AGAIN, BLUE], "rejected": [USER, GREEN, AGAIN, GREEN]},
         [USER], [BLUE, AGAIN, BLUE], [GREEN, AGAIN, GREEN]),
        # UltraFeedback binarized: the prompt also as text, and the chosen answer as a conversation.
        ({"prompt": "Which color?", "prompt_id": "1f", "chosen": [USER, BLUE], "rejected": [USER, GREEN],
          "messages": [USER, BLUE], "score_chosen": 8.5, "score_rejected": 7.0}, [USER], [BLUE], [GREEN]),
        ({"prompt": [USER], "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?\n", "chosen": [SYSTEM, USER, BLUE], "rejected": [SYSTEM, USER, GREEN]},
         [SYSTEM, USER], [BLUE], [GREEN]),
        # The prompt differs from the beginning of the answers.
        ({"prompt": [USER, BLUE], "chosen": [AGAIN, BLUE], "rejected": [AGAIN, GREEN]},
         [USER, BLUE, AGAIN], [BLUE], [GREEN]),
        # Texts and messages.
        ({"prompt": [USER], "chosen": "Blue.", "rejected": "Green."}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": [BLUE], "rejected": [GREEN]}, [USER], [BLUE], [GREEN]),
        ({"prompt": [USER], "chosen": BLUE, "rejected": GREEN}, [USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": "Blue.", "rejected": "Green.", "system": "Be brief."},
         [SYSTEM, USER], [BLUE], [GREEN]),
        ({"prompt": "Which color?", "chosen": "Blue.", "rejected": "Green.", "system": ""}, [USER], [BLUE], [GREEN]),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN], "system": "Be brief."}, [SYSTEM, USER], [BLUE], [GREEN]),
        # LLaMA-Factory
        ({"conversations": [{"from": "human", "value": "Which color?"}], "chosen": {"from": "gpt", "value": "Blue."},
          "rejected": {"from": "gpt", "value": "Green."}}, [USER], [BLUE], [GREEN]),
        ({"instruction": "Which", "input": "color?", "chosen": "Blue.", "rejected": "Green."},
         [USER | {"content": "Which\n\ncolor?"}], [BLUE], [GREEN]),
    ],
)  # fmt: skip
def test_pairs_of_conversations(record, context, chosen, rejected):
    pair = parse_pair(record)
    for side, answer in zip(pair.examples, (chosen, rejected), strict=True):
        assert isinstance(side, Conversation)
        assert side.messages == [*context, *answer]
        trained = [message["content"] for i, message in enumerate(side.messages) if side.message_has_loss(i)]
        assert trained == [message["content"] for message in answer if message["role"] == "assistant"]


def test_tools_and_flags_of_pairs():
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"prompt": "Which color?", "chosen": [BLUE], "rejected": "Green.", "tools": tools}
    assert [side.tools for side in parse_pair(record).examples] == [tools, tools]
    chosen = [USER, BLUE | {"weight": 0}, AGAIN, BLUE]
    pair = parse_pair({"chosen": chosen, "rejected": [USER, GREEN]})
    assert [pair.examples[0].message_has_loss(i) for i in range(4)] == [False, False, False, True]


def test_columns_of_pairs():
    orca = {"system": "Be brief.", "question": "Which color?", "chosen": "Blue.", "rejected": "Green."}
    pair = parse_pair(orca, prompt="question")
    assert pair.examples[0] == Conversation("here", [SYSTEM, USER, BLUE])
    assert parse_pair(orca, instruction="question") == pair
    texts = {"prompt": "a", "chosen_response": "b", "rejected_response": "c", "messages": [USER, BLUE]}
    expected = ExampleGroup([PromptCompletion("here", "a", "b"), PromptCompletion("here", "a", "c")])
    assert parse_pair(texts, chosen="chosen_response", rejected="rejected_response") == expected
    del texts["prompt"]
    implicit = ExampleGroup([PromptCompletion("here", "", "b"), PromptCompletion("here", "", "c")])
    assert parse_pair(texts, chosen="chosen_response", rejected="rejected_response") == implicit
    # Renaming a field to itself selects another format of the same record.
    assert parse_example(orca | {"messages": [USER, BLUE]}, "here", {"messages": "messages"}) == Conversation(
        "here", [SYSTEM, USER, BLUE]
    )
    assert parse_example(texts, "here", {"text": "chosen_response"}) == PromptCompletion("here", "", "b")
    invalid("'better', got 'system', ...: change --columns", parse_pair, orca, chosen="better")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "or 'chosen' and 'rejected', got 'prompt', 'chosen': name yours"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "expected an answer with text in 'chosen', got none"),
        ({"prompt": [USER], "chosen": [BLUE], "rejected": []}, "expected an answer with text in 'rejected', got none"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "expected 'chosen' to be a list of objects, got a number"),
        ({"chosen": "a b", "rejected": [BLUE]}, "expected a prompt, got 'chosen' and 'rejected' without a message"),
        ({"chosen": [USER, BLUE], "rejected": [AGAIN, GREEN]}, "expected a prompt, got"),
        ({"prompt": "Hi", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, "before the answer: remove"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "expected the field 'content'"),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "expected text in 'chosen'"),
    ],
)  # fmt: skip
def test_bad_pairs(record, words):
    assert invalid(words, parse_example, record, "here").startswith("here: ")
