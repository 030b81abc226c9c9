import pytest

from odc_mpi.runtime.job_info import describe_layout, slurm_job

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
