"""A short selection of the fuzzer, random records and chat templates, and the judgment of both."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from case import Case, train
from judge import judge, result
from records import Draw, Drawn, Template, check, draw_template, make_tokenizer, run, run_texts
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
    case, got = Case("f", "n", train(), codes=(2,), same=True), BAD if finished.code == 0 else None
    found = judge(case, finished, FILES, after, GOOD, got)
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


PLAIN = Template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", None, False, False, False)


def test_random_records_and_texts_have_no_findings():
    lines = []
    num_found, num_accepted = run(0, 200, lines.append)
    num_found += run_texts(0, 200, lines.append)
    assert not num_found and num_accepted > 100, "\n".join(lines)


def test_faults_are_found():
    tokenizer, rng = make_tokenizer(), random.Random(0)
    record = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    expected = (
        (Drawn(record, trained=["two"], untrained=["one"]), []),
        (Drawn(record, untrained=["two"]), ["loss on 'two'"]),
        (Drawn(record, trained=["one"]), ["'one' has loss 0 times"]),
        (Drawn(record, untrained=["three"]), ["'three' is missing and not counted"]),
        (Drawn(record, invalid=True), ["accepted, and must be invalid"]),
        (Drawn(record, extra="topic"), ["an unknown field is not counted"]),
    )
    for drawn, found in expected:
        assert check(tokenizer, PLAIN, drawn) == (found, True)
    assert draw_template(rng).text != draw_template(rng).text and Draw(rng).record().record
