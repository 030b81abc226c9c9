"""A Slurm cluster of two nodes on this machine, for tests.

Everything lives in one PID namespace with private mounts, network and host names (`daemons.py`). The kernel ends all
of it together with its first process, and that with this one, however it ends: there is nothing to clean up.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "launch"), str(HERE.parent / "hosts")]
import two_hosts  # noqa: E402
from mpi_launch import MARK, MPIEXEC, ROOT, Job, environment, wait_until  # noqa: E402

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
        words = ["setpriv", "--pdeathsig", "KILL", *namespaces, sys.executable, HERE / "daemons.py"]
        self._daemons = Job(words, timeout_s=START_S, ended_by=signal.SIGKILL)
        self._daemons.wait_for("ready")
        self.first = Path(f"/proc/{self._daemons.pid}/task/{self._daemons.pid}/children").read_text().split()[0]
        return self

    def __exit__(self, *_):
        self._daemons.end()

    def run(self, *command, cwd=ROOT, timeout_s=60, **env):
        """Run a program beside the daemons, such as sbatch, whose jobs outlive it."""
        enter = ["nsenter", "--target", self.first, "--mount", "--uts", "--net", "--pid", "--ipc"]
        variables = self._environment(env) | {MARK: ""}
        return Job([*enter, f"--wdns={cwd}", "--", *command], env=variables, timeout_s=timeout_s).finish()

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
        has_come = wait_until(lambda: self.show(job).get("JobState") in states, timeout_s, every_s=0.5)
        assert has_come, f"job {job} did not come to {sorted(states)} within {timeout_s:g} s: {self.show(job)}"
        return self.show(job)
