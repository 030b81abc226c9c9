"""The templates, and jobs that are stopped, lose a rank, or have the wrong launcher."""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import yaml
from cluster import srun_mpi
from mpi_launch import wait_until
from slurm_jobs import LIMIT_S, STEPS

#: A test waits for several jobs, all of which end within their own limit, counted from the first test on.
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

EVERY_10 = ("--run.checkpoint_every", "10")
SHORT = ("--run.steps", "3")
#: Directory of a node, which the other does not see.
SCRATCH = "/run/scratch"
#: How docs/clusters.md starts commands that end by themselves.
SRUN = "srun --kill-on-bad-exit=1 --cpus-per-task=1 --cpu-bind=cores --mem-bind=local --gpu-bind=none odc-mpi"
TWO_NODES = ["--nodes=2"]
#: Partitions of a node whose jobs are put into the queue again for a job of the partition `high`.
PREEMPTED = ("grace", "nograce")
#: Steps of preempted runs: more than they take until both have begun, and Slurm has looked at the job that preempts.
MANY = 400
NEVER = ("--run.resume", "never")


@pytest.fixture(scope="session")
def jobs(place, request):
    """The numbers of jobs that run while the tests wait; what happens to some of them on the way is done in threads."""
    submitted = {
        "rendered": render(place),
        "single": stage(place),
        "lost": place.train("train", *place.records("lost"), *EVERY_10, options=TWO_NODES),
        "down": stage_on_two(place),
        "pair": pair(place),
        "within": within(place),
    }
    with ThreadPoolExecutor() as others:
        submitted["losing"] = others.submit(kill_a_rank, place)
        submitted["setting down"] = others.submit(set_down, place)
        if any("library" not in item.keywords for item in request.session.items):
            submitted |= jobs_of_any_library(place, others)
        yield submitted


def jobs_of_any_library(place, others):
    sweep = place.train("sweep", options=["--array=0-1"])
    stopped = place.train("train", "--run.dir", "stopped", options=TWO_NODES)
    preempted = {
        name: place.train("train", "--run.dir", name, "--run.steps", MANY, *NEVER, options=[f"--partition={name}"])
        for name in PREEMPTED
    }
    return {
        **preempted,
        "preempting": others.submit(preempt, place),
        "sweep": sweep,
        "stopped": stopped,
        "nowhere": place.train("train", options=TWO_NODES, STAGE=f"{SCRATCH}/nowhere", DATA=place.data),
        "stopping": others.submit(send_stop_twice, place, stopped, "stopped"),
        "stopping the last": others.submit(send_stop, place, f"{sweep}_1", f"runs/sweep-{sweep}/1"),
    }


def pair(place):
    """Train on two ranks in a copy of a small virtual environment, which sees the packages of this one."""
    run = partial(subprocess.run, cwd=place.path, check=True)
    run([sys.executable, "-m", "venv", "--without-pip", "small"])
    (packages,) = place.path.glob("small/lib/python*/site-packages")
    program = f"import site, sys; site.addsitedir({sysconfig.get_path('purelib')!r}); "
    packages.joinpath("all.pth").write_text(f"{program}open({str(place.path / 'prefixes')!r}, 'a').write(sys.prefix)\n")
    run(["tar", "-cf", "small.tar", "-C", "small", "."])
    # mpi4py looks for the MPI library of a wheel in the environment of its Python.
    variables = {"STAGE": SCRATCH, "DATA": place.data, "VENV_TAR": "small.tar", "LD_LIBRARY_PATH": f"{sys.prefix}/lib"}
    return place.train("train", *place.records("pair"), *SHORT, options=["--ntasks-per-node=2"], **variables)


def render(place):
    """Train on two nodes with the script of `odc-mpi job`."""
    rendered = ["odc-mpi", "job", place.config, "--nodes=2", "--ranks-per-node=1", "--cores-per-rank=1", "--submit"]
    rendered += [f"--stage={SCRATCH}", "--name=rendered", "--run.steps", STEPS, *place.records("rendered")]
    rendered += ["--optim.lr_scheduler_type", "constant"]
    done = place.cluster.run(*rendered, cwd=place.path)
    assert done.code == 0, done.err
    assert done.out.startswith("#!/bin/bash"), "what is submitted is shown"
    return int(done.out.split()[-1])


def within(place):
    """Train without a launcher and with mpiexec, inside a job of two nodes."""
    # With more ranks on a node than it has slots, as tests outside have, Open MPI would put both on the first.
    mpiexec = "env --unset=PRTE_MCA_rmaps_default_mapping_policy mpiexec -n 2"
    script = "odc-mpi train --config {0} --run.dir alone && {1} odc-mpi train --config {0} --run.dir two"
    wrapped = script.format(shlex.quote(str(place.config)), mpiexec)
    return place.command(wrapped, "--nodes=2")


def stage(place):
    """Train in one process on a data set that is copied to the node, as where sbatch passes on only what it is told."""
    return place.train(
        "train", "--run.dir", "single", options=["--export=STAGE,DATA,PATH"], STAGE=SCRATCH, DATA=place.data
    )


def stage_on_two(place):
    options = [*TWO_NODES, "--partition=loss"]
    return place.train("train", *place.records("down"), *EVERY_10, options=options, STAGE=SCRATCH, DATA=place.data)


def send_stop(place, job, run, *to):
    """Stop a job in the middle of the training, by default by signals to its step alone, as with --signal=USR1."""
    place.wait_for_steps(10, run)
    return place.cluster.run("scancel", "--signal=USR1", *to, job)


def send_stop_twice(place, job, run):
    """Stop a job while its ranks load libraries, as the template's --signal does, and later all of its processes."""
    steps = ("squeue", "--steps", "--noheader", "--jobs", job)
    assert wait_until(lambda: f"{job}.0 " in place.cluster.run(*steps).out, LIMIT_S, every_s=0.1), "no ranks"
    assert place.cluster.run("scancel", "--batch", "--signal=USR1", job).code == 0
    return send_stop(place, job, run, "--full")


def preempt(place):
    """Submit a job that needs the nodes of others."""
    for name in PREEMPTED:
        place.wait_for_steps(10, name)
    options = ("--partition=high", "--ntasks-per-node=2", "--exclusive")
    return place.command("true", *options)


def kill_a_rank(place):
    place.wait_for_checkpoint("lost")
    process = re.search(r"process: (\d+)", (place.path / "lost-logs" / "rank-1.log").read_text()).group(1)
    return place.cluster.run("kill", "-KILL", process).code


def set_down(place):
    """Set the second node of a job down, which Slurm then takes from the job."""
    place.wait_for_checkpoint("down")
    return place.cluster.run("scontrol", "update", "NodeName=node4", "State=DOWN", "Reason=test").code


@pytest.mark.library
def test_two_nodes_find_the_losses_of_one_process(place, jobs):
    place.finish(jobs["single"])
    output = place.finish(jobs["rendered"])
    assert place.losses("rendered") == pytest.approx(place.losses("single"), rel=1e-3)
    summary = place.summary("rendered")
    assert summary["hosts"] == ["node0", "node1"]
    assert summary["ranks_per_node"] == [1, 1]
    assert summary["slurm_job_id"] == str(jobs["rendered"])
    assert f"on node0 (1 rank), node1 (1 rank); Slurm job {jobs['rendered']}" in output
    for rank in (0, 1):
        log = place.path / "rendered-logs" / f"rank-{rank}.log"
        assert f"host: node{rank}, node {rank} of 2" in log.read_text()


def test_a_data_set_is_staged(place, jobs):
    for run in ("single", "rendered"):
        place.finish(jobs[run])
        config = yaml.safe_load((place.path / run / "config.yaml").read_text())
        assert config["data"]["path"] == f"{SCRATCH}/{jobs[run]}-small.h5"


def test_an_environment_is_staged(place, jobs):
    place.finish(jobs["pair"])
    assert f"{SCRATCH}/{jobs['pair']}-venv" in (place.path / "prefixes").read_text()


def test_a_data_set_that_cannot_be_staged(place, jobs):
    output = place.finish(jobs["nowhere"], "FAILED")
    assert f"error: cannot copy {place.data} to {SCRATCH}/nowhere on each node" in output
    assert not (place.path / "run").exists()


def test_the_last_of_a_sweep_is_stopped_and_goes_on_alone(place, jobs):
    assert jobs["stopping the last"].result().code == 0
    for task, rate in enumerate((1e-5, 3e-5)):
        place.finish(f"{jobs['sweep']}_{task}")
        run = f"runs/sweep-{jobs['sweep']}/{task}"
        config = yaml.safe_load((place.path / run / "config.yaml").read_text())
        assert config["optim"]["learning_rate"] == rate
        assert place.summary(run)["slurm_restarts"] == task
        assert len(place.losses(run)) == STEPS
        assert (place.path / run / "logs" / "rank-0.log").exists()


@pytest.mark.library
def test_ranks_of_a_node_have_cores_of_their_own(place, jobs):
    """On one node: on two nodes of two shared cores each rank is a session of its own, and MPI hardly gets on."""
    place.finish(jobs["pair"])
    assert place.summary("pair")["ranks_per_node"] == [2]
    cores = []
    for rank in (0, 1):
        log = (place.path / "pair-logs" / f"rank-{rank}.log").read_text()
        assert f"local rank: {rank} of 2" in log
        cores.append(re.findall(r"^cores: (\d+)$", log, re.MULTILINE)[-1])
    assert cores[0] != cores[1]


def test_a_stopped_job_continues_by_itself(place, jobs):
    assert jobs["stopping"].result().code == 0
    output = place.finish(jobs["stopped"])
    saved = re.search(r"stopped on request after step (\d+); checkpoint saved", output)
    assert saved, output
    after = int(saved.group(1))
    assert 10 <= after < STEPS
    assert f"resuming from step {after}:" in output
    assert place.summary("stopped")["slurm_restarts"] == 2, "once for the signal at its start"
    assert f"Slurm job {jobs['stopped']}, start 3" in output
    place.finish(jobs["rendered"])
    assert place.losses("stopped") == pytest.approx(place.losses("rendered"), rel=1e-5)
    assert not list(place.path.glob(".*.stopped"))


def test_preempted_jobs_save_once_and_continue(place, jobs):
    """Their ranks have a minute after SIGTERM in the partition `grace`, and KillWait in the other."""
    place.finish(jobs["preempting"].result())
    for name in PREEMPTED:
        output = place.finish(jobs[name])
        (after,) = map(int, re.findall(r"stopped on request after step (\d+); checkpoint saved", output))
        assert f"resuming from step {after}:" in output and 10 <= after < MANY
        assert place.summary(name)["slurm_restarts"] == 1 and len(place.losses(name)) == MANY
        assert not list((place.path / name).glob("earlier-*"))


@pytest.mark.library
@pytest.mark.parametrize(
    ("run", "event", "left"), [("lost", "losing", ["node0", "node1"]), ("down", "setting down", ["node3"])]
)
def test_a_job_continues_after_the_loss_of_a_rank_or_a_node(place, jobs, run, event, left):
    assert jobs[event].result() == 0
    output = place.finish(jobs[run])
    assert re.search(r"resuming from step \d+0:", output)
    summary = place.summary(run)
    assert summary["hosts"] == left and summary["restarts"] == 1 and summary["slurm_restarts"] == 0
    assert summary["slurm_job_id"] == str(jobs[run])
    place.finish(jobs["rendered"])
    assert place.losses(run) == pytest.approx(place.losses("rendered"), rel=1e-3)
    print({key: value for key, value in summary.items() if key.startswith("lost_")})
    files = place.cluster.run("srun", "--partition=loss", "ls", SCRATCH, timeout_s=LIMIT_S)
    assert files.code == 0 and "small" not in files.out, "copies on the node that is left"


#: Sends signals to srun within a second, after the third step of a run. At the first SIGINT it prints which tasks run.
SIGNAL_SRUN = """
import pathlib, signal, subprocess, sys, time
srun = subprocess.Popen(sys.argv[3:])
metrics, deadline = pathlib.Path(sys.argv[1], "metrics.jsonl"), time.monotonic() + {limit_s}
while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 3:
    assert srun.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
for name in sys.argv[2].split(","):
    srun.send_signal(signal.Signals[name])
    time.sleep(0.2)
sys.exit(srun.wait(60))
"""


@pytest.mark.library
@pytest.mark.parametrize(
    ("signals", "code", "words"),
    [
        ("SIGUSR1", 75, "checkpoint saved. Run the same command to resume"),
        ("SIGINT,SIGINT", 137, "Ctrl-C ends this run without a checkpoint: to save and stop, send SIGUSR1 to srun"),
    ],
)
def test_srun_forwards_the_signal_that_saves_and_ctrl_c_names_it(place, signals, code, words):
    program = [sys.executable, "-c", SIGNAL_SRUN.format(limit_s=LIMIT_S), signals, signals]
    srun = ["srun", f"--mpi={srun_mpi()}", "--nodes=1", "--ntasks=2", "--kill-on-bad-exit=0", "odc-mpi", "train"]
    settings = ["--config", place.config, "--run.dir", signals, "--run.steps", 100000]
    done = place.cluster.run(*program, *srun, *settings, cwd=place.path, timeout_s=LIMIT_S)
    assert done.code == code, (done.out, done.err)
    assert words in done.err


@pytest.mark.library
@pytest.mark.parametrize("kind", ["none", "other"])
def test_a_launcher_that_the_library_does_not_know(place, kind):
    wrong = {"other": {"pmi2": "pmix", "pmix": "pmi2"}[srun_mpi()]}.get(kind, kind)
    srun = ["srun", f"--mpi={wrong}", "--nodes=1", "--ntasks=2", "--kill-on-bad-exit=0"]
    wrong_run = ["odc-mpi", "train", "--config", place.config, "--run.dir", kind]
    done = place.cluster.run(*srun, *wrong_run, cwd=place.path, timeout_s=LIMIT_S)
    assert done.code == 2, done.err
    (errors,) = [line for line in done.lines if line.startswith("odc-mpi: error: ")]
    assert f"try srun --mpi={srun_mpi()}" in errors
    assert not (place.path / kind).exists()


@pytest.mark.library
def test_mpiexec_and_no_launcher_within_a_job(place, jobs):
    place.finish(jobs["within"])
    assert [place.summary(run)["hosts"] for run in ("alone", "two")] == [["node0"], ["node0", "node1"]]
    assert place.losses("two") == pytest.approx(place.losses("alone"), rel=1e-3)


@pytest.mark.library
def test_the_doctor_probes_both_nodes(place):
    report = json.loads(place.finish(place.command(f"{SRUN} doctor --json", "--nodes=2")))
    assert report["nodes"] == 2
    assert report["decision"] is not None


@pytest.mark.library
def test_nothing_is_left_on_the_nodes(place):
    left = place.cluster.run("srun", "--nodes=2", "--ntasks=2", "ls", "/dev/shm", timeout_s=LIMIT_S)
    assert left.code == 0
    assert left.out.split() == []
    left = place.cluster.run("srun", "--nodes=2", "--ntasks=2", "ls", SCRATCH, timeout_s=LIMIT_S)
    assert left.code == 0
    assert "small" not in left.out and "venv" not in left.out
