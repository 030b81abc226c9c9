"""A run that is started again: its records, and settings of islands once it is complete."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from step_metrics import STEP

from odc_mpi.errors import AllRanksUserError
from odc_mpi.observe.metrics import METRICS, read_metrics
from odc_mpi.training.rundir.records import COMPLETIONS, reopen_run_directory
from odc_mpi.training.rundir.resume import ResumePoint, report_already_complete
from odc_mpi.training.settings import load

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


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({"by": 2}, "4", None),
        ({"by": "off", "mode": "outer"}, "2", None),
        ({"by": 2, "mode": "outer"}, "2", "islands.mode outer -> "),
        ({"by": 2, "mode": "outer"}, "4", "islands.by 2 -> 4"),
        ({"by": 2, "mode": "outer"}, "off", "islands.by 2 -> off"),
    ],
)
def test_settings_of_islands_matter_if_they_train_separately(before, now, changed):
    config = load(None, ["--model.path", "model", "--data.path", "data.h5", "--islands.by", now])
    manifest = SimpleNamespace(metadata={"config": asdict(config) | {"islands": before}}, step=1)
    resume_point = ResumePoint(SimpleNamespace(manifest=manifest, close=lambda: None), True, None)
    with pytest.raises(AllRanksUserError, match=changed) if changed else nullcontext():
        assert report_already_complete(resume_point, config, SimpleNamespace(rank=0)) == {"steps": 1}
