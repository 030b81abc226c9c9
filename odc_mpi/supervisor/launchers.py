"""Launchers, mpiexec of MPICH or Open MPI and srun, and the hosts on which they start ranks."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from odc_mpi.errors import UserError

#: Time within which a host must run `true`, in seconds, and number of hosts that run a program at the same time.
_PROBE_S, _MAX_CONCURRENT = 5.0, 64
#: Variables that name the program with which mpiexec of MPICH or Open MPI reaches other hosts. The default is ssh.
_AGENTS = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent")
#: The ranks of a node are consecutive, and each of them maps the memory of all GPUs of its node.
_SRUN = ("--kill-on-bad-exit=1", "--distribution=block", "--cpu-bind=cores", "--mem-bind=local", "--gpu-bind=none")


class Host(NamedTuple):
    """A host, and the number of ranks on it. Without a name, it is this host."""

    name: str
    ranks: int


class Mpiexec:
    """mpiexec on `hosts`, whose names only MPICH and Open MPI accept. Raises `UserError` if it is missing."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        beside = Path(sys.executable).with_name("mpiexec")  # where the wheels of both libraries install it
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UserError(
                "no mpiexec beside this Python or on the PATH: pip install 'odc_mpi[mpich]', or load the library of "
                "your cluster"
            )
        self.hosts, self._mpiexec = list(hosts), found
        self._is_mpich = "hydra" in _output(found, "--version").lower()

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Return the command that starts what follows it on `hosts`."""
        names, where = ",".join(f"{host.name}:{host.ranks}" for host in hosts), []
        if hosts[0].name and self._is_mpich:
            where = ["-hosts", names]
        elif hosts[0].name:
            # Unlike MPICH's mpiexec, that of Open MPI passes only variables that it knows to other hosts.
            exported = [word for name in os.environ if name.startswith("ODC_MPI_") for word in ("-x", name)]
            where = ["--host", names, "--map-by", "slot:oversubscribe", *exported]
        return [self._mpiexec, *where, "-n", str(sum(host.ranks for host in hosts))]

    def on_host(self, host: Host, *command: str) -> list[str]:
        """Return a command that runs a program, in this directory, on one of the hosts."""
        if is_here(host):
            return list(command)
        agent = next((os.environ[name] for name in _AGENTS if name in os.environ), "ssh")
        return [*agent.split(), host.name, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"]


class Srun:
    """Srun on the nodes of this process's Slurm job."""

    def __init__(self) -> None:
        nodes = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        tasks = re.match(r"\d+", os.environ.get("SLURM_TASKS_PER_NODE", ""))
        self.hosts = [Host(node, int(tasks[0]) if tasks else 1) for node in nodes]

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Return the command that starts what follows it on `hosts`. Raises `UserError` if their ranks differ."""
        per_node, cores = hosts[0].ranks, os.environ.get("SLURM_CPUS_PER_TASK", "1")
        if any(host.ranks != per_node for host in hosts):
            raise UserError(f"--ranks: expected a multiple of {per_node}, the ranks of each node")
        where = [f"--nodes={len(hosts)}", f"--nodelist={','.join(host.name for host in hosts)}"]
        where += [f"--ntasks={len(hosts) * per_node}", f"--ntasks-per-node={per_node}", f"--cpus-per-task={cores}"]
        return ["srun", *where, *_SRUN]

    def on_host(self, host: Host, *command: str) -> list[str]:
        """Return a command that runs a program on one of the nodes."""
        return [*self.command([Host(host.name, 1)]), "--overlap", "--mpi=none", "--cpu-bind=none", *command]


def is_slurm() -> bool:
    """Return True inside a Slurm allocation."""
    return "SLURM_JOB_NODELIST" in os.environ


def job_is_ending() -> bool:
    """Return True if Slurm is about to end this job: after scancel, at its time limit, or for another job."""
    job = _output("scontrol", "show", "job", os.environ["SLURM_JOB_ID"]) if is_slurm() else ""
    return re.search(r" JobState=(?!RUNNING)| PreemptTime=\d", job) is not None


def answering(launcher: Mpiexec | Srun, hosts: Sequence[Host]) -> list[Host]:
    """Return those of `hosts` that answer within 5 s, in order. This host is not probed."""
    others = [host for host in hosts if not is_here(host)]
    ends = run_on_hosts(launcher, others, ["true"], _PROBE_S)
    lost = [host for host, end in zip(others, ends, strict=True) if end is None or end.returncode]
    return [host for host in hosts if host not in lost]


def run_on_hosts(
    launcher: Mpiexec | Srun, hosts: Sequence[Host], command: Sequence[str], timeout_s: float
) -> list[subprocess.CompletedProcess[str] | None]:
    """Run a program on all hosts at once. Return its exit codes and outputs, or None where it did not end in time."""

    def run(host: Host) -> subprocess.CompletedProcess[str] | None:
        try:
            # In a session of its own, in which ssh cannot ask for a password.
            return subprocess.run(
                launcher.on_host(host, *command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                start_new_session=True,
                check=False,
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
    return one == other or (one.partition(".")[0] == other.partition(".")[0] != "" and not one[0].isdecimal())


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Return the first of `hosts` that have room for `ranks`, or all of them, with the ranks placed on each."""
    placed = []
    for host in hosts:
        placed.append(Host(host.name, min(host.ranks, ranks)))
        ranks -= placed[-1].ranks
    return [host for host in placed if host.ranks]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
