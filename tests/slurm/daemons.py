"""The first process of the PID namespace that a Slurm cluster of this machine lives in; `cluster.py` starts it.

It makes the two nodes, starts Slurm, prints "ready" and then waits for its end.

Network, mounts and host names are private to this process and its children. All talk goes over this network's loopback;
each node has a /dev/shm and a scratch directory of its own, other files are common, as on a cluster. Slurm's own files
are in /run, which is memory here.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
import machine
import mpi_launch
from machine import run

#: The third is only in the partitions of the test on preemption, so that no other job is preempted, and the last two in
#: that of the test on the loss of a node.
NODES = ("node0", "node1", "node2", "node3", "node4")
ADDRESSES = {"controller": "10.77.0.10", **{name: f"10.77.0.{11 + i}" for i, name in enumerate(NODES)}}
#: Where each node finds a directory that the other does not see.
SCRATCH = "/run/scratch"
#: What Slurm reads and writes.
SLURM = Path("/run/slurm")
#: For each of the daemons to answer, in seconds.
START_S = 20.0

#: Nothing here asks for control groups, which may be missing. Each node has all of this machine's cores, or binding to
#: them would fail, and up to two jobs share each, so that one that waits does not idle the machine.
SLURM_CONF = """
ClusterName=odc
SlurmctldHost=controller({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is put into the queue again waits until its credential has expired.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPort=7001
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
StateSaveLocation={directory}/state
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
OverTimeLimit=0
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2
PartitionName=grace Nodes=node2 GraceTime=60 State=UP
PartitionName=nograce Nodes=node2 State=UP
PartitionName=loss Nodes=node3,node4 State=UP
PartitionName=high Nodes=node2 PriorityTier=10 PreemptMode=OFF State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=controller NodeAddr={address} Port={port} CPUs={cores} RealMemory=1000 State=UNKNOWN"
)


def wait_until(is_so, what):
    if not mpi_launch.wait_until(is_so, START_S):
        logs = [f"{path}:\n{path.read_text()[-2000:]}" for path in SLURM.glob("*.log")]
        raise SystemExit("\n".join([f"{what} did not come up within {START_S:g} s", *logs]))


def make_machine():
    """Give this process what a machine has of its own: /run, /dev/shm, names, a network that is loopback alone."""
    machine.make_mounts(SLURM, ADDRESSES)
    run("hostname", "controller")
    # What a host sends to an address of its own goes over loopback, but MPI libraries want to see another interface.
    run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "unused")
    for address in ADDRESSES.values():
        run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
    for interface in ("lo", "eth0", "unused"):
        run("ip", "link", "set", interface, "up")


def write_configuration():
    ports = {name: 7010 + i for i, name in enumerate(NODES)}  # each slurmd listens at all addresses
    nodes = "\n".join(
        NODE.format(name=name, address=ADDRESSES[name], port=ports[name], cores=os.cpu_count()) for name in NODES
    )
    settings = SLURM_CONF.format(directory=SLURM, nodes=nodes, controller=ADDRESSES["controller"])
    (SLURM / "slurm.conf").write_text(settings)
    (SLURM / "mpi.conf").write_text(f"PMIxCliTmpDirBase={SCRATCH}\n")
    for name in ("state", *(f"spool-{name}" for name in NODES)):
        (SLURM / name).mkdir()
    key = SLURM / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def start_munge():
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    run("munged", "--force", *(f"--{option}={SLURM}/munge.{name}" for option, name in names.items()))
    wait_until((SLURM / "munge.socket").exists, "munged")


def start_slurm():
    subprocess.Popen(["slurmctld", "-D"], stderr=subprocess.DEVNULL)  # its log has the same
    Path(SCRATCH).mkdir()
    for name in NODES:
        # Both would find each other's PMIx server and shared memory; so each gets mounts of its own.
        settings = (
            f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs {SCRATCH}; export TMPDIR={SCRATCH};"
        )
        subprocess.Popen(
            ["unshare", "--mount", "--uts", "sh", "-c", f"{settings} exec slurmd -D -N {name} 2> /dev/null"]
        )
    wait_until(lambda: idle_nodes() == len(NODES), "Slurm")


def idle_nodes():
    output = subprocess.run(["sinfo", "-h", "-o", "%T %D"], capture_output=True, text=True, timeout=20).stdout
    return sum(int(words[1]) for words in map(str.split, output.splitlines()) if words[0] == "idle")


def main():
    os.environ["SLURM_CONF"] = str(SLURM / "slurm.conf")
    make_machine()
    write_configuration()
    start_munge()
    start_slurm()
    print("ready", flush=True)
    while True:  # the first process inherits all whose parents are gone
        try:
            os.wait()
        except ChildProcessError:
            raise SystemExit("all daemons have ended") from None


if __name__ == "__main__":
    main()
