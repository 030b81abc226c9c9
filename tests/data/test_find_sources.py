"""Files and folders, data sets of the library `datasets`, and how they are mixed."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from record_files import parse_blocks
from user_errors import refused

from odc_mpi.data.examples import Conversation, PromptCompletion
from odc_mpi.data.readers import arrow
from odc_mpi.data.readers.arrow import is_hub_name
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.sources import find_sources, mix

pytestmark = pytest.mark.usefixtures("in_a_folder")


def write(name, texts):
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".zst"):
        zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        half = content.index(b"\n") + 1  # two frames, as of concatenated files
        content = b"".join(zstd.compress(part) for part in (content[:half], content[half:]))
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content)
    return name


def table(name, rows, **options):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), name, **options)
    return name


def take_all(mixture):
    return [example.completion for example in parse_blocks(block for _, block in mixture.read(lambda _: None))]


def read_all(*words):
    return take_all(mix(find_sources(words), 0, "first_exhausted"))


def test_files_and_folders_in_order():
    write("d/2.jsonl.gz", ["c", "d"])
    write("d/10.jsonl", ["a"])
    write("d/30.ndjson.zst", ["e", "f"])
    table("d/4.parquet", [{"text": "g"}, {"text": "h"}])
    Path("d/5.json").write_text('[{"text": "i"}]')
    Path("d/6.csv").write_text("text\nj\n")
    for ignored in ("d/README.md", "d/.hidden.jsonl", "d/state.json"):
        write(ignored, ["no"])
    write("alone.txt", ["x"])
    assert read_all("alone.txt", "d") == ["x", *"acdefghij"]
    _, folder = find_sources(["alone.txt", "d"])
    assert folder.describe_folder() == "d: 6 files, 10.jsonl, 2.jsonl.gz, 30.ndjson.zst, 4.parquet, 5.json, 6.csv"
    Path("empty").mkdir()
    refused("no file in the folder 'empty'", read_all, "empty")


def test_a_colon_in_a_name_is_no_weight():
    write("a:0.5", ["colon"])
    write("b", ["b"])
    assert [(source.name, source.weight) for source in find_sources(["a:0.5:2", "b:1"])] == [("a:0.5", 2), ("b", 1)]
    assert [source.weight for source in find_sources(["a:0.5", "b"])] == [None, None]
    refused("weight above 0", read_all, "b:0")
    refused("weight above 0", read_all, "b:-1", "b:nan")
    refused("got none for 'b': write b:WEIGHT", read_all, "a:0.5:1", "b")
    refused("'b:x': no such file or folder", read_all, "b:x")


def test_weights_are_shares_drawn_by_the_seed():
    write("a.jsonl", [f"a{i}" for i in range(100)])
    write("b.jsonl.gz", [f"b{i}" for i in range(1000)])
    table("c.parquet", [{"text": f"c{i}"} for i in range(1000)], row_group_size=300)
    sources = find_sources(["a.jsonl:0.2", "b.jsonl.gz:0.5", "c.parquet:0.3"])
    first = take_all(mix(sources, 0, "first_exhausted"))
    assert [sum(text[0] == name for text in first) for name in "abc"] == [100, 250, 150]
    assert len(set(first)) == 500, "nothing twice"
    assert first == sorted(first, key=lambda text: (text[0], int(text[1:])))
    assert 300 < sum(int(text[1:]) for text in first if text[0] == "b") / 250 < 700, "from all of the file"
    assert take_all(mix(sources, 0, "first_exhausted")) == first
    assert take_all(mix(sources, 1, "first_exhausted")) != first
    every = take_all(mix(sources, 0, "all_exhausted"))
    assert [sum(text[0] == name for text in every) for name in "abc"] == [667, 1667, 1000]
    assert {f"{n}{i}" for n, count in (("a", 100), ("b", 1000), ("c", 1000)) for i in range(count)} == set(every)
    assert {every.count(f"a{i}") for i in range(100)} == {6, 7}
    write("none.jsonl", [])
    refused("'none.jsonl' contains no examples", read_all, "none.jsonl:1", "a.jsonl:1")
    for little in ("1e-9", "1e-320"):
        both = find_sources([f"a.jsonl:{little}", "b.jsonl.gz:1"])
        refused("more than 1,000 times...'b.jsonl.gz'", mix, both, 0, "all_exhausted")


def test_rows_are_as_lines():
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "name": "Bot"}]
    rows = [
        {"messages": chat, "tools": json.dumps(tools), "text": None},
        {"messages": None, "tools": None, "text": "x"},
    ]
    [source] = find_sources([table("a.parquet", rows)])
    examples = parse_blocks(source.read(lambda _: None))
    assert examples == [Conversation("a.parquet, row 1", chat, tools), PromptCompletion("a.parquet, row 2", "", "x")]
    Path("bad.parquet").write_bytes(b"PAR1 or not")
    refused("bad.parquet: cannot be read", read_all, "bad.parquet")


def test_times_in_rows_are_left_out():
    """Python has no type for nanoseconds, which pandas writes by default: a structure with them needs pandas."""
    pyarrow = pytest.importorskip("pyarrow")
    times = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    within = pyarrow.StructArray.from_arrays([times], ["at"])
    write_table = pytest.importorskip("pyarrow.parquet").write_table
    write_table(pyarrow.table({"text": ["a", "b"], "at": times}), "a.parquet")
    assert read_all("a.parquet") == ["a", "b"]
    views = pyarrow.array(["a", "b"], pyarrow.string_view())  # the type that Arrow's Rust library writes
    write_table(pyarrow.table({"text": views, "meta": within}), "b.parquet")
    if importlib.util.find_spec("pandas"):
        assert read_all("b.parquet") == ["a", "b"]
    else:
        refused("b.parquet, rows 1 to 2: cannot be read", read_all, "b.parquet")


def test_damaged_zstandard():
    """Also truncated in the second of two frames, or after a full line, where no line is incomplete."""
    texts = [f"{i} {i * i}" for i in range(50_000)]
    whole = Path(write("c.jsonl.zst", texts)).read_bytes()
    assert read_all("c.jsonl.zst") == texts
    for content, words in (
        (whole[: len(whole) // 2], "ended before the end-of-stream marker"),
        (whole[:-1], "ended before the end-of-stream marker"),
        (whole[:20] + bytes(50), "the file may be damaged"),
        (b'{"text": "x"}\n', "the file may be damaged"),
    ):
        Path("c.jsonl.zst").write_bytes(content)
        refused(words, read_all, "c.jsonl.zst")


def test_missing_libraries_are_named(monkeypatch):
    write("b.jsonl.zst", ["x"])
    table("a.parquet", [{"text": "x"}])
    for name in ("pyarrow", "backports.zstd", "compression.zstd", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        Path("saved", name).write_text("{}")
    for source in ("saved", "openai/gsm8k/main", "owner/name:0.5"):
        refused("pip install 'odc_mpi[datasets]'", read_all, source)
    refused("pip install 'odc_mpi[parquet]'", read_all, "a.parquet")
    refused("pip install 'odc_mpi[zstd]'", read_all, "b.jsonl.zst")


def test_a_file_is_read_in_batches(monkeypatch):
    monkeypatch.setattr(arrow, "_BATCH_ROWS", 7)
    table("a.parquet", [{"text": str(i)} for i in range(50)])
    [source] = find_sources(["a.parquet"])
    advanced = []
    blocks = list(source.read(advanced.append))
    assert len(blocks) == 8 and sum(advanced) <= source.num_bytes
    places = [where for block in blocks for where, _ in block.records()]
    assert places == [f"a.parquet, row {i + 1}" for i in range(50)]


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
