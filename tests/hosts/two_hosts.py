"""Two hosts on one machine, joined by a TCP network, and MPI jobs across them.

By hand, any Python command on two hosts; its output goes to the terminal:

    python tests/hosts/two_hosts.py --ranks-per-host 1 -- -m odc_mpi train --config jobs/quickstart.yaml

A host is a network namespace with a host name of its own, `machine.py` makes both. MPI then sees two nodes: ranks of
one host share memory, ranks of different hosts talk TCP. Files are common to both, as on a cluster.

Everything of a job lives in one PID namespace with private mounts. The kernel ends all of it together with its first
process, and that with this one, however it ends: there is nothing to clean up. What a job that *ended by itself* left
running or left in its /dev/shm is looked up before, and is an error.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "launch"))  # for a run by hand
from machine import LEFT_BEHIND  # noqa: E402, F401 - for those who look at exit codes
from mpi_launch import MPIEXEC, Job, environment  # noqa: E402

#: What both libraries need to see a network here, unless the environment says otherwise. Each of them looks below the
#: host names and finds one kernel.
NETWORK = {
    # Of MPICH's two network modules UCX would reach the other host through the common kernel (CMA), not through TCP.
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    # The same for Open MPI: with these there is shared memory within a host, and TCP.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    # Each of Open MPI's hosts believes that all cores are its own, and its ranks spin on them. Letting go while idle
    # made a training run on 2 x 2 ranks 1.5 to 7 times faster in four runs on 2 busy cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def missing(what="two hosts", programs=("ip", "unshare", "setpriv", "mount"), packages="iproute2, util-linux, mount"):
    """Return the reason why there can be no two hosts, or what else takes namespaces, here; None if there can."""
    if os.geteuid() != 0:
        return f"{what}: root is needed"
    for program in programs:
        if shutil.which(program) is None:
            return f"{what}: the program {program} is needed (Debian: {packages})"
    if MPIEXEC is None:
        return "no mpiexec beside python or on the PATH"
    tried = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--uts", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"{what}: the right to make namespaces is needed: {tried.stderr.strip()}"
    return None


def require(reason, variable):
    """Skip the tests if there is a reason to; fail if an environment variable is 1."""
    import pytest  # not needed by hand

    if reason is not None:
        (pytest.fail if os.environ.get(variable) == "1" else pytest.skip)(reason)


def words_of(ranks_per_host, command):
    """Return the words that start python with some arguments on the ranks of two hosts: the first on node0.

    `ranks_per_host` is a number for both hosts, or a text such as "2,1".
    """
    # The outermost dies with this thread, its child with it, and with that one, a namespace's first, all the rest.
    shell = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*shell, sys.executable, HERE / "machine.py", MPIEXEC, ranks_per_host, sys.executable, *command]


def variables(**changes):
    return environment(**{name: os.environ.get(name, value) for name, value in NETWORK.items()} | changes)


def start(ranks_per_host, *command, timeout_s=60, cwd=None, **env):
    return Job(words_of(ranks_per_host, command), cwd, variables(**env), timeout_s, signal.SIGKILL)


def launch(ranks_per_host, *command, **options):
    return start(ranks_per_host, *command, **options).finish()


def main():
    parser = argparse.ArgumentParser(description="Run a Python command as an MPI job on two hosts of this machine.")
    parser.add_argument("--ranks-per-host", default="1", metavar="N", help="or one number for each, as in 2,1")
    parser.add_argument("--timeout-s", type=float, default=600, metavar="S", help="the job is killed after this many")
    parser.add_argument("command", nargs="+", help="what follows `python`, after --: a script, or -m odc_mpi ...")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        parser.error(reason)
    words = map(str, words_of(arguments.ranks_per_host, arguments.command))
    return subprocess.run(words, env=variables(), stdin=subprocess.DEVNULL, timeout=arguments.timeout_s).returncode


if __name__ == "__main__":
    sys.exit(main())
