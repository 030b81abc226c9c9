"""The first process of the PID namespace that a job on two hosts lives in; `two_hosts.py` starts it.

It makes the two hosts, runs mpiexec on node0, and looks what the job left behind. Usage:

    machine.py MPIEXEC RANKS_PER_HOST COMMAND...       RANKS_PER_HOST: a number, or one for each host, as in 2,1; 0 if
                                                       the command starts the ranks

    node0  10.77.0.1  eth0 ---- eth0  10.77.0.2  node1

The mounts are private to this process and its children, so namespaces and files in /dev/shm have no names outside.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "launch"))
from mpi_launch import wait_until

AGENT = Path(__file__).with_name("agent")
SCRATCH = Path("/run/tmp")
ADDRESSES = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
#: The exit code for a job that ended well and left something behind.
LEFT_BEHIND = 99
#: What `tc qdisc` is given for either end of the link, such as "netem rate 1gbit delay 500us"; nothing by default.
LINK = "ODC_MPI_TWO_HOSTS_LINK"
#: Launchers leave the last of their daemons to end by themselves; slow ones took 0.3 s.
GRACE_S = 5.0


def run(*command):
    subprocess.run(command, check=True, timeout=20)


def read(*command):
    return subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout


def make_mounts(scratch, addresses):
    """Give this process a /run and a /dev/shm of its own, in the former a directory, and names for some addresses."""
    # `ip netns` keeps the names of namespaces below /run; launchers and libraries keep files in TMPDIR and /dev/shm.
    for place in (str(Path("/var/run").resolve()), "/dev/shm"):
        run("mount", "-t", "tmpfs", "tmpfs", place)
    scratch.mkdir()
    names = scratch / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
    run("mount", "--bind", str(names), "/etc/hosts")


def make_network():
    for name in ADDRESSES:
        run("ip", "netns", "add", name)
    run(*["ip", "link", "add", "eth0", "netns", "node0", "type", "veth", "peer", "name", "eth0", "netns", "node1"])
    for name, address in ADDRESSES.items():
        run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", interface, "up")
    if link := os.environ.get(LINK):
        for name in ADDRESSES:
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *link.split())
    # The link counts as up some time after both ends are. MPICH would see a host without a network, and take lo.
    wait_until(lambda: all("state UP" in read("ip", "-n", name, "link", "show", "eth0") for name in ADDRESSES), 20)


def launcher(mpiexec, counts):
    """The command of either library that reaches the hosts through our agent in place of ssh."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20).stdout
    hosts = ",".join(f"{name}:{count}" for name, count in zip(ADDRESSES, counts, strict=True))
    if "HYDRA" in version:
        how = ["-launcher", "ssh", "-launcher-exec", str(AGENT), "-hosts", hosts]
    elif "Open MPI" in version:
        how = ["--prtemca", "plm_ssh_agent", str(AGENT), "--host", hosts, "--map-by", "slot:oversubscribe"]
        # The hosts share one scheduler. Where each is a session, Linux (6.18) makes a group of each, and idle ranks
        # that yield in one group kept those of the other from running at all for a minute: 11 of 32 training runs.
        how += ["--leave-session-attached"]
    else:
        raise SystemExit(f"{mpiexec}: expected MPICH's launcher (HYDRA) or Open MPI's, got {version!r}")
    return [mpiexec, *how, "-n", str(sum(counts))]


def others():
    """The command lines of all other processes; this one is the first of its namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if path.name == str(os.getpid()):
            continue
        try:
            found.append(path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # ended meanwhile
    return [line for line in found if line]  # those that ended and were not waited for have no command line


def left_behind():
    wait_until(lambda: not others(), GRACE_S)
    files = [str(path) for path in Path("/dev/shm").iterdir()]
    return [f"process {line}" for line in others()] + [f"file {name}" for name in files]


def main():
    mpiexec, ranks_per_host, *command = sys.argv[1:]
    make_mounts(SCRATCH, ADDRESSES)
    os.environ["TMPDIR"] = str(SCRATCH)
    make_network()
    # For commands that start mpiexec; as the options of `launcher`.
    os.environ |= dict.fromkeys(("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent"), str(AGENT))
    os.environ |= {"HYDRA_LAUNCHER": "ssh", "PRTE_MCA_prte_leave_session_attached": "1"}
    counts = [int(count) for count in ranks_per_host.split(",")]
    if any(counts):
        command = [*launcher(mpiexec, counts if len(counts) > 1 else counts * len(ADDRESSES)), *command]
    line = shlex.join(command)
    code = subprocess.run([str(AGENT), "node0", line]).returncode
    left = left_behind()
    for what in left:
        print(f"two_hosts: the job left behind: {what}", file=sys.stderr)
    return code or (LEFT_BEHIND if left else 0)


if __name__ == "__main__":
    sys.exit(main())
