"""A short selection of the fuzzer, and its own judgment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from case import Case, train
from judge import judge, result
from runner import Finished

FUZZ = Path(__file__).with_name("fuzz.py")
FILES = {"a.jsonl": (0o100000, "digest")}
GOOD, BAD = [[1, 5.0, None]], [[1, 5.1, None]]


@pytest.mark.parametrize(
    ("finished", "after", "letters"),
    [
        (Finished(2, "", "odc-mpi: error: one line\n"), FILES, ""),
        (Finished(2, "", "a warning\nodc-mpi: error: one line\n"), FILES, "M"),
        (Finished(2, "", "reading ━━━ 100% 0:00:00\nodc-mpi: error: one line\n"), FILES, ""),
        (Finished(1, "", "Traceback (most recent call last):\nValueError: x\n"), FILES, "TW"),
        (Finished(-11, "", ""), FILES, "TW"),
        (Finished(None, "", ""), FILES, "H"),
        (Finished(0, "", ""), FILES, "WS"),
        (Finished(2, "", "one line"), {}, "L"),
        (Finished(2, "", "one line"), FILES | {"full/.out.h5.x.tmp": (0o100000, "")}, "L"),
        (Finished(2, "", "one line"), FILES | {"new/metrics.jsonl": (0o100000, "")}, ""),
    ],
)
def test_findings(finished, after, letters):
    found = judge(
        Case("f", "n", train(), codes=(2,), same=True),
        finished,
        FILES,
        after,
        GOOD,
        BAD if finished.code == 0 else None,
    )
    assert "".join(text[0] for text in found) == letters


def test_losses_are_compared_at_full_precision(tmp_path):
    case = Case("f", "n", train(), codes=(0,), same=True)
    (tmp_path / "new").mkdir()
    results = []
    for loss in (5.783471822738647, 5.783471822738648):
        (tmp_path / "new" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "tokens_per_s": 1}) + "\n")
        results.append(result(case, tmp_path, Finished(0, "", "")))
    assert judge(case, Finished(0, "", ""), FILES, FILES, results[0], results[0]) == []
    assert judge(case, Finished(0, "", ""), FILES, FILES, *results)[0].startswith("S: ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_selection_has_no_findings():
    words = [sys.executable, str(FUZZ), "--part", "30"]
    finished = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
