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
from processes import descendants  # noqa: E402
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


class Run:
    """A start of the run on two hosts, its output, and its ranks' processes."""

    def __init__(self, config, steps, settings):
        train = ("-m", "odc_mpi", "train", "--config", config, "--run.steps", steps, "--run.checkpoint_every", EVERY)
        train += ("--comm.timeout_s", TIMEOUT_S, *SETTINGS, *settings)
        self._output = config.with_name(f"output-{time.time_ns()}")
        with self._output.open("wb") as stream:
            self._process = two_hosts.start(1, *train, stream=stream, ODC_MPI_START_TIMEOUT_S=START_TIMEOUT_S)

    @property
    def text(self):
        return self._output.read_text(errors="replace")

    @property
    def step(self):
        """The last step that it has printed."""
        steps = re.findall(r"^ *(\d+)/\d+ ", self.text, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    @property
    def is_over(self):
        return self._process.poll() is not None

    def wait_until(self, is_so, patience_s=PATIENCE_S):
        """Wait for something, or for the end; return whether it came to be so."""
        ends = time.monotonic() + patience_s
        while not (so := is_so()) and not self.is_over and time.monotonic() < ends:
            time.sleep(0.02)
        return so

    def ranks(self, count=2):
        """The processes of the ranks, by rank; fewer if the run ends meanwhile."""
        found = {}

        def all_are_there():
            for pid, words in descendants(self._process.pid).items():
                with suppress(OSError):
                    output = Path(f"/proc/{pid}/environ").read_bytes()
                    rank = re.search(rb"(?:^|\0)(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)", output)
                    if rank and words[1:3] == ["-m", "odc_mpi"]:
                        found[int(rank[1])] = pid
            return len(found) == count

        self.wait_until(all_are_there)
        return found

    def finish(self):
        """Wait for the end; return the exit code, None if it had to be killed."""
        self.wait_until(lambda: False)
        in_time = self.is_over
        self.end()
        return self._process.returncode if in_time else None

    def end(self):
        """Kill the rest of the run."""
        two_hosts.end(self._process)


def inflict(run, fault, pids):
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
                run.wait_until(lambda: named(run.text, None))
            time.sleep(MOMENT_S)
            if not run.is_over:
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
    runs, series = [], SERIES[seed % len(SERIES)]
    config = write_config(write_data(directory / "small.h5"), directory)
    starts = [(*series.settings, *islands) for islands in series.starts]
    try:
        _inflict_all(runs, config, starts, num_faults, seed)
        if not runs[-1].is_over:
            runs[-1].wait_until(lambda: runs[-1].step)
            # Islands that train apart merge before they stop, so their losses would be others.
            os.kill(runs[-1].ranks()[0], signal.SIGKILL if series.ranks_alone else signal.SIGUSR1)
            code = runs[-1].finish()
            assert code not in (None, 0) if series.ranks_alone else code == 75, f"seed {seed}: {runs[-1].text}"
        steps = last_step(directory / "run") + STEPS_LEFT
        one = ("-m", "odc_mpi", "train", "--config", config, "--run.steps", steps, "--run.dir", directory / "alone")
        islands = ("--islands.by", 1) if series.ranks_alone else ()
        alone = mpi_launch.start(series.ranks_alone, *one, *SETTINGS, *starts[0], *islands)
        runs.append(Run(config, steps, starts[0]))
        assert runs[-1].finish() == 0, f"seed {seed}: {runs[-1].text}"
        done = mpi_launch.finish(alone)
        assert done.code == 0, done.err
    finally:
        mpi_launch.end_all()
        for run in runs:
            run.end()
    lines, damaged = verify(directory / "run")
    assert damaged == 0, lines
    return losses(directory / "run"), losses(directory / "alone")


def _inflict_all(runs, config, starts, num_faults, seed):
    """Start the run, and once more after each fault that ended it, until all faults have happened."""
    random_numbers = random.Random(seed)
    for number in range(1, num_faults + 1):
        if not runs or runs[-1].is_over:
            runs.append(Run(config, ENDLESS, starts[len(runs) % len(starts)]))
        run, fault = runs[-1], draw(random_numbers, 2)
        pids = run.ranks()
        target = run.step + fault.steps if fault.steps else 0
        came = run.wait_until(lambda: run.step >= target)  # noqa: B023 - called at once
        assert came and not run.is_over, f"seed {seed}: before fault {number}: {run.text}"
        time.sleep(fault.after_s)
        before = run.step
        with suppress(ProcessLookupError, FileNotFoundError):  # it is gone already
            inflict(run, fault, pids)
        ending = "went on"
        outlasted = fault.kind.endswith("moment") and run.wait_until(lambda: run.step > before + 1)  # noqa: B023
        if not outlasted:
            code = run.finish()
            ending = f"ended with {code} at step {run.step}"
            output = f"seed {seed}, fault {number}, {fault}: {ending}: {run.text}"
            assert code not in (None, 0), output
            # Of two hosts either is cut off from the other; and no rank knows which one is late before MPI is up.
            is_known = run.step and "cut" not in fault.kind
            assert named(run.text, fault.rank if is_known else None), output
        print(f"seed {seed}, fault {number} of {num_faults}, {fault}: {ending}", flush=True)


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
