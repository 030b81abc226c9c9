"""Benchmarks whose ranks exceed their time."""

from odc_mpi.cli import mpiexec
from odc_mpi.cli.main import main


def test_ranks_that_take_too_long(monkeypatch, capsys):
    def late(*_, **__):
        raise TimeoutError("2 ranks did not end within 1 s: raise --timeout-s")

    monkeypatch.setattr(mpiexec, "run", late)
    assert main(["bench", "transport"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == "odc-mpi: error: 2 ranks did not end within 1 s: raise --timeout-s"
