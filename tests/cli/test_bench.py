"""Benchmarks that start mpiexec: ranks that exceed their time, and mpiexec within mpiexec."""

from odc_mpi.cli import bench, mpiexec
from odc_mpi.cli.main import main


def test_ranks_that_take_too_long(monkeypatch, capsys):
    def late(*_, **__):
        raise TimeoutError("2 ranks did not end within 1 s: raise --timeout-s")

    monkeypatch.setattr(mpiexec, "run", late)
    for words in (["transport"], ["start"]):
        assert main(["bench", *words]) == 1
        errors = capsys.readouterr().err.splitlines()
        assert errors[-1] == "odc-mpi: error: 2 ranks did not end within 1 s: raise --timeout-s"


def test_bench_start_under_mpiexec_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(bench, "is_launched", lambda: True)
    assert main(["bench", "start"]) == 2
    assert "run it without mpiexec" in capsys.readouterr().err
