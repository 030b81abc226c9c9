"""Records of a run that is resumed."""

import json

from step_metrics import STEP

from odc_mpi.observe.metrics import METRICS, read_metrics
from odc_mpi.training.rundir.records import COMPLETIONS, reopen_run_directory

#: Characters at which `str.splitlines` splits, and others that JSON need not escape.
TEXT = "a\u2028b\u2029c\x85d\x7fe\U0001f600"


def test_earlier_lines_are_kept_byte_for_byte(tmp_path):
    lines = [json.dumps({"step": n, "completion": TEXT}, ensure_ascii=False).encode() + b"\n" for n in (1, 2, 3)]
    lines[1] = lines[1].replace(b"c", b"\xff").replace(b"\n", b"\r\n")  # not UTF-8, and a line end of Windows
    (tmp_path / COMPLETIONS).write_bytes(b"".join(lines) + b'{"step": 2, "comple')
    reopen_run_directory(tmp_path, "", 2)
    assert (tmp_path / COMPLETIONS).read_bytes() == b"".join(lines[:2])


def test_metrics_may_contain_any_text(tmp_path):
    lines = [STEP | {"step": n, "note": TEXT} for n in (1, 2)]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / METRICS).write_text(content, encoding="utf-8")
    assert read_metrics(tmp_path, 2) == lines
