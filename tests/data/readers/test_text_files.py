"""JSON arrays, CSV and TSV; JSON lines are in test_jsonl."""

import csv
import gzip
import json
import re
from pathlib import Path

import pytest
from record_files import invalid
from user_errors import refused

from odc_mpi.data.readers import text_files
from odc_mpi.data.readers.text_files import count_records, read_records
from odc_mpi.data.records.block import to_record
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example

pytestmark = pytest.mark.usefixtures("in_a_folder")

RECORDS = [{"instruction": f"a{i} \u00e4\n", "input": "", "output": "x" * i, "n": [1.5, None, {}]} for i in range(50)]


def read(content, name):
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
    content = "\ufeff \n" + json.dumps(RECORDS, indent=indent, ensure_ascii=num_chars > 1) + "\n "
    found = read(content, name)
    assert [record for _, record in found] == RECORDS
    assert found[1][0] == f"{name}, element 2"
    assert read("[]", name) == read(" [\n]\n", name) == []


def test_elements_that_are_no_records_can_be_skipped(monkeypatch):
    monkeypatch.setattr(text_files, "_READ_CHARS", 2)
    found = [record for _, record in read('[{"a": 1}, 123, null, [[], {}], -Infinity, true]', "a.json")]
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
    refused(f"a.json, {words}", read, content, "a.json")


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("A.CSV.GZ", ",")])
def test_tables(name, delimiter, tmp_path):
    """As the module csv writes them, with line breaks, quotes and delimiters in cells."""
    rows = [{"prompt": f'{i},\t"x"\nnext \u00e4', "completion": "a\r\nb" * i} for i in range(30)]
    with (tmp_path / "written").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    found = read((tmp_path / "written").read_bytes(), name)
    assert [record for _, record in found] == rows
    assert [location for location, _ in found[:2]] == [f"{name}, line 2", f"{name}, line 4"]


def test_rows_with_other_numbers_of_cells():
    found = read("a,b\n1,2\n\n1\n1,2,3\n3,4\n", "a.csv")
    assert [location for location, _ in found] == [f"a.csv, line {n}" for n in (2, 4, 5, 6)]
    assert [found[0][1], found[3][1]] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert found[1][1] == "a.csv, line 4: expected 2 columns as in the first line, got 1"
    assert read("", "a.csv") == read("a,b\n", "a.csv") == []
    # Spreadsheets add empty columns.
    [(_, row)] = read("prompt,,completion,\nx,,y,\n", "a.csv")
    assert (row["prompt"], row["completion"]) == ("x", "y")
    [(_, bad), (location, good)] = read('a\n"x"y\nz\n', "a.csv")
    assert re.search(r"a.csv, line 2: expected a row in lines 2 to 2, got .*expected after", bad)
    assert (location, good) == ("a.csv, line 3", {"a": "z"})
    [(_, rest)] = read('a\n"x\ny\nz\n', "a.csv")
    assert rest == "a.csv, line 2: expected a row in lines 2 to 4, got unexpected end of data"
    refused("a.csv, line ...cannot be read ...name twice", read, "a,a\n1,2", "a.csv")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json.gz"])
def test_utf_16_is_an_error_of_the_file(name):
    refused(f"{name}: expected UTF-8, got UTF-16: convert it", read, '[{"text": "x"}]'.encode("utf-16"), name)


def test_bytes_that_are_not_utf_8_make_a_bad_record():
    for content, name in ((b'[{"text": "a"}, {"text": "\xff"}]', "a.json"), (b"text\na\n\xff\n", "a.csv")):
        (_, good), (location, bad) = read(content, name)
        assert parse_example(good, "")
        invalid(f"{location}: ...a byte that is not UTF-8", parse_example, bad, location)


def test_a_file_that_cannot_be_opened_is_not_called_damaged():
    Path("a.json").symlink_to("a.json")
    refused("cannot read a.json: Too many levels of symbolic links", list, read_records(Path("a.json"), lambda _: None))
