"""Data sets of the library `datasets`."""

import json
from pathlib import Path

import pytest
from record_files import parse_blocks
from user_errors import refused

from odc_mpi.data.examples import Conversation
from odc_mpi.data.readers import arrow
from odc_mpi.data.readers.arrow import is_hub_name
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.sources import find_sources

pytestmark = pytest.mark.usefixtures("in_a_folder")

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", "weight": 0}], "id": 1},
    {"messages": [{"role": "user", "content": "f?"}, {"role": "assistant", "tool_calls": [CALL]}]},
] * 200


def test_names_on_the_hub():
    refused("expected a directory of save_to_disk", find_sources, ["stdlib"], "test")
    assert not any(map(is_hub_name, ("a", "a/b/c/d", "/a/b", "a//b", "a b/c", "./a", "../a/b", "~/a")))


def test_a_mistyped_path_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr(arrow, "load", None)
    Path("mine").mkdir()
    Path("mine/chats.jsonl").write_text("")
    for name in ("mine/chat.jsonl", "./mine/chats.json", "mine/chats", "mine/../mine/chats.jsonl.gz"):
        refused(f"{name!r}: no such file or folder (did you mean chats.jsonl?): give", find_sources, [name])
    for name in ("data/chat.csv", "data/a.txt.gz", "./chat", "../a/b", "mine/CHATS.JSONL", "mine/other/data"):
        refused(f"{name!r}: no such file or folder: give", find_sources, [name])
    refused(f"{str(Path.home() / 'a/b')!r}: no such file or folder: give", find_sources, ["~/a/b"])


def test_saved_data_sets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk("saved")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk("splits")
    wanted = [parse_example(json.loads(json.dumps(row)), "") for row in ROWS]
    for name, split, expected in (("saved", None, wanted), ("splits", None, wanted), ("splits", "test", wanted[1:2])):
        [source] = find_sources([name], split)
        assert source.count() == len(expected) and source.stamps() and not source.is_folder
        done = []
        examples = parse_blocks(source.read(done.append))
        for example, other in zip(examples, expected, strict=True):
            assert isinstance(example, Conversation) and isinstance(other, Conversation)
            assert (example.messages, example.context) == (other.messages, other.context)
        assert examples[-1].location == f"{name}, row {len(expected)}"
        assert 0 < sum(done) <= source.num_bytes
    refused("--split: expected one of train, test for 'splits', got 'dev'", find_sources, ["splits"], "dev")
    Path("saved/data-00000-of-00001.arrow").write_bytes(b"ARROW")
    refused("the data set 'saved' cannot be loaded", find_sources, ["saved"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, split: data.select([0]) if split == "train" else None)
    [source] = find_sources(["owner/name/main"])
    assert (source.origin, source.count()) == ("owner/name/main", 1)
