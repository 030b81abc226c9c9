"""Real launches: a `Job` has its output in memory, deadlines, and a mark by which all of its processes are found."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from processes import command_line, is_python, is_running

ROOT = Path(__file__).parents[2]
_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpiexec")
#: Seconds that launchers take to end the last of what they started.
GRACE_S = 10.0
#: Names each job in the environment of all of its processes, also of those that it has lost.
MARK = "ODC_MPI_TEST_JOB"
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass
class Finished:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self):
        """Both streams without what launchers add."""
        noise = ("===", "|", "BAD TERMINATION", "YOUR APPLICATION", "prterun", "---", "Abort(", "MPI_ABORT", "Proc:")
        return [line for line in (self.out + self.err).splitlines() if line.strip() and not line.startswith(noise)]


def environment(**changes):
    pass_on = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "PMIX", "OMPI_COMM", "PYTEST"))}
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return pass_on | MPI | usual | {k: str(v) for k, v in changes.items()}


def wait_until(is_so, timeout_s=GRACE_S, every_s=0.02):
    """Look again and again; return whether it came to be so in time."""
    deadline = time.monotonic() + timeout_s
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return so


#: Jobs that nobody has seen end.
_started = []


class Job:
    """A command in a process group of its own. A wait for it that takes `timeout_s` ends it, and fails."""

    def __init__(self, words, cwd=None, env=None, timeout_s=90, ended_by=signal.SIGTERM):
        number = f"{os.getpid()}-{time.monotonic_ns()}"
        self._mark = f"{MARK}={number}"
        self._streams = os.memfd_create("out"), os.memfd_create("err")
        self._timeout_s, self._ended_by = timeout_s, ended_by
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=self._streams[0],
            stderr=self._streams[1],
            cwd=cwd,
            env={MARK: number} | (environment() if env is None else env),
            start_new_session=True,
        )
        self.pid, self.poll, self.send_signal = self._process.pid, self._process.poll, self._process.send_signal
        _started.append(self)

    def __del__(self):
        for stream in self._streams:
            os.close(stream)

    @property
    def out(self):
        return self._read(self._streams[0])

    @property
    def err(self):
        return self._read(self._streams[1])

    @staticmethod
    def _read(stream):
        return os.pread(stream, os.fstat(stream).st_size, 0).decode(errors="replace")

    def processes(self):
        """The environments of all running processes of this job, by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # ended meanwhile
                variables = path.read_bytes().decode(errors="replace").split("\0")
                if self._mark in variables and is_running(int(path.parent.name)):
                    found[int(path.parent.name)] = dict(word.partition("=")[::2] for word in variables)
        return found

    def ranks(self):
        """The process ids of its ranks, by rank."""
        found = {}
        for pid, variables in sorted(self.processes().items(), reverse=True):
            rank = variables.get("PMI_RANK") or variables.get("OMPI_COMM_WORLD_RANK")
            if rank and is_python(command_line(pid)):
                found[int(rank)] = pid  # of a rank's children, the rank, which is older
        return found

    def wait_until(self, is_so):
        """Wait for what comes before the end of the job."""
        deadline = time.monotonic() + self._timeout_s
        while not is_so():
            is_over = self.poll() is not None or time.monotonic() > deadline
            if is_over and not is_so():
                self.end()
                raise AssertionError(f"it ended before, or did not come to this within {self._timeout_s} s{self.text}")
            time.sleep(0.01)

    def wait_for(self, words):
        """Wait until words are printed."""
        self.wait_until(lambda: words in f" {self.out}".replace("\n", "\n "))

    @property
    def text(self):
        return f"\n{self.out}\n{self.err}"

    def finish(self, timeout_s=None):
        """Wait for the end, after which nothing may run on. Beyond the deadline all is killed, and the test fails."""
        began, limit_s = time.monotonic(), timeout_s or self._timeout_s
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {limit_s} s{self.text}") from None
        finally:
            seconds = time.monotonic() - began
            self.end()
        return Finished(self.poll(), self.out, self.err, seconds)

    def kill_a_rank(self):
        """End any rank at once; return how the launcher ends."""
        os.kill(random.choice(list(self.ranks().values())), signal.SIGKILL)
        return self.finish()

    def end(self):
        """End what still runs; fail if a job that had ended left something behind."""
        if self in _started:
            _started.remove(self)
        had_ended = self.poll() is not None
        if not had_ended:
            # Launchers end their ranks, which are in process groups of their own, when asked to.
            self._process.send_signal(self._ended_by)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        wait_until(lambda: not self.processes())
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(GRACE_S)
        assert not (had_ended and left), f"processes outlived the job: {left}{self.text}"


def start(ranks, *command, timeout_s=90, cwd=None, **env):
    """Start python with these arguments on some ranks; on one without a launcher if `ranks` is 0."""
    launcher = [MPIEXEC, "-n", ranks] if ranks else []
    return Job([*launcher, sys.executable, *command], cwd, environment(**env), timeout_s)


def start_shell(commands, cwd, timeout_s=90):
    """Start commands in bash, with the programs beside python first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return Job(["bash", "-c", commands], cwd, environment(PATH=path), timeout_s)


def end_all():
    """End what a test that failed on the way left running."""
    while _started:
        _started[-1].end()


def finish(job, timeout_s=None):
    return job.finish(timeout_s)


def kill_a_rank_when(job, condition, num_ranks=1):
    """Kill a rank as soon as the condition holds, and so many ranks have started; the launcher ends the others."""
    job.wait_until(lambda: condition() and len(job.ranks()) >= num_ranks)
    return job.kill_a_rank()


def script(folder, text):
    """Write a program into a folder; return its path."""
    path = folder / "script.py"
    path.write_text(text)
    return path


def launch(ranks, *command, **options):
    return start(ranks, *command, **options).finish()


def odc_mpi(ranks, *arguments, **options):
    return launch(ranks, "-m", "odc_mpi", *arguments, **options)


def left_behind(before):
    """Return new entries of /dev/shm that no process has mapped."""
    new = set(Path("/dev/shm").iterdir()) - before
    if not new:
        return new
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return {path for path in new if str(path) not in mapped}
