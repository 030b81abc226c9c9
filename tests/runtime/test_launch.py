import pytest

from odc_mpi.runtime.start import launch as launcher


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
