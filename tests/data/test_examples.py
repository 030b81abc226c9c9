"""The forms of published data sets; those of JSON lines are in test_jsonl."""

import json
from typing import Any

import pytest

from odc_mpi.data.examples import Conversation, FieldNames, InvalidRecordError, parse_example

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def parse_chat(record: dict[str, Any]) -> Conversation:
    example = parse_example(record, "here", FieldNames())
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
        ({"messages": [SYSTEM, *CHAT], "system": "Another."}, [SYSTEM, *CHAT]),
        ({"instruction": "Hi", "output": "Hello", "system": "Be brief."}, [SYSTEM, *CHAT]),
    ],
)  # fmt: skip
def test_forms(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    chat = parse_chat(record)
    assert chat.messages == messages and chat.has_loss and chat.tools is None


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    for given, expected in ((tools, tools), (json.dumps(tools), tools), ([], None), ("", None), ("[]", None)):
        assert parse_chat({"messages": CHAT, "tools": given}).tools == expected
    for bad, words in (("[{", "JSON text"), ({"a": 1}, "got an object"), (["f"], "list of objects")):
        with pytest.raises(InvalidRecordError, match=rf"^here: expected 'tools' .*{words}"):
            parse_chat({"messages": CHAT, "tools": bad})


def test_only_the_completion_of_two_lists_of_messages_is_trained() -> None:
    chat = parse_chat({"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:], "system": "Be brief."})
    assert chat.messages == [SYSTEM, *CHAT, *CHAT]
    assert [chat.message_has_loss(i) for i in range(5)] == [False, False, False, False, True]
    assert not parse_chat({"prompt": CHAT, "completion": []}).has_loss


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "got 'narrator'"),
        ({"conversations": [{"from": "human"}]}, "expected the field 'content'"),
        ({"conversations": "Hi"}, "expected 'conversations' to be a list"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "before the assistant's first"),
        ({"instruction": "x", "output": 3}, "expected 'output' to be a string"),
        ({"instruction": "x"}, "or 'conversations', or 'instruction' and 'output'"),
        ({"messages": CHAT, "system": 3}, "expected 'system' to be a string"),
        ({"prompt": CHAT, "completion": "x"}, "expected 'prompt' to be a string, got a list"),
    ],
)
def test_bad_records(record: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRecordError, match=words) as caught:
        parse_example(record, "here", FieldNames())
    assert str(caught.value).startswith("here: ")
