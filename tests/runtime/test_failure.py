"""Reports of failures: the first one stays, complete and private."""

import json
import socket
import stat

from odc_mpi.runtime.failure import report_failure


def test_the_first_report_stays(monkeypatch, tmp_path):
    report_failure("not supervised", 0)
    path = tmp_path / "failure.json"
    monkeypatch.setenv("ODC_MPI_FAILURE_FILE", str(path))
    report_failure(KeyError("two\nlines \udcff" + "x" * 1000), 3, activity="forward of unit a")
    report_failure("the second", 4)
    report = json.loads(path.read_text())
    assert (report["rank"], report["host"], report["activity"]) == (3, socket.gethostname(), "forward of unit a")
    assert report["error"].startswith("KeyError: 'two") and len(report["error"]) <= 300
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("ODC_MPI_FAILURE_FILE", str(tmp_path / "missing" / "failure.json"))
    report_failure("lost", None, "")
    assert list(tmp_path.iterdir()) == []
