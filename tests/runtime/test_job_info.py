from odc_mpi.runtime.job_info import describe_layout, slurm_job


def test_no_slurm():
    assert slurm_job({}) == {}
    assert describe_layout([("a", 2), ("b", 1)], {}) == "on a (2 ranks), b (1 rank)"


def test_a_job_of_slurms():
    job = slurm_job({"SLURM_JOB_ID": "12"})
    assert job == {"slurm_job_id": "12", "slurm_restarts": 0}
    assert describe_layout([("a", 1)], job) == "on a (1 rank); Slurm job 12"


def test_a_task_of_an_array_that_was_put_back():
    environment = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    job = slurm_job(environment | {"SLURM_RESTART_COUNT": "2"})
    assert job == {"slurm_job_id": "12_3", "slurm_restarts": 2}
    assert describe_layout([("a", 1)], job).endswith("; Slurm job 12_3, start 3")


def test_many_nodes_are_counted():
    layout = [(f"n{i}", 8) for i in range(64)]
    assert describe_layout(layout, {}).endswith(", n3 (8 ranks), and 60 more with 480 ranks")
