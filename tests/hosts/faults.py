"""A run on two hosts at whose ranks and network things go wrong at random moments; it ends as it should, and goes on.

    python tests/hosts/faults.py --faults 100 --seed 7

A run saves every third step. A rank is killed, or stopped, for a moment or for good; or the second host is cut off from
the network, for a moment or until the line is printed. What outlasts that goes on to the next fault. What does not ends
with a line that names the rank, and is started once more, with other islands in turn. In the end the losses are those
of a run without faults. `SERIES` lists which islands, and which run.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "launch"), str(HERE.parent / "fakes")]  # for a run by hand
import mpi_launch  # noqa: E402
import two_hosts  # noqa: E402
from mpi_launch import wait_until  # noqa: E402
from small_run import last_step, losses, write_config, write_data  # noqa: E402

from odc_mpi.checkpoint.commands import verify  # noqa: E402

EVERY = 3
#: A wait of this length ends a run; a fault for a moment is shorter.
TIMEOUT_S = 8.0
MOMENT_S = 3.0
#: The same while MPI starts, where ranks wait for each other's imports.
START_TIMEOUT_S = 60.0
#: Kinds of faults, by how often they come: those for good end a run, and most of these take TIMEOUT_S and more.
KINDS = {"kill": 6, "stop for a moment": 3, "stop": 2, "cut for a moment": 3, "cut": 1}
#: Fraction of the faults that occur while a run starts.
EARLY = 0.15
#: Seconds until a run has done the next steps, or has ended after a fault; a busy machine takes most of it to start.
PATIENCE_S = 120.0
#: Steps while there are faults, and after the last one.
ENDLESS, STEPS_LEFT = 100_000, 3
SETTINGS = ("--optim.lr_scheduler_type", "constant", "--optim.adam_epsilon", 1e-3)
FLAT, HYBRID = ("--islands.by", "off"), ("--islands.by", "node")
OUTER = (*HYBRID, "--islands.mode", "outer")
_OUTER_SUM = ("--islands.outer_learning_rate", 1, "--islands.outer_momentum", 0)
_IN_FLIGHT = ("--islands.sync_every", 4, "--islands.fragments", 2, "--islands.delay", 1, "--islands.wire", "int8")


@dataclass(frozen=True)
class Fault:
    """A fault, its rank and its time: `steps` steps later (None: at once) and some seconds after."""

    kind: str
    rank: int
    steps: int | None
    after_s: float

    def __str__(self):
        when = "at once" if self.steps is None else f"{self.steps} steps on"
        return f"{self.kind} rank {self.rank}, {when} and {self.after_s:.2f} s"


@dataclass(frozen=True)
class Series:
    """Islands of successive starts, in turn, and the number of ranks of the run without faults that has their losses.

    0 ranks are one process without islands; otherwise each rank is an island, with the settings of the first start.
    """

    starts: tuple
    ranks_alone: int = 0
    settings: tuple = ()


SERIES = (
    Series((FLAT, HYBRID)),
    # Islands that synchronize plain SGD in each step train as one model.
    Series(
        (FLAT, (*OUTER, "--islands.sync_every", 1, *_OUTER_SUM), HYBRID),
        settings=("--optim.optimizer", "sgd", "--optim.learning_rate", 0.1, "--optim.max_grad_norm", 0),
    ),
    # A fragment is in flight after each odd step.
    Series(((*OUTER, *_IN_FLIGHT),), ranks_alone=2),
)


def draw(random_numbers, ranks):
    early = random_numbers.random() < EARLY
    return Fault(
        random_numbers.choices(list(KINDS), list(KINDS.values()))[0],
        random_numbers.randrange(ranks),
        None if early else random_numbers.randrange(1, 2 * EVERY + 1),
        random_numbers.uniform(0, 4 if early else 0.3),
    )


def begin(config, steps, settings):
    """Start the run on two hosts."""
    train = ("-m", "odc_mpi", "train", "--config", config, "--run.steps", steps, "--run.checkpoint_every", EVERY)
    train += ("--comm.timeout_s", TIMEOUT_S, *SETTINGS, *settings)
    return two_hosts.start(1, *train, ODC_MPI_START_TIMEOUT_S=START_TIMEOUT_S)


def printed_step(job):
    """The last step that a run has printed; 0 before the first."""
    steps = re.findall(r"^ *(\d+)/\d+ ", job.out, re.MULTILINE)
    return int(steps[-1]) if steps else 0


def is_over(job):
    return job.poll() is not None


def patiently(job, is_so):
    """Wait for something, or for the end; return whether it came to be so."""
    return wait_until(lambda: is_so() or is_over(job), PATIENCE_S, every_s=0.05) and is_so()


def inflict(job, fault, pids):
    """Do what a fault says; what is for a moment, or hinders the end of the run, is made good again."""
    pid = pids[fault.rank]
    if fault.kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault.kind.startswith("stop"):
        os.kill(pid, signal.SIGSTOP)
        if fault.kind != "stop":
            time.sleep(MOMENT_S)
            os.kill(pid, signal.SIGCONT)
    else:
        # By an open file: the rank on the second host may be gone before its network is back.
        with Path(f"/proc/{pids[1]}/ns/net").open() as host:
            set_network(host.fileno(), "down")
            if fault.kind == "cut":
                # A launcher cannot end ranks that it does not reach: so until the line is said.
                patiently(job, lambda: named(job.text, None))
            time.sleep(MOMENT_S)
            if not is_over(job):
                set_network(host.fileno(), "up")


def set_network(host, state):
    """Set the network of a host, which an open file descriptor names, up or down."""
    command = ["nsenter", f"--net=/proc/self/fd/{host}", "ip", "link", "set", "eth0", state]
    subprocess.run(command, check=True, pass_fds=[host])


def named(text, rank):
    """True if a line names a rank, or any rank: of this package, or of a launcher that saw it die.

    MPICH's launcher names its process and its host, of which it is the only rank, and leaves the others no time to say.
    Neither does Open MPI where it finds a connection closed: the rank that found it is ended, with the peer's host, or
    with its own host only if it ends before the message is printed.
    """
    number = r"\d" if rank is None else rank
    peer = r"\d" if rank is None else 1 - rank
    by_launcher = (
        rf"(?:PID \d+ RUNNING AT|Peer host:) +node{number}\b|\[node{peer}:\d+\] .* error occurred in Socket closed"
    )
    return re.search(rf"\brank {number}\b[^\n]*(?:node\d|waited|signal|PID)|{by_launcher}", text) is not None


def endure(directory, num_faults, seed):
    """Let so many faults happen to a run; return the losses, and those of a run without. The seed selects the series.

    Raises:
        AssertionError: A run ended in another way than with a line that names the rank, or did not end.
    """
    series = SERIES[seed % len(SERIES)]
    config = write_config(write_data(directory / "small.h5"), directory)
    starts = [(*series.settings, *islands) for islands in series.starts]
    try:
        job = _inflict_all(config, starts, num_faults, seed)
        if not is_over(job):
            patiently(job, lambda: printed_step(job))
            # Islands that train apart merge before they stop, so their losses would be others.
            os.kill(job.ranks()[0], signal.SIGKILL if series.ranks_alone else signal.SIGUSR1)
            code = job.finish(PATIENCE_S).code
            assert code != 0 if series.ranks_alone else code == 75, f"seed {seed}: {job.text}"
        steps = last_step(directory / "run") + STEPS_LEFT
        one = ("-m", "odc_mpi", "train", "--config", config, "--run.steps", steps, "--run.dir", directory / "alone")
        islands = ("--islands.by", 1) if series.ranks_alone else ()
        alone = mpi_launch.start(series.ranks_alone, *one, *SETTINGS, *starts[0], *islands)
        for job in (begin(config, steps, starts[0]), alone):
            done = job.finish(PATIENCE_S)
            assert done.code == 0, f"seed {seed}: {job.text}"
    finally:
        mpi_launch.end_all()
    lines, damaged = verify(directory / "run")
    assert damaged == 0, lines
    return losses(directory / "run"), losses(directory / "alone")


def _inflict_all(config, starts, num_faults, seed):
    """Start the run, and once more after each fault that ended it, until all have happened; return the last start."""
    random_numbers, num_starts, job = random.Random(seed), 0, None
    for number in range(1, num_faults + 1):
        if job is None or is_over(job):
            job, num_starts = begin(config, ENDLESS, starts[num_starts % len(starts)]), num_starts + 1
        fault, output = draw(random_numbers, 2), f"seed {seed}, fault {number} of {num_faults}"
        came = patiently(job, lambda: len(job.ranks()) == 2)  # noqa: B023 - called at once, as those below
        pids, target = job.ranks(), printed_step(job) + fault.steps if fault.steps else 0
        came = came and patiently(job, lambda: printed_step(job) >= target)  # noqa: B023
        assert came and not is_over(job), f"before {output}: {job.text}"
        time.sleep(fault.after_s)
        before = printed_step(job)
        with suppress(ProcessLookupError, FileNotFoundError):  # it is gone already
            inflict(job, fault, pids)
        ending = "went on"
        if not (fault.kind.endswith("moment") and patiently(job, lambda: printed_step(job) > before + 1)):  # noqa: B023
            code = job.finish(PATIENCE_S).code
            ending = f"ended with {code} at step {printed_step(job)}"
            assert code != 0, f"{output}, {fault}: {ending}: {job.text}"
            # Of two hosts either is cut off from the other; and no rank knows which one is late before MPI is up.
            is_known = printed_step(job) and "cut" not in fault.kind
            assert named(job.text, fault.rank if is_known else None), f"{output}, {fault}: {ending}: {job.text}"
        print(f"{output}, {fault}: {ending}", flush=True)
    return job


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + len(SERIES)):
        num_faults = -(-arguments.faults // len(SERIES))
        with tempfile.TemporaryDirectory() as directory:
            ours, theirs = endure(Path(directory), num_faults, seed)
        worst = max(abs(our - their) / their for our, their in zip(ours, theirs, strict=True))
        print(f"seed {seed}: {num_faults} faults, {len(ours)} steps, losses differ by {worst:.1e} at most", flush=True)


if __name__ == "__main__":
    main()
