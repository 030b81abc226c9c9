"""The templates, and what becomes of jobs that are told to stop, lose a rank, or have the wrong launcher."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from cluster import srun_mpi
from slurm_jobs import LIMIT_S, STEPS, Directory

#: A test waits for several jobs, all of which end within their own limit, counted from the first test on.
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

EVERY_10 = ("--run.checkpoint_every", "10")


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory, data):
    return Directory(cluster, tmp_path_factory.mktemp("jobs"), data)


@pytest.fixture(scope="session")
def jobs(place):
    """The numbers of jobs that run while the tests wait; what happens to some of them on the way is done in threads."""
    submitted = {
        "rendered": render(place),
        "single_node": stage(place),
        "sweep": place.submit("sweep", "--config", place.config, "--run.steps", "3", options=["--array=1"]),
        "stopped": place.train("multi_node", "--run.dir", "stopped"),
        "lost": place.train("multi_node", "--run.dir", "lost", "--run.log_dir", "lost-logs", *EVERY_10),
        "within": within(place),
        "bench": place.submit("bench", "transport", "--sizes", "64K", "--repeats", "1"),
    }
    with ThreadPoolExecutor() as others:
        stopping = others.submit(tell_to_stop, place, submitted["stopped"])
        losing = others.submit(kill_a_rank, place, submitted["lost"])
        yield submitted | {"stopping": stopping, "losing": losing}


def render(place):
    """Train on two nodes with the script of `odc-mpi job`."""
    rendered = ["odc-mpi", "job", place.config, "--nodes=2", "--ranks-per-node=1", "--cores-per-rank=1", "--submit"]
    rendered += ["--name=rendered", "--run.steps", STEPS, "--run.dir", "rendered", "--run.log_dir", "logs"]
    done = place.cluster.run(*rendered, cwd=place.path)
    assert done.code == 0, done.err
    return int(done.out.split()[-1])


def within(place):
    """Train without a launcher and with mpiexec, inside a job."""
    script = "odc-mpi train --config {0} --run.dir alone && mpiexec -n 2 odc-mpi train --config {0} --run.dir two"
    options = ["--nodes=1", "--ntasks=2", "--output=within-%j.out", f"--wrap={script.format(place.config)}"]
    done = place.cluster.run("sbatch", "--parsable", *options, cwd=place.path)
    assert done.code == 0, done.err
    return int(done.out)


def stage(place):
    """Train in one process on a data set that is copied to the node."""
    data = yaml.safe_load(place.config.read_text())["data"]["path"]
    return place.train("single_node", "--run.dir", "single", STAGE="/run/scratch", DATA=data)


def tell_to_stop(place, job):
    place.wait_for_steps(10, "stopped")
    # What --signal of the template brings before the time is up: Slurm counts that in minutes.
    return place.cluster.run("scancel", "--batch", "--signal=USR1", job)


def kill_a_rank(place, job):
    """Return how long the job lived after that; it is queued again."""
    place.wait_for_steps(25, "lost")
    process = re.search(r"process: (\d+)", (place.path / "lost-logs" / "rank-1.log").read_text()).group(1)
    assert place.cluster.run("kill", "-KILL", process).code == 0
    began = time.monotonic()
    place.finish(job, "FAILED", timeout_s=60)
    lived_s = time.monotonic() - began
    assert place.cluster.run("scontrol", "requeue", job).code == 0
    return lived_s


def start_wrongly(place, kind):
    """Train with a --mpi that tells the library nothing, or with the other library's."""
    wrong = {"other": {"pmi2": "pmix", "pmix": "pmi2"}[srun_mpi()]}.get(kind, kind)
    srun = ["srun", f"--mpi={wrong}", "--nodes=1", "--ntasks=2", "--kill-on-bad-exit=0"]
    wrong_run = ["odc-mpi", "train", "--config", place.config, "--run.dir", kind]
    return place.cluster.run(*srun, *wrong_run, cwd=place.path, timeout_s=LIMIT_S)


def test_two_nodes_find_the_losses_of_one_process(place, jobs):
    place.finish(jobs["single_node"])
    told = place.finish(jobs["rendered"])
    assert place.losses("rendered") == pytest.approx(place.losses("single"), rel=1e-3)
    summary = place.summary("rendered")
    assert summary["hosts"] == ["node0", "node1"]
    assert summary["ranks_per_node"] == [1, 1]
    assert summary["slurm_job_id"] == str(jobs["rendered"])
    assert f"on node0 (1 rank), node1 (1 rank); Slurm job {jobs['rendered']}" in told
    for rank in (0, 1):
        assert f"host: node{rank}, node {rank} of 2" in (place.path / "logs" / f"rank-{rank}.log").read_text()


def test_a_data_set_is_staged_and_taken_away(place, jobs):
    place.finish(jobs["single_node"])
    config = yaml.safe_load((place.path / "single" / "config.yaml").read_text())
    assert config["data"]["path"] == f"/run/scratch/{jobs['single_node']}-small.h5"
    left = place.cluster.run("srun", "--nodes=2", "--ntasks=2", "ls", "/run/scratch", timeout_s=LIMIT_S)
    assert left.code == 0
    assert "small" not in left.out


def test_a_sweep_runs_the_settings_of_each_number(place, jobs):
    place.finish(f"{jobs['sweep']}_1")
    config = yaml.safe_load((place.path / f"runs/sweep-{jobs['sweep']}/1/config.yaml").read_text())
    assert config["optim"]["learning_rate"] == 3e-5


def test_a_job_told_to_stop_goes_on_by_itself(place, jobs):
    assert jobs["stopping"].result().code == 0
    told = place.finish(jobs["stopped"])
    after = int(re.search(r"stopped as asked after step (\d+), which is saved", told).group(1))
    assert 10 <= after < STEPS
    assert f"resuming after step {after}" in told
    assert place.summary("stopped")["slurm_restarts"] == 1
    assert f"Slurm job {jobs['stopped']}, start 2" in told
    place.finish(jobs["rendered"])
    assert place.losses("stopped") == pytest.approx(place.losses("rendered"), rel=1e-5)
    assert not list(place.path.glob(".*.stopped"))


def test_a_lost_rank_fails_the_job_at_once_which_then_resumes(place, jobs):
    assert jobs["losing"].result() < 20
    told = place.finish(jobs["lost"])
    assert re.search(r"resuming after step \d+0,", told)
    place.finish(jobs["rendered"])
    assert place.losses("lost") == pytest.approx(place.losses("rendered"), rel=1e-5)


@pytest.mark.parametrize("kind", ["none", "other"])
def test_a_launcher_that_the_library_does_not_know(place, kind):
    done = start_wrongly(place, kind)
    assert done.code == 2, done.err
    (told,) = [line for line in done.lines if line.startswith("odc-mpi: error: ")]
    assert f"try srun --mpi={srun_mpi()}" in told
    assert not (place.path / kind).exists()


def test_mpiexec_and_no_launcher_within_a_job(place, jobs):
    place.finish(jobs["within"])
    assert [place.summary(run)["world_size"] for run in ("alone", "two")] == [1, 2]
    assert place.losses("two") == pytest.approx(place.losses("alone"), rel=1e-3)


def test_the_benchmark_ends(place, jobs):
    assert "GB/s" in place.finish(jobs["bench"])


def test_the_doctor_looks_at_both_nodes(place):
    report = json.loads(place.finish(place.submit("doctor", "--json")))
    assert report["nodes"] == 2
    assert report["decision"] is not None


def test_nothing_is_left_in_memory(place):
    left = place.cluster.run("srun", "--nodes=2", "--ntasks=2", "ls", "/dev/shm", timeout_s=LIMIT_S)
    assert left.code == 0
    assert left.out.split() == []
