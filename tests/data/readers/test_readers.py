"""JSON lines, JSON arrays, CSV and TSV."""

import csv
import gzip
import json
import re
from pathlib import Path

import pytest
from record_files import invalid, parse_blocks
from user_errors import refused

from odc_mpi.data.examples import Conversation, PromptCompletion
from odc_mpi.data.readers import text_files
from odc_mpi.data.readers.text_files import count_records, read_records
from odc_mpi.data.records.block import to_record
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example
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


ITEMS = [{"instruction": f"a{i} \u00e4\n", "input": "", "output": "x" * i, "n": [1.5, None, {}]} for i in range(50)]


def read_items(content, name):
    """Location and record of each item; for an invalid record, the error."""
    content = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    found = []
    for block in read_records(Path(name), lambda _: None):
        for location, value in block.records():
            try:
                found.append((location, to_record(value, location)))
            except InvalidRecordError as error:
                found.append((location, str(error)))
    assert count_records(Path(name)) == len(found)
    return found


@pytest.mark.parametrize("num_chars", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "without a suffix"])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays(monkeypatch, num_chars, name, indent):
    """However little is read at a time, and wherever that ends."""
    monkeypatch.setattr(text_files, "_READ_CHARS", num_chars)
    content = "\ufeff \n" + json.dumps(ITEMS, indent=indent, ensure_ascii=num_chars > 1) + "\n "
    found = read_items(content, name)
    assert [record for _, record in found] == ITEMS
    assert found[1][0] == f"{name}, element 2"
    assert read_items("[]", name) == read_items(" [\n]\n", name) == []


def test_elements_that_are_no_records_can_be_skipped(monkeypatch):
    monkeypatch.setattr(text_files, "_READ_CHARS", 2)
    found = [record for _, record in read_items('[{"a": 1}, 123, null, [[], {}], -Infinity, true]', "a.json")]
    assert found[0] == {"a": 1}
    kinds = ("a number", "null", "a list", "a number", "a boolean")
    assert [text.rpartition("got ")[2] for text in found[1:]] == list(kinds)


@pytest.mark.parametrize("num_chars", [1, 1 << 20])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"a": 1}, {broken, {"a": 2}]', "element 2: ... at character 13, 'broken, {\"a\": 2}]'); the file may"),
        ('[{"a": 1}, {"a": "x"y"}]', "element 2: ...delimiter at character 21"),
        ('[{"a": 1} \n{"a" : 2}]', "element 2: ...expected ',' in a JSON array, got '{' at character 12"),
        ('[{"a": 1}]\n[{"a": 2}]', "element 2: ...expected the end of the file in a JSON array, got '[' at"),
        ('[{"a": 1}, {"a": ', "element 2: ...Expecting value"),
        ('[{"a": 1}', "element 2: ...got the end of the file at character 10)"),
        ('[{"a": 1},]', "element 2: ...Expecting value at character 11, ']'"),
        ('[{"a": 1}, {"a": "x}]', "element 2: ...Unterminated string"),
        ('[{"a": ' + "9" * 5000 + "}]", "element 1: ...digits"),
        ("[" * 100_000, "element 1: ...recursion"),
    ],
    ids=range(10),
)
def test_damaged_arrays(monkeypatch, content, words, num_chars):
    monkeypatch.setattr(text_files, "_READ_CHARS", num_chars)
    refused(f"a.json, {words}", read_items, content, "a.json")


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("A.CSV.GZ", ",")])
def test_tables(name, delimiter, tmp_path):
    """As the module csv writes them, with line breaks, quotes and delimiters in cells."""
    rows = [{"prompt": f'{i},\t"x"\nnext \u00e4', "completion": "a\r\nb" * i} for i in range(30)]
    with (tmp_path / "written").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    found = read_items((tmp_path / "written").read_bytes(), name)
    assert [record for _, record in found] == rows
    assert [location for location, _ in found[:2]] == [f"{name}, line 2", f"{name}, line 4"]


def test_rows_with_other_numbers_of_cells():
    found = read_items("a,b\n1,2\n\n1\n1,2,3\n3,4\n", "a.csv")
    assert [location for location, _ in found] == [f"a.csv, line {n}" for n in (2, 4, 5, 6)]
    assert [found[0][1], found[3][1]] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert found[1][1] == "a.csv, line 4: expected 2 columns as in the first line, got 1"
    assert read_items("", "a.csv") == read_items("a,b\n", "a.csv") == []
    # Spreadsheets add empty columns.
    [(_, row)] = read_items("prompt,,completion,\nx,,y,\n", "a.csv")
    assert (row["prompt"], row["completion"]) == ("x", "y")
    [(_, bad), (location, good)] = read_items('a\n"x"y\nz\n', "a.csv")
    assert re.search(r"a.csv, line 2: expected a row in lines 2 to 2, got .*expected after", bad)
    assert (location, good) == ("a.csv, line 3", {"a": "z"})
    [(_, rest)] = read_items('a\n"x\ny\nz\n', "a.csv")
    assert rest == "a.csv, line 2: expected a row in lines 2 to 4, got unexpected end of data"
    refused("a.csv, line ...cannot be read ...name twice", read_items, "a,a\n1,2", "a.csv")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json.gz"])
def test_utf_16_is_an_error_of_the_file(name):
    refused(f"{name}: expected UTF-8, got UTF-16: convert it", read_items, '[{"text": "x"}]'.encode("utf-16"), name)


def test_bytes_that_are_not_utf_8_make_a_bad_record():
    for content, name in ((b'[{"text": "a"}, {"text": "\xff"}]', "a.json"), (b"text\na\n\xff\n", "a.csv")):
        (_, good), (location, bad) = read_items(content, name)
        assert parse_example(good, "")
        invalid(f"{location}: ...a byte that is not UTF-8", parse_example, bad, location)


def test_a_file_that_cannot_be_opened_is_not_called_damaged():
    Path("a.json").symlink_to("a.json")
    refused("cannot read a.json: Too many levels of symbolic links", list, read_records(Path("a.json"), lambda _: None))
