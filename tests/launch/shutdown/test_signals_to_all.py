"""Signals to each process of a command at once, as schedulers send them, forked workers included."""

import json
import os
import signal
from contextlib import suppress

import pytest
from crash_cases import CONSTANT, ENDLESS
from mpi_launch import start
from small_run import last_step

#: Ranks with a worker that is forked in the middle of a run, and that Python ends at its end, by SIGTERM.
FORKING = """
import multiprocessing, sys, time
from odc_mpi.cli import main as cli
from odc_mpi.cli import train
run_on_all_ranks = train.run_on_all_ranks
def fork_and_run(world, work):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
    return run_on_all_ranks(world, work)
train.run_on_all_ranks = fork_and_run
sys.exit(cli.main(sys.argv[1:]))
"""


def signal_all(job, number, num_processes, spared=None):
    job.wait_until(lambda: len(job.processes()) >= num_processes)
    for pid in set(job.processes()) - {spared}:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return job.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_with_forked_workers_save_and_end(config, tmp_path, number):
    job = start(2, "-c", FORKING, "train", "--config", config, "--run.steps", ENDLESS, *CONSTANT)
    job.wait_until(lambda: last_step(tmp_path / "run") >= 3)
    done = signal_all(job, number, num_processes=5, spared=job.pid)  # the launcher
    assert f"stopped on request after step {last_step(tmp_path / 'run')}; checkpoint saved" in done.err, done.err


def test_a_preparation_with_workers_leaves_nothing(tmp_path):
    source = tmp_path / "lines.jsonl"
    source.write_text((json.dumps({"text": " ".join(map(str, range(2000)))}) + "\n") * 500)
    out = tmp_path / "new" / "lines.h5"
    job = start(0, "-m", "odc_mpi", "prepare", source, "--out", out, "--vocab-size", 300, "--num-proc", 4)
    done = signal_all(job, signal.SIGTERM, num_processes=6)  # with the one that tracks their resources
    assert done.code == 143 and "odc-mpi: ended by SIGTERM" in done.err and "Traceback" not in done.err, done.err
    assert list(tmp_path.iterdir()) == [source]
