"""JSON arrays, CSV and TSV; JSON lines are in test_jsonl."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from odc_mpi.data.examples import InvalidRecordError, parse_example
from odc_mpi.data.readers import text_files
from odc_mpi.data.readers.text_files import count_records, read_records
from odc_mpi.errors import UserError

RECORDS = [{"instruction": f"a{i} \u00e4\n", "input": "", "output": "x" * i, "n": [1.5, None, {}]} for i in range(50)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(content: str | bytes, name: str) -> list[tuple[str, Any]]:
    """Location and record of each item; for an invalid record, the error."""
    content = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found: list[tuple[str, Any]] = []
    for block in read_records(Path(name), lambda: 1, lambda _: None):
        for location, record in block.records():
            try:
                found.append((location, record()))
            except InvalidRecordError as error:
                found.append((location, str(error)))
    assert count_records(Path(name)) == len(found)
    return found


@pytest.mark.parametrize("num_chars", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "without a suffix"])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays(monkeypatch: pytest.MonkeyPatch, num_chars: int, name: str, indent: int | None) -> None:
    """However little is read at a time, and wherever that ends."""
    monkeypatch.setattr(text_files, "_READ_CHARS", num_chars)
    content = "\ufeff \n" + json.dumps(RECORDS, indent=indent, ensure_ascii=num_chars > 1) + "\n "
    found = read(content, name)
    assert [record for _, record in found] == RECORDS
    assert found[1][0] == f"{name}, element 2"
    assert read("[]", name) == read(" [\n]\n", name) == []


def test_elements_that_are_no_records_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_READ_CHARS", 2)
    found = [record for _, record in read('[{"a": 1}, 123, null, [[], {}], -Infinity, true]', "a.json")]
    assert found[0] == {"a": 1}
    kinds = ("a number", "null", "a list", "a number", "a boolean")
    assert [text.rpartition("got ")[2] for text in found[1:]] == list(kinds)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"a": 1}, {"a": ', "element 2: cannot be read .Expecting value"),
        ('[{"a": 1}', "element 2: cannot be read .expected ']' in a JSON array, got the end of the file"),
        ('[{"a": 1} {"a": 2}]', "element 2: .*got '{'"),
        ('[{"a": "x}]', "element 1: .*Unterminated string"),
        ('[{"a": 1}]\n[{"a": 1}]', "element 2: .*expected the end of the file"),
        ("[" * 100_000, "element 1: .*recursion"),
        ('[{"a": ' + "9" * 5000 + "}]", "element 1: .*digits"),
    ],
)
def test_damaged_arrays(content: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        read(content, "a.json")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_tables(name: str, delimiter: str, tmp_path: Path) -> None:
    """As the module csv writes them, with line breaks, quotes and delimiters in cells."""
    rows = [{"prompt": f'{i},\t"x"\nnext \u00e4', "completion": "a\r\nb" * i} for i in range(30)]
    with (tmp_path / "written").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    found = read((tmp_path / "written").read_bytes(), name)
    assert [record for _, record in found] == rows
    assert [location for location, _ in found[:2]] == [f"{name}, line 2", f"{name}, line 4"]


def test_rows_with_other_numbers_of_cells() -> None:
    found = read("a,b\n1,2\n\n1\n1,2,3\n3,4\n", "a.csv")
    assert [location for location, _ in found] == [f"a.csv, line {n}" for n in (2, 4, 5, 6)]
    assert [found[0][1], found[3][1]] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert found[1][1] == "a.csv, line 4: expected 2 columns as in the first line, got 1"
    assert read("", "a.csv") == read("a,b\n", "a.csv") == []
    for content, words in (('a\n"x', "unexpected end"), ('a\n"x"y', "expected after"), ("a,a\n1,2", "name twice")):
        with pytest.raises(UserError, match=f"^a.csv, line .*cannot be read .*{words}"):
            read(content, "a.csv")


def test_bytes_that_are_not_utf_8_make_a_bad_record() -> None:
    for content, name in ((b'[{"text": "a"}, {"text": "\xff"}]', "a.json"), (b"text\na\n\xff\n", "a.csv")):
        (_, good), (location, bad) = read(content, name)
        assert parse_example(good, "")
        with pytest.raises(InvalidRecordError, match=f"^{location}: .*a byte that is not UTF-8"):
            parse_example(bad, location)
