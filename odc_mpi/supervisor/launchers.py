"""Command lines of launchers: mpiexec of MPICH or Open MPI, and srun; and the hosts on which they can start ranks."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from odc_mpi.errors import UserError

#: Time within which a host must run `true`, in seconds, and maximum number of hosts that run a program concurrently.
PROBE_S = 5.0
_MAX_CONCURRENT = 64
#: Variables that name the program with which mpiexec of MPICH or Open MPI reaches other hosts. The default is ssh.
_AGENTS = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent")
#: Options of srun for ranks: the nodes' ranks are consecutive, and each rank maps the memory of all GPUs of its node.
_SRUN = ("--kill-on-bad-exit=1", "--distribution=block", "--cpu-bind=cores", "--mem-bind=local", "--gpu-bind=none")


class Host(NamedTuple):
    """A host, and the number of ranks on it. Without a name, it is this host."""

    name: str
    ranks: int


class Mpiexec:
    """mpiexec, on this host or on the given `hosts`. Raises `UserError` if it is missing, or cannot use `hosts`."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        beside = Path(sys.executable).with_name("mpiexec")  # where the wheels of both libraries install it
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UserError(
                "no mpiexec beside this Python or on the PATH: pip install 'odc_mpi[mpich]', or load the library of "
                "your cluster"
            )
        self.hosts, self._mpiexec, self._is_mpich = list(hosts), found, False
        if hosts[0].name:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
            self._is_mpich = "hydra" in version.lower()
            if not self._is_mpich and "Open MPI" not in version and "PRRTE" not in version:
                raise UserError(f"--hosts: expected mpiexec of MPICH or Open MPI, got {found}: remove --hosts")

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Return the command that starts what follows it on `hosts`."""
        number = ["-n", str(sum(host.ranks for host in hosts))]
        if not hosts[0].name:
            return [self._mpiexec, *number]
        names = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
        if self._is_mpich:
            return [self._mpiexec, "-hosts", names, *number]
        # Unlike MPICH's mpiexec, that of Open MPI passes only variables that it knows to other hosts.
        exported = [word for name in os.environ if name.startswith("ODC_MPI_") for word in ("-x", name)]
        return [self._mpiexec, "--host", names, "--map-by", "slot:oversubscribe", *exported, *number]

    def on_host(self, host: Host, *command: str) -> list[str]:
        """Return a command that runs a program, in this directory, on one of the hosts."""
        if is_here(host):
            return list(command)
        agent = next((os.environ[name] for name in _AGENTS if name in os.environ), "ssh")
        return [*agent.split(), host.name, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"]

    def is_ending(self) -> bool:
        """Return True if a scheduler is about to end this job."""
        return False


class Srun:
    """Srun, on the nodes of this process's Slurm job."""

    def __init__(self) -> None:
        nodes = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        tasks = re.match(r"\d+", os.environ.get("SLURM_TASKS_PER_NODE", "1"))
        self.hosts = [Host(node, int(tasks[0]) if tasks else 1) for node in nodes]

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Return the command that starts what follows it on `hosts`. Raises `UserError` if their ranks differ."""
        per_node = hosts[0].ranks
        if any(host.ranks != per_node for host in hosts):
            raise UserError(f"--ranks: expected a multiple of {per_node}, the ranks of each node")
        cores = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        where = [f"--nodes={len(hosts)}", f"--nodelist={','.join(host.name for host in hosts)}"]
        where += [f"--ntasks={len(hosts) * per_node}", f"--ntasks-per-node={per_node}", f"--cpus-per-task={cores}"]
        return ["srun", *where, *_SRUN]

    def on_host(self, host: Host, *command: str) -> list[str]:
        """Return a command that runs a program on one of the nodes."""
        where = [f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
        return ["srun", "--overlap", "--mpi=none", "--quiet", *where, *command]

    def is_ending(self) -> bool:
        """Return True if Slurm is about to end this job: after scancel, at its time limit, or for another job."""
        job = _output("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
        return re.search(r" JobState=(?!RUNNING)| PreemptTime=\d", job) is not None


def is_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True inside a Slurm allocation."""
    return "SLURM_JOB_NODELIST" in environment


def answering(launcher: Mpiexec | Srun, hosts: Sequence[Host]) -> list[Host]:
    """Return those of `hosts` that answer within `PROBE_S`, in order. This host is not probed."""
    others = [host for host in hosts if not is_here(host)]
    ends = run_on_hosts(launcher, others, ["true"], PROBE_S)
    lost = [host for host, end in zip(others, ends, strict=True) if end is None or end.returncode]
    return [host for host in hosts if host not in lost]


def run_on_hosts(
    launcher: Mpiexec | Srun, hosts: Sequence[Host], command: Sequence[str], timeout_s: float
) -> list[subprocess.CompletedProcess[str] | None]:
    """Run a program on all hosts at once, and return its ends, or None where it has not begun or ended in time."""

    def run(host: Host) -> subprocess.CompletedProcess[str] | None:
        try:
            # In a session of its own, in which ssh cannot ask for a password.
            return subprocess.run(
                launcher.on_host(host, *command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, OSError):
            return None

    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        return list(pool.map(run, hosts))


def is_here(host: Host) -> bool:
    """Return True for the host of this process."""
    return not host.name or is_same_host(host.name, socket.gethostname())


def is_same_host(one: str, other: str) -> bool:
    """Return True if two names are of the same host, with or without its domain."""
    return _short(one) == _short(other)


def _short(name: str) -> str:
    first = name.partition(".")[0]
    return name if first.isdecimal() else first  # an address


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Return the first of `hosts` that have room for `ranks`, or all of them, with the ranks placed on each."""
    placed = []
    for host in hosts:
        number = min(host.ranks, ranks)
        ranks -= number
        placed += [Host(host.name, number)] if number else []
    return placed


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
