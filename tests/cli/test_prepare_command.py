"""`odc-mpi prepare` in this process, and a run on what it made."""

import os
import signal

import pytest

from odc_mpi.cli import main as cli
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.files import atomic_write


def test_prepare_prints_its_result(tmp_path, capsys):
    source = tmp_path / "lines.jsonl"
    source.write_text('{"text": "abc abc abc"}\n' * 3)
    assert (
        cli.main(["prepare", "stdlib", "--out", str(tmp_path / "std.h5"), "--vocab-size", "300", "--max-length", "50"])
        == 0
    )
    said = capsys.readouterr()
    assert "truncated to --max-length" in said.out
    out = tmp_path / "lines.h5"
    assert cli.main(["prepare", str(source), "--out", str(out), "--tokenizer", str(tmp_path / "std.h5")]) == 0
    with Dataset(out) as dataset:
        assert len(dataset) == 3
    for lines, words in (
        ('{"text": "a"}\n{"text": \n', "line 2"),
        ('{"txt": "a"}\n', "line 1"),
        ("", "contains no examples"),
    ):
        source.write_text(lines)
        capsys.readouterr()
        new = tmp_path / "new" / "lines.h5"
        assert cli.main(["prepare", str(source), "--out", str(new), "--tokenizer", str(tmp_path / "std.h5")]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        assert words in errors[-1] and errors[-1].startswith("odc-mpi: error: ")
        assert len([line for line in errors if "error" in line]) == 1
        assert not new.parent.exists(), "something was left of a mistake"
    source.write_text('{"text": "a"}\n{"text": \n{"text": ""}\n')
    assert cli.main(["prepare", str(source), "--out", str(out), "--vocab-size", "270", "--bad-lines", "skip"]) == 0
    errors = capsys.readouterr().out
    assert f"trained on {source}" in errors and "1 dropped: no loss tokens\n1 skipped: invalid\n" in errors


def test_a_stopped_preparation_leaves_nothing(tmp_path, monkeypatch):
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
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
