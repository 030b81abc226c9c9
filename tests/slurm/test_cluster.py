"""The cluster of the tests itself: it goes, however the test run ends."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from cluster import HERE
from mpi_launch import environment

#: Starts a cluster and a job, prints their processes, and waits to be killed.
SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from cluster import Cluster
with Cluster() as cluster:
    cluster.run("sbatch", "--nodes=2", "--ntasks=2", "--output=/dev/null", "--wrap", "srun sleep 300")
    while "RUNNING" not in cluster.show(1).values():
        time.sleep(0.1)
    print(cluster.first, flush=True)
    time.sleep(300)
"""


def processes(namespace):
    """Those of a PID namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        with suppress(OSError):  # ended meanwhile
            found += [path.parent.parent.name] * (path.readlink() == namespace)
    return found


def names():
    return set(Path("/dev/shm").iterdir()) | set(Path("/tmp").glob("odc_mpi-slurm*")), Path("/proc/mounts").read_text()


def test_a_killed_test_run_leaves_nothing(cluster):
    before = names()
    script = SCRIPT.format(here=str(HERE))
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment())
    try:
        namespace = Path(f"/proc/{int(run.stdout.readline())}/ns/pid").readlink()
        assert len(processes(namespace)) > 5  # the daemons at least
    finally:
        run.kill()
        run.wait(timeout=20)
        run.stdout.close()
    deadline = time.monotonic() + 10
    while left := processes(namespace):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert names() == before
