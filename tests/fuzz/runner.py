"""Runs of cases: a child forked from a process that has imported everything, or a process of its own.

A start of `odc-mpi train` imports modules for seconds. The fuzzer imports them once, without starting MPI, and forks a
child per case, which then calls the function of the console script. A child is a process group, killed at its limit.
"""

import atexit
import ctypes
import gc
import importlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import mpi4py
from mpi_launch import MPIEXEC, environment

#: What commands import.
MODULES = (
    *("odc_mpi.data.prepare", "odc_mpi.training.run", "odc_mpi.generation.run", "odc_mpi.generation.generate"),
    *("odc_mpi.checkpoint.commands", "odc_mpi.models.export", "odc_mpi.report.report", "odc_mpi.report.run_report"),
    *("odc_mpi.observe.rank_log", "transformers.models.qwen2.modeling_qwen2", "isal.igzip"),
    *("transformers.generation.utils", "transformers.processing_utils"),
)


class Finished(NamedTuple):
    """The end of a command; `code` is None if it was killed at its limit."""

    code: int | None
    out: str
    err: str


@contextmanager
def copied(case, undamaged, directory):
    """Context manager of a copy of the undamaged files, with the damage of the case."""
    shutil.copytree(undamaged, directory, symlinks=True)
    full = directory / "full"
    full.mkdir()
    if case.mount:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={case.mount}", "tmpfs", full], check=True)
    try:
        case.damage(directory)
        yield
    finally:
        if case.mount:
            subprocess.run(["umount", "-l", full], check=True)
        shutil.rmtree(directory)


def run(case, directory):
    """Run the command of the case in a child and return its end."""
    output = [directory.with_suffix(suffix) for suffix in (".stdout", ".stderr")]
    for path in output:
        path.write_text("")
    pid = os.fork()
    if pid == 0:
        try:
            _enter(case, directory, output)
            if case.real or case.ranks:
                words = [sys.executable, "-m", "odc_mpi", *case.argv]
                words = [MPIEXEC, "-n", str(case.ranks), *words] if case.ranks else words
                os.execve(words[0], [os.fsencode(word) for word in words], dict(os.environ))
            _console(case.argv)
        finally:
            os._exit(70)  # not reached after a command
    code = _wait(pid, case.limit_s)
    return Finished(code, *(path.read_text(errors="replace") for path in output))


def _console(argv):
    """Act as the console script, and end this process as the interpreter does, but without freeing its modules."""
    from mpi4py import MPI

    from odc_mpi.cli.main import main

    sys.argv = ["odc-mpi", *argv]
    if argv[0] in ("train", "generate"):
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code or 0)


def _enter(case, directory, output):
    """Become the process of a case: session, directory, environment, limits, output files."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # PR_SET_PDEATHSIG: end with the fuzzer. A launcher also ends its ranks, and removes their files in /dev/shm.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM if case.ranks else signal.SIGKILL)
    os.setsid()
    os.chdir(directory)
    wanted = environment(PYTHONDONTWRITEBYTECODE="1") | case.env
    os.environ.clear()
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    for descriptor, name in enumerate((os.devnull, *output)):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDWR)
        os.dup2(opened, descriptor)
        os.close(opened)
    for limit, value in {resource.RLIMIT_CORE: 0, **case.limits}.items():
        resource.setrlimit(limit, (value, value))
    # If memory runs out, the kernel kills this process before any other.
    Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL if case.real else signal.SIG_IGN)


def _wait(pid, limit_s):
    """Wait for a process and end its group. Return its exit code, or None after the limit, longer under load."""
    busy = max(1.0, os.getloadavg()[0] / os.cpu_count())
    descriptor = os.pidfd_open(pid)
    ended = bool(select.select([descriptor], [], [], busy * limit_s)[0])
    if not ended:
        os.killpg(pid, signal.SIGTERM)  # a launcher ends its ranks, which are in groups of their own
        select.select([descriptor], [], [], 2)
    os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def import_modules():
    """Import what commands import, without starting MPI."""
    mpi4py.rc.initialize = False
    for module in MODULES:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
