"""The sentence about a launcher that the MPI library does not know; real ones are in tests/slurm."""

import mpi4py
import pytest

from odc_mpi.errors import UserError
from odc_mpi.runtime.start import pmi


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*pmi._SIZE_VARIABLES, pmi._SLURM_SIZE, *pmi._PMI, "PMIX_RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "library", "words"),
    [
        ({"PMI_SIZE": "4"}, "Open MPI v5.0.11", ["4 processes (PMI_SIZE)", "use the mpiexec"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH 5.0.2", ["2 processes (OMPI_COMM_WORLD_SIZE)", "use the mpiexec"]),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1"}, "MPICH 5.0.2", ["8 processes", "srun --mpi=pmi2"]),
        ({"PMI_SIZE": "8", "SLURM_JOB_ID": "1"}, "Open MPI v5.0.11", ["8 processes", "srun --mpi=pmix"]),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1"}, "Other 1", ["srun --mpi=pmix or --mpi=pmi2"]),
    ],
)
def test_processes_that_mpi_does_not_see(monkeypatch, variables, library, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        pmi.check_launcher(library, 1)
    for word in words:
        assert word in str(refused.value)
    pmi.check_launcher(library, int(max(variables.values())) if "SLURM_JOB_ID" not in variables else 8)


def test_helpers_that_an_mpiexec_started_with_srun_do_not_count(monkeypatch):
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1", "PMI_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    pmi.check_launcher("MPICH 5.0.2", 1)


def test_without_pmix_nothing_is_done_before_the_start(monkeypatch):
    monkeypatch.setattr(mpi4py.rc, "initialize", "as it was")
    pmi.check_before_start()
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("PMI_FD", "5")
    pmi.check_before_start()
    assert mpi4py.rc.initialize == "as it was"


def test_a_hint_within_slurm_alone(monkeypatch):
    assert pmi.srun_advice() is None
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "pmix for Open MPI, pmi2 for MPICH" in pmi.srun_advice()
