"""The forms of published data sets; those of JSON lines are in test_jsonl."""

import json

import pytest

from odc_mpi.data.examples import Conversation
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example

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
        with pytest.raises(InvalidRecordError, match=rf"^here: expected .*'tools' .*{words}"):
            parse_chat({"messages": CHAT, "tools": bad})


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
        ({"messages": [CHAT[0] | {"weight": 0.5}]}, "'weight' to be 0 or 1, got 0.5"),
        ({"messages": [CHAT[0] | {"train": "no"}]}, "'train' to be false or true, got 'no'"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "expected JSON text in a 'function_call'"),
        ({"conversations": [{"from": "function_call", "value": "[3]"}]}, "an object with 'name', got"),
        ({"instruction": "x", "output": 3}, "expected 'output' to be a string"),
        ({"instruction": "x"}, "or 'conversations', or 'instruction' and 'output'"),
        ({"messages": CHAT, "system": 3}, "expected 'system' to be a string"),
        ({"prompt": CHAT, "completion": "x"}, "expected 'prompt' to be a string, got a list"),
        ({"prompt": "x", "completion": "y", "label": False}, "got one with 'label' false: remove the record"),
    ],
)
def test_bad_records(record, words):
    with pytest.raises(InvalidRecordError, match=words) as caught:
        parse_example(record, "here")
    assert str(caught.value).startswith("here: ")
