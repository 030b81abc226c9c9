"""Start of a job: launcher, library, Slurm, times."""

import time

import mpi4py
import pytest

from odc_mpi.errors import UserError
from odc_mpi.runtime.job_info import describe_layout, slurm_job
from odc_mpi.runtime.library import is_mpich, library_name, select_files
from odc_mpi.runtime.start import launch as launcher
from odc_mpi.runtime.start import pmi
from odc_mpi.runtime.start.start_times import StartTimes, process_start


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"PMI_RANK": "2"}, 2),
        ({"PMIX_RANK": "3", "OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"SLURM_PROCID": "4"}, 4),  # srun without --mpi: the only source
        ({"SLURM_PROCID": "1", "PMI_RANK": "0"}, 0),  # Slurm's is that of mpiexec's helper
        ({"SLURM_PROCID": "0", "PMI_RANK": "2"}, 2),
    ],
)
def test_the_rank_of_the_launcher(monkeypatch, variables, rank):
    for name in (*launcher._RANK_VARIABLES, launcher._TASK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.launched_rank() == rank
    assert launcher.is_launched() == any(name in variables for name in launcher._RANK_VARIABLES)


@pytest.mark.parametrize(
    ("version", "name", "family"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "MPICH 5.0.2", True),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.4 (ANL base 3.4)\nMPI BUILD : x", "CRAY MPICH 8.1.29.4", True),
        ("Intel(R) MPI Library 2021.12 for Linux* OS\n", "Intel(R) MPI Library 2021.12", True),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : x\n", "MVAPICH2 2.3.7", True),
        ("Open MPI v5.0.11, package: Open MPI root@mpich Distribution, ident: 5", "Open MPI v5.0.11", False),
        ("Other", "Other", False),
    ],
)
def test_a_library_is_named_and_its_family_recognized(version, name, family):
    assert library_name(version) == name
    assert is_mpich(version) == is_mpich(name) == family


TASK = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("environment", "layout", "job", "text"),
    [
        ({}, [("a", 2), ("b", 1)], (), "on a (2 ranks), b (1 rank)"),
        ({"SLURM_JOB_ID": "12"}, [("a", 1)], ("12", 0), "on a (1 rank); Slurm job 12"),
        (TASK, [("a", 1)], ("12_3", 2), "on a (1 rank); Slurm job 12_3, start 3"),
        ({}, [(f"n{i}", 8) for i in range(64)], (), "n3 (8 ranks), and 60 more with 480 ranks"),
    ],
    ids=["no Slurm", "a job", "a task of an array that was put back", "many nodes"],
)
def test_a_job_of_slurms(environment, layout, job, text):
    found = slurm_job(environment)
    assert found == dict(zip(("slurm_job_id", "slurm_restarts"), job, strict=False))
    assert describe_layout(layout, found).endswith(text)


def test_phases_and_their_parts_add_up_to_the_time_since_the_start():
    began = process_start()
    assert 0 < time.perf_counter() - began < time.process_time() + 24 * 3600
    times = StartTimes(began)
    times.end("imports")
    time.sleep(0.05)
    times.end("other", windows=0.02, weights=0.01)
    assert (times.seconds["windows"], times.seconds["weights"]) == (0.02, 0.01)
    assert times.seconds["other"] >= 0.02
    assert sum(times.seconds.values()) == pytest.approx(time.perf_counter() - began, abs=0.1)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*pmi._SIZE_VARIABLES, pmi._SLURM_SIZE, *pmi._PMI, "PMIX_RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_files_of_a_library():
    mpi = [
        "/opt/cray/libmpi_gnu_123.so.12",
        "/usr/lib/libmpi.so.40.40.7",
        "/usr/lib/libmpich.so.12",
        "/v/libmpi_abi.so.0",
    ]
    devices = ["/dev/cxi0", "/dev/hfi1_0", "/dev/infiniband/uverbs0"]
    others = ["/v/libmpicxx.so.12", "/v/mpi4py/MPI.mpich.cpython-311.so", "/dev/shm/a", "/dev/null", "socket:[1]"]
    assert select_files({*mpi, *devices, *others}) == sorted([*mpi, *devices])


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
