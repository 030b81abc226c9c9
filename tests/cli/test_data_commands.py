"""`odc-mpi prepare` and `odc-mpi data verify` in this process."""

import json
import os
import signal

import h5py
import numpy as np
import pytest

from odc_mpi.cli import main as cli
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.files import atomic_write


def test_prepare_prints_its_result(tmp_path, capsys):
    source, out, new = tmp_path / "lines.jsonl", tmp_path / "lines.h5", tmp_path / "new" / "lines.h5"
    command = ["prepare", str(source), "--vocab-size", "270", "--out"]
    source.write_text('{"text": "abc abc abc"}\n' * 3)
    assert cli.main([*command, str(out), "--max-length", "3"]) == 0
    assert "truncated to --max-length" in capsys.readouterr().out
    with Dataset(out) as dataset:
        assert len(dataset) == 3
    for lines, words in (
        ('{"text": "a"}\n{"text": \n', "line 2"),
        ('{"txt": "a"}\n', "line 1"),
        ("", "contains no examples"),
    ):
        source.write_text(lines)
        capsys.readouterr()
        assert cli.main([*command, str(new)]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        assert words in errors[-1] and errors[-1].startswith("odc-mpi: error: ")
        assert len([line for line in errors if "error" in line]) == 1
        assert not new.parent.exists(), "something was left of a mistake"
    source.write_text('{"text": "a"}\n{"text": \n{"text": ""}\n')
    assert cli.main([*command, str(out), "--force", "--bad-lines", "skip"]) == 0
    errors = capsys.readouterr().out
    assert f"trained on {source}" in errors and "1 dropped: no loss tokens\n1 skipped: invalid\n" in errors


TURNS = [{"role": role, "content": f"{role} {i}"} for i in (1, 2) for role in ("user", "assistant")]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "options", "shown"),
    [
        ({"q": "ab", "a": "cd"}, ["--columns", "prompt=q,completion=a"], ["ab[[cd<|endoftext|>]]"]),
        ({"text": "abcdefg"}, ["--max-length", "4"], ["[[abcd]]"]),
        (
            {"text": "abcdefg"},
            ["--max-length", "4", "--overlong", "split"],
            ["a[[bcd]]", "d[[efg]]", "g[[<|endoftext|>]]"],
        ),
        ({"messages": TURNS}, ["--chat-template", "{file}"], ["user 1<|im_end|>[[<assistant>assistant 1<|im_end|>]]"]),
        (
            {"messages": TURNS},
            ["--split-turns", "always"],
            ["assistant\n[[assistant 1<|im_end|>]]", "assistant\n[[assistant 2<|im_end|>]]"],
        ),
        ("hub", ["--split", "test"], ["[[xy<|endoftext|>]]"]),
    ],
    ids=["columns", "truncated", "overlong", "chat template", "split turns", "split"],
)
def test_options_change_the_data_that_show_prints(tmp_path, capsys, source, options, shown):
    letters, path, file = tmp_path / "letters.jsonl", tmp_path / "source.jsonl", tmp_path / "template.jinja"
    letters.write_text('{"text": "."}\n')
    file.write_text(TEMPLATE)
    assert cli.main(["prepare", str(letters), "--out", str(tmp_path / "letters.h5"), "--vocab-size", "262"]) == 0
    if source == "hub":
        datasets, path = pytest.importorskip("datasets"), tmp_path / "saved"
        parts = {name: datasets.Dataset.from_dict({"text": [text]}) for name, text in (("train", "uv"), ("test", "xy"))}
        datasets.DatasetDict(parts).save_to_disk(path)
    else:
        path.write_text(json.dumps(source))
    command = ["prepare", str(path), "--out", str(tmp_path / "out.h5"), "--tokenizer", str(tmp_path / "letters.h5")]
    capsys.readouterr()
    assert cli.main([*command, "--show", "5", *(option.format(file=file) for option in options)]) == 0
    sequences = capsys.readouterr().out.split("\nsequence ")[1:]
    assert len(sequences) == len(shown)
    assert all(text in sequence for text, sequence in zip(shown, sequences, strict=True)), sequences


def test_a_stopped_preparation_leaves_nothing(tmp_path, monkeypatch, capfd):
    def begin(sources, out, options, console):
        with atomic_write(out) as new:
            new.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    monkeypatch.setattr("odc_mpi.data.prepare.prepare", begin)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "stdlib", "--out", str(tmp_path / "new" / "out.h5")])
    assert ended.value.code == 143
    assert capfd.readouterr().err == "odc-mpi: ended by SIGTERM\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def write_dataset(path, **files):
    with DatasetWriter(path, vocab_size=9, tokenizer="t", source="s", tokenizer_files=files) as writer:
        for _ in range(4):
            writer.append(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))
    return path


def test_every_file_is_verified(tmp_path, capsys):
    good, bad, other = write_dataset(tmp_path / "a.h5"), write_dataset(tmp_path / "b.h5"), tmp_path / "none.h5"
    no_tokenizer = write_dataset(tmp_path / "c.h5", **{"tokenizer.json": b"{"})
    with h5py.File(bad, "a") as file:
        file["tokens"][7] = 0
        file["loss_mask"][19] = 0
    assert cli.main(["data", "verify", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 4 sequences, 20 tokens, no tokenizer: no damage\n"
    assert cli.main(["data", "verify", *map(str, (bad, other, no_tokenizer, good))]) == 2
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.out.splitlines()] == [str(good)]
    errors = printed.err.splitlines()
    assert len(errors) == 3 and all(line.startswith("odc-mpi: error: ") for line in errors)
    assert str(bad) in errors[0] and "2 of 4 sequences, the first: 1, 3" in errors[0]
    assert str(other) in errors[1] and str(no_tokenizer) in errors[2]
