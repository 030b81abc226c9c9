"""A Slurm cluster of two nodes on this machine, for tests.

Everything lives in one PID namespace with private mounts, network and host names (`daemons.py`). The kernel ends all
of it together with its first process, and that with this one, however it ends: there is nothing to clean up.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "launch"), str(HERE.parent / "hosts")]
import two_hosts  # noqa: E402
from mpi_launch import MPIEXEC, ROOT, Finished, environment  # noqa: E402

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv", "mount")
#: States that a job does not leave by itself.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
#: As on two hosts, but that ranks do not yield their core while they wait: under Slurm each is its own session,
#: and Linux 6.18 keeps one session from running while the ranks of others yield again and again (docs/windows.md).
SPINNING = {name: value for name, value in two_hosts.NETWORK.items() if name != "OMPI_MCA_mpi_yield_when_idle"}
#: For the whole cluster to come up, in seconds.
START_S = 60.0


def missing():
    """Return the reason why there can be no Slurm here; None if there can."""
    if os.cpu_count() < 2:
        return "a Slurm that binds two tasks of a node needs two cores"
    return two_hosts.missing("a Slurm", PROGRAMS, "slurm-wlm, munge, libpmix-dev, iproute2, util-linux")


def srun_mpi():
    """Return the value of srun --mpi for the MPI library of these tests."""
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, timeout=20).stdout
    return "pmi2" if "HYDRA" in version else "pmix"


class Cluster:
    """Slurm on two nodes; running from the start to the end of a `with` block."""

    def __enter__(self):
        # The outermost dies with this thread, its child with it, and with that one, a namespace's first, all the rest.
        namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts", "--ipc"]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *namespaces, sys.executable, HERE / "daemons.py"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = select.select([self._process.stdout], [], [], START_S)[0] and self._process.stdout.readline()
        if output != "ready\n":
            os.kill(self._process.pid, signal.SIGKILL)
            raise RuntimeError(f"Slurm did not start within {START_S:g} s: {output}{self._process.stdout.read()}")
        self.first = two_hosts.first_of(self._process)[0]
        return self

    def __exit__(self, *_):
        two_hosts.end(self._process)
        self._process.stdout.close()

    def run(self, *command, cwd=ROOT, timeout_s=60, **env):
        """Run a program beside the daemons, such as sbatch."""
        enter = ["nsenter", "--target", self.first, "--mount", "--uts", "--net", "--pid", "--ipc"]
        began = time.monotonic()
        done = subprocess.run(
            [*enter, f"--wdns={cwd}", "--", *map(str, command)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            env=self._environment(env),
        )
        return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def _environment(self, changes):
        variables = {
            name: value for name, value in environment(**SPINNING).items() if not name.startswith(("SLURM", "SBATCH"))
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # odc-mpi and mpiexec of this environment
        return variables | {"SLURM_CONF": "/run/slurm/slurm.conf", "SLURM_MPI_TYPE": srun_mpi(), "PATH": path} | changes

    def show(self, job):
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).out.split()
        return dict(word.partition("=")[::2] for word in words)

    def wait(self, job, timeout_s=90, states=frozenset(ENDED)):
        """Wait until a job is in one of some states; return what is known of it."""
        deadline = time.monotonic() + timeout_s
        while (fields := self.show(job)).get("JobState") not in states:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} did not come to {sorted(states)} within {timeout_s:g} s: {fields}")
            time.sleep(0.5)
        return fields
