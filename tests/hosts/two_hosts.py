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
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "launch"))  # for a run by hand
from machine import LEFT_BEHIND  # noqa: E402, F401 - for those who look at exit codes
from mpi_launch import MPIEXEC, Finished, environment  # noqa: E402

#: The exit code of a launch that reached its deadline, as `timeout` has it.
TIMED_OUT = 124

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


def start(ranks_per_host, *command, cwd=None, stream=subprocess.PIPE, **env):
    """Start python with these arguments on the ranks of two hosts: the first on node0, the others on node1.

    `ranks_per_host` is a number for both hosts, or a text such as "2,1".
    """
    # The outermost dies with this thread, its child with it, and with that one, a namespace's first, all the rest.
    shell = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    machine = [sys.executable, str(HERE / "machine.py"), MPIEXEC, str(ranks_per_host)]
    return subprocess.Popen(
        [*shell, *machine, sys.executable, *map(str, command)],
        stdout=stream,
        stderr=stream,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env=environment(**{name: os.environ.get(name, value) for name, value in NETWORK.items()} | env),
    )


def finish(process, timeout_s):
    """Wait for the end; at the deadline, and on any exception, all processes of both hosts are killed."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out or "", err or "", time.monotonic() - began)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate(timeout=20)
        errors = f"{err or ''}\ntwo_hosts: did not end within {timeout_s:g} s, all ranks were killed\n"
        return Finished(TIMED_OUT, out or "", errors, time.monotonic() - began)
    finally:
        end(process)


def first_of(process):
    """Return the process ids, at most one, of the first process in the PID namespace of a started job."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def end(process):
    """Kill a job, if it still runs, and wait until none of its processes is left."""
    if process.poll() is None:
        # Not the outermost: the first of a PID namespace is gone, to its parent, only when all others are.
        os.kill(int((first_of(process) or [process.pid])[0]), signal.SIGKILL)
        process.wait(timeout=20)


def launch(ranks_per_host, *command, timeout_s=60, **options):
    return finish(start(ranks_per_host, *command, **options), timeout_s)


def main():
    parser = argparse.ArgumentParser(description="Run a Python command as an MPI job on two hosts of this machine.")
    parser.add_argument("--ranks-per-host", default="1", metavar="N", help="or one number for each, as in 2,1")
    parser.add_argument("--timeout-s", type=float, default=600, metavar="S", help="the job is killed after this many")
    parser.add_argument("command", nargs="+", help="what follows `python`, after --: a script, or -m odc_mpi ...")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        parser.error(reason)
    done = launch(arguments.ranks_per_host, *arguments.command, timeout_s=arguments.timeout_s, stream=None)
    print(done.err, end="", file=sys.stderr)
    return done.code


if __name__ == "__main__":
    sys.exit(main())
