"""Inputs of `odc-mpi prepare`: records, compressed and Parquet files, options, outputs that are a user's files."""

import gzip
import json
import os
import resource
import shutil

import h5py
from case import Case, change, damaged_dataset, mutation, prepare, write

FAMILY = "a prepare"
RIGHT = (0, 2)
_GOOD = '{"prompt": "one", "completion": "two"}\n' * 3
#: Lines among good ones. Readers refuse others one by one in tests/data/readers and tests/data/pairs.
RECORDS = (
    *("", "{]", "\x00", "\ufeff{}", '{"a":' * 5000, '{"text": "\\u0000"}', '{"text": "a", "text": "b"}'),
    *('{"prompt": {}, "completion": "a"}', '{"messages": [{"role": "nobody", "content": "a"}]}', '{"messages": [{}]}'),
    *('{"messages": [{"role": "assistant", "content": null}]}', '{"instruction": null, "output": "b", "input": null}'),
    *('{"messages": [{"role": "assistant", "content": "a"}], "tools": 1}', '{"conversations": [{"from": "x"}]}'),
    *('{"messages": [{"role": "assistant", "content": "a"}], "tools": "["}', '{"chosen": {}, "rejected": {}}'),
    *('{"text": "' + "long " * 100_000 + '"}', '{"x": ' + "9" * 5000 + ', "text": "a"}'),
    '{"instruction": "a", "input": 1, "chosen": "b", "rejected": [{"from": "gpt", "value": "c"}], "system": 1}',
)
#: Contents of whole files.
FILES = {
    "empty": b"",
    "a newline": b"\n",
    "zeros": bytes(4096),
    "gzip without the suffix": gzip.compress(_GOOD.encode()),
    "a truncated JSON list": json.dumps([{"text": "a"}] * 3).encode()[:-9],
    "CSV with an open quote": b'prompt,completion\na,"b\n',
    "HTML": b"<html></html>\n",
}
_NUMBERS = ("", "x", "nan", "inf", "-inf", "-1", "0", "1", "0.5", "1e3", "1180591620717411303424", "0x10", "\uff11")
OPTIONS = {
    **dict.fromkeys(("--vocab-size", "--max-length", "--seed", "--eval-fraction"), _NUMBERS),
    "--num-proc": ("", "x", "nan", "-1", "0", "0.5"),
    "--tokenizer": ("", ".", "missing", "notes.txt", "a.jsonl", "data.h5", "run", "model", "/dev/null", "full"),
    "--overlong": ("", "x", "drop", "split"),
    "--bad-lines": ("", "x", "skip"),
    "--columns": ("", "\udcff", "prompt=missing", "prompt=completion", "text", "text=\n", "text=a,messages=b", "a=b"),
    "--split": ("", "train"),
    "--stopping-strategy": ("", "x", "all_exhausted"),
    "--nothing": ("", "1"),
}
SOURCES = (
    *(("missing.jsonl",), ("",), (".",), ("full",), ("/",), ("/dev/null",), ("a.jsonl", "a.jsonl"), ("notes.txt",)),
    *(("data.h5",), ("run",), ("model",), ("a.jsonl:",), ("a.jsonl:x",), ("a.jsonl:nan",), ("a.jsonl:-1",)),
    *(("a.jsonl:0",), ("a.jsonl:0.5", "b.jsonl"), ("a.jsonl:1e300", "b.jsonl:1e-300"), ("a.jsonl:inf", "b.jsonl:1")),
    *(("stdlib:0",), ("a.jsonl", "stdlib:x"), ("c.jsonl.gz",), ("d.parquet",), ("x" * 300,), ("x\ny",), ("--",)),
    *(("a.jsonl:0.7", "b.jsonl:0.3"), ("a.jsonl:1e-9", "b.jsonl:1"), ("link",), ("loop",), ("pipe",), ("unreadable",)),
)


def cases(rng):
    yield Case(FAMILY, "undamaged", prepare(), codes=(0,))
    for number, record in enumerate(RECORDS):
        for options in ((), ("--bad-lines", "skip")):
            name = f"record {number} {' '.join(options)}: {record[:60]!r}"
            damage = write("a.jsonl", _GOOD + record + "\n" + _GOOD)
            yield Case(FAMILY, name, prepare("a.jsonl", options=options), damage, RIGHT)
    for name, content in FILES.items():
        yield Case(FAMILY, f"source: {name}", prepare("a.jsonl"), write("a.jsonl", content), RIGHT)
        yield Case(FAMILY, f"as a table: {name}", prepare("a.csv"), write("a.csv", content), RIGHT)
        yield Case(FAMILY, f"gzip of {name}", prepare("c.jsonl.gz"), write("c.jsonl.gz", gzip.compress(content)), RIGHT)
    for source, count in {"a.jsonl": 30, "c.jsonl.gz": 15, "d.parquet": 25}.items():
        for _ in range(count):
            name, apply = mutation(rng)
            yield Case(FAMILY, f"{source}: {name}", prepare(source), change(source, apply), RIGHT)
    for option, values in OPTIONS.items():
        for value in values:
            yield Case(FAMILY, f"{option} {value!a}", prepare(options=(option, value)), codes=RIGHT)
    for sources in SOURCES:
        yield Case(FAMILY, f"sources {' '.join(sources)[:60]!r}", prepare(*sources), _odd_sources, RIGHT)
    for kind, value in {"a scalar": 1, "text": "x", "empty": h5py.Empty("u1"), "bytes": b"{}", "a group": None}.items():
        argv = prepare(options=("--tokenizer", "data.h5"))
        yield Case(FAMILY, f"tokenizer in a data set is {kind}", argv, _tokenizer(value), RIGHT)
    name = os.fsdecode(b"\xff.jsonl")
    yield Case(FAMILY, "a source whose name is not UTF-8", prepare(name), write(name, _GOOD), RIGHT)
    yield from _outputs()
    yield from _full_disks()


def _odd_sources(directory):
    (directory / "link").symlink_to("a.jsonl")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")
    (directory / "unreadable").mkdir(mode=0)


def _outputs():
    """Outputs that exist. Those that are not our data sets are refused in tests/data/test_prepare_outputs.py."""
    for out in ("missing/out.h5", "x" * 300, "/proc/out.h5", "new\n.h5"):
        yield Case(FAMILY, f"output {out[:40]!r}", prepare(out=out), codes=(0, 2))
    yield Case(FAMILY, "output is the tokenizer's data set", prepare(out="data.h5", options=("--tokenizer", "data.h5")))
    for name in ("tokens", "offsets"):
        # A call must not take it for done. --force, since data.h5 was made in another directory.
        argv, damage = prepare(out="data.h5", options=("--force",)), damaged_dataset(name, 0.3, 2)
        yield Case(FAMILY, f"the same call over damaged {name}", argv, damage, (0,), writes=("data.h5",))


def _tokenizer(value):
    """Damage: replace the largest file of the tokenizer in a data set."""

    def damage(directory):
        with h5py.File(directory / "data.h5", "r+") as file:
            group = file["tokenizer"]
            name = max(group, key=lambda name: group[name].size)
            del group[name]
            group.create_group(name) if value is None else group.create_dataset(name, data=value)

    return damage


def _full_disks():
    held_out = ("--eval-fraction", "0.2")
    sizes = {resource.RLIMIT_FSIZE: 1 << 15}
    for options in ((), held_out):
        name = f"limit of file size {' '.join(options)}"
        yield Case(FAMILY, name, prepare(options=options), limits=sizes)
        yield Case(FAMILY, f"{name}, real", prepare(options=options), limits=sizes, real=True)
        if os.geteuid() == 0:
            for size in ("16k", "64k", "128k"):
                argv = prepare(out="full/out.h5", options=options)
                yield Case(FAMILY, f"disk of {size} {' '.join(options)}", argv, codes=(0, 2), mount=size)
    if os.geteuid() == 0:
        # The older data set stays as it is, since there is no space for another one beside it.
        argv = prepare(out="full/out.h5", options=("--max-length", "400"))
        older = lambda directory: shutil.copy(directory / "data.h5", directory / "full" / "out.h5")  # noqa: E731
        yield Case(FAMILY, "full disk, an older output there", argv, older, mount="600k")
    yield Case(FAMILY, "limit of open files", prepare(), codes=(0, 2), limits={resource.RLIMIT_NOFILE: 12})
