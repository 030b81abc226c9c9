"""Real launches: mpiexec in a process group of its own, with a deadline, so that nothing stays behind."""

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

from processes import descendants, is_python

ROOT = Path(__file__).parents[2]
_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpiexec")


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
    return (
        pass_on
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_osc": "^ucx",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "HF_HUB_OFFLINE": "1",
        }
        | {k: str(v) for k, v in changes.items()}
    )


_started = []


def start(ranks, *command, cwd=None, **env):
    """Start python with these arguments on some ranks; on one without a launcher if `ranks` is 0."""
    launcher = [MPIEXEC, "-n", str(ranks)] if ranks else []
    return _start([*launcher, sys.executable, *map(str, command)], cwd, env)


def start_shell(commands, cwd):
    """Start commands in bash, with the programs beside python first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return _start(["bash", "-c", commands], cwd, {"PATH": path})


def _start(words, cwd, env):
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env=environment(**env),
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_all():
    """End what a test that failed on the way left running."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            # Launchers end their ranks, which are in process groups of their own, when asked to.
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def finish(process, timeout_s=90):
    """Wait for the end; beyond the deadline everything that was started is killed and the test fails."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=20)
        raise AssertionError(f"did not end within {timeout_s} s\n{out}\n{err}") from None
    return Finished(process.returncode, out, err, time.monotonic() - began)


def kill_a_rank_when(process, condition, timeout_s=90, num_ranks=1):
    """Kill a rank of a launched `odc-mpi train` as soon as the condition holds; the launcher ends the others.

    At least `num_ranks` have started by then.
    """
    end = time.monotonic() + timeout_s
    while len(_ranks_of(process)) < num_ranks or not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.terminate()
            raise AssertionError(process.communicate(timeout=20))
        time.sleep(0.01)
    os.kill(random.choice(_ranks_of(process)), signal.SIGKILL)
    return finish(process)


def _ranks_of(process):
    return [pid for pid, words in descendants(process.pid).items() if is_python(words) and "train" in words]


def script(folder, text):
    """Write a program into a folder; return its path."""
    path = folder / "script.py"
    path.write_text(text)
    return path


def launch(ranks, *command, timeout_s=90, cwd=None, **env):
    return finish(start(ranks, *command, cwd=cwd, **env), timeout_s)


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
