import gzip
import json
from pathlib import Path

import pytest
from record_files import parse_blocks
from user_errors import refused

from odc_mpi.data.examples import Conversation, PromptCompletion
from odc_mpi.data.readers.text_files import read_records
from odc_mpi.data.records.schema import check_columns

pytestmark = pytest.mark.usefixtures("in_a_folder")

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def read_bytes(content, name="a.jsonl", columns=None):
    Path(name).write_bytes(content)
    return parse_blocks(read_records(Path(name), lambda _: None), columns)


def line(record):
    return json.dumps(record).encode() + b"\n"


def test_the_first_of_three_shapes_counts():
    record = {"text": "ä", "prompt": "a", "completion": "b"}
    for fields, expected in (
        ({"messages": CHAT, "id": 1}, Conversation("a.jsonl, line 1", CHAT)),
        (record | {"messages": CHAT}, Conversation("a.jsonl, line 1", CHAT)),
        (record, PromptCompletion("a.jsonl, line 1", "a", "b")),
        ({"prompt": "a", "text": "ä"}, PromptCompletion("a.jsonl, line 1", "", "ä")),
    ):
        assert read_bytes(line(fields)) == [expected]


def test_renamed_fields_are_the_only_ones():
    columns = {"prompt": "question", "completion": "answer"}
    record = {"question": "q", "answer": "a", "messages": CHAT, "text": "t"}
    assert read_bytes(line(record), columns=columns) == [PromptCompletion("a.jsonl, line 1", "q", "a")]
    both = line({"prompt": "a", "completion": "b"})
    refused("'question'...got 'prompt', 'completion'...--columns", read_bytes, both, columns=columns)
    refused("'answer'", read_bytes, line({"question": "q", "completion": "no"}), columns=columns)
    assert read_bytes(line({"prompt": "q", "answer": "a"}), columns={"completion": "answer"})
    assert read_bytes(line({"messages": CHAT, "body": "x"}), columns={"text": "body"}) == [
        PromptCompletion("a.jsonl, line 1", "", "x")
    ]
    columns = {"messages": "dialog", "system": "sys"}
    [chat] = read_bytes(line({"dialog": CHAT, "sys": "S", "prompt": "no"}), columns=columns)
    assert isinstance(chat, Conversation) and chat.messages == [{"role": "system", "content": "S"}, *CHAT]
    for names, words in (
        ({"prompt": "q", "text": "t"}, "fields of one format"),
        ({"question": "prompt"}, "a field among prompt, ...got question=prompt"),
        ({"text": ""}, "got text="),
    ):
        refused(f"--columns: ...{words}", check_columns, names)


def test_blank_lines_count_but_are_skipped():
    """A byte order mark and the line ends of Windows are no part of a record."""
    content = b'\xef\xbb\xbf{"text": "x"}\r\n\n  \r\n{"text": "y"}'
    expected = [PromptCompletion(f"a.jsonl, line {number}", "", text) for number, text in ((1, "x"), (4, "y"))]
    assert read_bytes(content) == expected


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (b"{", "invalid JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"text": "\xff"}', "expected UTF-8, got byte 0xff"),
        (b"[1]", "expected a JSON object, got a list"),
        (b"null", "got null"),
        (b"{}", "got no fields"),
        (line({"question": "q", "ans\nwer": "a"}), r"got 'question', 'ans\nwer': name yours with --columns"),
        (line({"prompt": 3, "completion": "b"}), "expected 'prompt' to be a string, got a number"),
        (line({"prompt": "a", "completion": None}), "expected 'completion' to be a string, got null"),
        (line({"text": ["a"]}), "expected 'text' to be a string, got a list"),
        (line({"text": "a\ud800"}), "lone surrogate at 1"),
        (line({"messages": "hi"}), "expected 'messages' to be a list of objects, got a string"),
        (line({"messages": ["hi"]}), "expected each of 'messages' to be an object, got a string"),
        (line({"messages": [{"role": 1, "content": "x"}]}), "'role'"),
        (line({"messages": [CHAT[0], {"role": "assistant"}]}), "'content'"),
        (line({"messages": [{"role": "user", "content": 3}]}), "expected 'content' to be a string, got a number"),
        (line({"messages": [{"role": "user", "content": ["x"]}]}), "of the type 'text' in 'content', got a string"),
        (line({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "got 'image'"),
        (line({"messages": [{"role": "user", "content": [{"type": "text"}]}]}), "expected the field 'text'"),
        (line({"messages": [{"role": "user", "content": "\ud800"}]}), "lone surrogate at 0"),
        (b'{"text": "a\0b"}', "invalid JSON (Invalid control character"),
        (bytes(50), "invalid JSON (Expecting value"),
        ('{"text": "x"}'.encode("utf-16"), "expected UTF-8, got byte 0xff at 0"),
    ],
)
def test_bad_lines_are_named(bad, expected):
    content = line({"text": "good"}) + b"\n" + bad.removesuffix(b"\n") + b"\n" + line({"text": "good"})
    assert refused(f"...{expected}", read_bytes, content).startswith("a.jsonl, line 3: ")


def test_empty_texts_are_legal_and_may_have_no_loss_tokens():
    silent = {"role": "assistant", "content": ""}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    for messages, has_loss in (
        (CHAT, True),
        ([{"role": "system", "content": ""}, *CHAT], True),
        ([{"role": "user", "content": None}, *CHAT, silent], True),
        ([CHAT[0], call], True),
        ([CHAT[0], silent], False),
        ([silent, CHAT[0]], False),
        (CHAT[:1], False),
        ([], False),
    ):
        [chat] = read_bytes(line({"messages": messages}))
        assert isinstance(chat, Conversation) and chat.has_loss == has_loss, messages
        assert all(isinstance(message["content"], str) and "name" not in message for message in chat.messages)
    content = line({"prompt": "", "completion": "b"}) + line({"prompt": "a", "completion": ""}) + line({"text": ""})
    assert [example.has_loss for example in read_bytes(content)] == [True, False, False]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    [chat] = read_bytes(line({"messages": [CHAT[0], {"role": "assistant", "content": parts}]}))
    assert isinstance(chat, Conversation) and chat.messages == CHAT


def test_messages_stay_short_whatever_a_line_holds():
    long = "x" * 10_000
    for record in (
        {long: 1},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"messages": [{"role": "user", "content": "x", "weight": long}]},
    ):
        assert len(refused("", read_bytes, line(record))) < 500


def test_damaged_gzip_files():
    records = b"".join(line({"text": str(i) * 50}) for i in range(1000))
    whole = gzip.compress(records)
    refused("the file may be damaged", read_bytes, whole[:-20], "a.gz")
    refused("a.gz, line 1: cannot be read", read_bytes, records, "a.gz")
    wrong_checksum = whole[:-8] + bytes(4) + whole[-4:]
    refused("CRC", read_bytes, wrong_checksum, "a.gz")
    # Behind the header's 10 bytes come the bits with the first block's type; type 3 is invalid.
    refused("cannot be read", read_bytes, whole[:10] + bytes([whole[10] | 0b110]) + whole[11:], "a.gz")
