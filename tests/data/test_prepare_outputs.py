"""Files that `prepare` replaces, and those that it never touches; disks that fill up; odd names and numbers."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from user_errors import refused

from odc_mpi.cli.main import main
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.prepare import PrepareOptions, prepare

LINE = '{"text": "abc abc"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with two sources, a folder of sources and a data set of a.jsonl."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "shards/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINE)
    make(["a.jsonl"], "a.h5")
    return tmp_path


def make(sources, out, **options):
    return prepare(sources, Path(out), PrepareOptions(**{"vocab_size": 260, **options})).describe()


def content(folder):
    paths = {str(path): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


def changes_nothing(words, *arguments, **options):
    """Check that a call is refused and changes nothing."""
    before = content(Path.cwd())
    refused(words, make, *arguments, **options)
    assert content(Path.cwd()) == before


@pytest.mark.parametrize(
    ("out", "create", "words"),
    [
        ("notes.txt", lambda: Path("notes.txt").write_text("notes"), "another file, or a damaged one"),
        ("empty.h5", lambda: Path("empty.h5").touch(), "another file, or a damaged one"),
        ("other.h5", lambda: h5py.File("other.h5", "w").close(), "another file, or a damaged one"),
        ("shards", None, "a directory"),
        ("fifo", lambda: os.mkfifo("fifo"), "a device, FIFO or socket"),
        ("/dev/null", None, "a device, FIFO or socket"),
        ("dangling", lambda: Path("dangling").symlink_to("nowhere"), "a link to a file that does not exist"),
        ("loop", lambda: Path("loop").symlink_to("loop"), "symbolic links"),
        ("a.jsonl/x.h5", None, "a file in a writable folder as --out, got 'a.jsonl/x.h5' (Not a directory)"),
        ("x" * 300, None, "too long"),
        ("a.jsonl", None, "that is not a SOURCE"),
        ("again", lambda: os.link("a.jsonl", "again"), "that is not a SOURCE"),
        ("shards/d.jsonl", None, "in the folder 'shards'"),
        ("a.h5", None, "other than that of --tokenizer"),
        ("notes.h5", lambda: Path("notes.eval.h5").write_text("notes"), "notes.eval.h5"),
    ],
)
def test_only_data_sets_are_replaced(folder, out, create, words):
    if create is not None:
        create()
    options = {"tokenizer": Path("a.h5"), "eval_fraction": 0.5, "force": True}
    changes_nothing(f"{words}...: change --out", ["a.jsonl", "shards"], out, **options)


def test_three_thousand_sources(folder):
    """More than may be open at the same time; the report does not list them all."""
    names = [f"shards/{i}.jsonl" for i in range(3000)]
    for name in names:
        (folder / name).write_text(LINE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        lines = make(names, "many.h5").splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lines[0].startswith("many.h5: 3,000 sequences") and max(map(len, lines)) < 320


def test_data_of_other_sources_are_replaced_on_request(folder):
    """A link to a data set remains a link."""
    (folder / "link.h5").symlink_to("a.h5")
    for out in ("a.h5", "link.h5"):
        changes_nothing("made from other sources", ["b.jsonl"], out)
    make(["b.jsonl"], "link.h5", force=True)
    assert (folder / "link.h5").is_symlink() and not (folder / "a.h5").is_symlink()
    assert "up to date" in make(["b.jsonl"], "a.h5")
    changes_nothing("made from other sources", ["a.jsonl"], "a.h5")


def test_the_same_sources_with_other_options_are_prepared_again(folder, capsys):
    call = ["prepare", str(folder / "a.jsonl"), "--out", "a.h5", "--vocab-size"]
    line = "a.h5: preparing it again (it has other options, versions or contents, or is damaged)"
    for size, count in (("260", 0), ("261", 1), ("261", 0)):
        assert main([*call, size]) == 0
        assert capsys.readouterr().err.count(line) == count
    (folder / "a.jsonl").write_text(LINE * 2)
    assert main([*call, "261"]) == 0
    assert capsys.readouterr().err.count(line) == 1
    with h5py.File("a.h5") as dataset:
        offset = dataset["tokens"].id.get_chunk_info(0).byte_offset
    with Path("a.h5").open("r+b") as file:
        file.seek(offset)
        file.write(b"damage")
    assert main([*call, "261"]) == 0
    assert capsys.readouterr().err.count(line) == 1
    Dataset("a.h5").close()


def test_held_out_sequences_of_an_earlier_call_are_named_once_they_are_trained(folder, capsys):
    (folder / "a.jsonl").write_text("".join(f'{{"text": "abc {i}"}}\n' for i in range(40)))
    call = ["prepare", str(folder / "a.jsonl"), "--out", "a.h5", "--vocab-size", "260"]
    line = "a.eval.h5 was held out by an earlier call, but a.h5 now contains its sequences: remove it"
    for options, count in ((("--eval-fraction", "0.3"), 0), ((), 1)):
        assert main([*call, *options]) == 0
        assert capsys.readouterr().err.count(line) == count


@pytest.mark.parametrize(
    "options",
    [
        *({"vocab_size": size} for size in (-1, 259, 2**20 + 1, 2**70)),
        *({"num_proc": number} for number in (-1, 0, 10**9)),
        *({"eval_fraction": fraction} for fraction in (-0.1, 1.0, float("nan"), float("inf"))),
        *({"max_length": length} for length in (-(2**70), 0, 1)),
    ],
    ids=str,
)
def test_numbers_that_are_out_of_range(folder, options):
    (name,) = options
    changes_nothing(f"expected --{name.replace('_', '-')} ", ["a.jsonl"], "new.h5", **options)


def test_names_that_are_not_utf8(folder, capfdbinary):
    pytest.importorskip("pyarrow.parquet").write_table(
        sys.modules["pyarrow"].table({"text": ["abc abc"]}), folder / "t.parquet"
    )
    source, table, out = (os.fsdecode(b"\xff" + name) for name in (b".jsonl", b".parquet", b".h5"))
    Path("b.jsonl").rename(source)
    Path("t.parquet").rename(table)
    make([source, table], out)
    assert main(["prepare", source, table, "--out", out, "--vocab-size", "260"]) == 0
    assert b"\\udcff.h5: up to date" in capfdbinary.readouterr().out
    assert main(["prepare", table, "--out", "new.h5", "--tokenizer", out]) == 0
    assert main(["prepare", os.fsdecode(b"\xff"), "--out", "x.h5"]) == 2


def test_a_source_that_vanishes(folder, monkeypatch):
    monkeypatch.setattr("odc_mpi.data.prepare.check_outputs", lambda *_: (folder / "b.jsonl").unlink() or [])
    refused("b.jsonl", make, ["b.jsonl"], "b.h5")
    assert not (folder / "b.h5").exists()


TOKENIZER = "cannot write the tokenizer to a temporary directory ("
OUTPUT = "cannot write 'a.h5': File too large: free space, or change --out"


@pytest.mark.parametrize(("limit", "problem"), [(100, TOKENIZER), (4096, TOKENIZER), (200_000, OUTPUT)])
def test_a_limit_of_the_file_size(folder, limit, problem):
    """The call ends with one line, and leaves the earlier file and nothing else."""
    before = content(folder)
    call = [sys.executable, "-m", "odc_mpi", "prepare", "a.jsonl", "--vocab-size", "261", "--out", "a.h5"]
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, **limits)
    (line,) = [line for line in done.stderr.splitlines() if "odc-mpi: error" in line]
    assert line.startswith(f"odc-mpi: error: {problem}") and "File too large" in line
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert content(folder) == before
