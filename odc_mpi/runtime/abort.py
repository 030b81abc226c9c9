"""Functions that abort the whole job after an error on one rank."""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI

from odc_mpi.runtime.failure import report_failure

#: Time after which a process ends itself, in seconds. If the launcher does not respond, MPI_Abort hangs (Open MPI) or
#: returns (MPICH), and would leave all processes running.
ABORT_GRACE_S = 10.0
#: Time that the launcher has to forward output before the abort, in seconds. On abort, a launcher discards pending
#: output, so without this pause, only the first line of a traceback may appear.
FORWARD_S = 0.3
STDERR = 2
#: Prefix of the names of this package's threads in processes that use MPI.
THREAD_NAME_PREFIX = "odc_mpi"


def abort(message: str, code: int = 1) -> NoReturn:
    """Print a message, and end all ranks of the job with MPI_Abort. Any single rank may call this. Does not return."""
    # The job must also end if standard error is closed.
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        # To the descriptor: a replacement of sys.stderr, such as the one of pytest, would keep the message.
        os.write(STDERR, f"odc_mpi: {message}\n".encode(errors="backslashreplace"))
    # Not a Python thread: mpi4py holds the GIL during MPI_Abort.
    devnull = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    faulthandler.dump_traceback_later(FORWARD_S + ABORT_GRACE_S, exit=True, file=devnull)
    report_failure(message, MPI.COMM_WORLD.Get_rank())
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(code)
    time.sleep(ABORT_GRACE_S / 2)
    os._exit(code)


def install_excepthooks(reported_by: Callable[[BaseException, str], int | None]) -> None:
    """Install exception hooks that end the job after an uncaught exception. Idempotent.

    The hooks apply to the threads of this package and, in a job of several ranks, to the main thread, because other
    ranks could wait forever for a thread that ended silently. The previous hook prints the exception before the abort.

    `reported_by` publishes an exception that the main thread raised, and the place, and returns the lowest rank below
    this rank that has published the same, or None. If it returns a rank, only that rank prints a traceback.
    """
    main_hook, thread_hook, pid = sys.excepthook, threading.excepthook, os.getpid()
    if getattr(thread_hook, "ends_the_job", False):
        return

    def main_failed(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() != pid:  # a forked child: MPI_Finalize, which mpi4py calls at its end, would break the job
            main_hook(kind, error, tb)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        place = traceback.extract_tb(tb)[-1:]
        other = reported_by(error, f"{place}")
        if other is not None:
            time.sleep(ABORT_GRACE_S)  # that rank aborts the job, unless it is stuck
            abort(f"rank {MPI.COMM_WORLD.Get_rank()} failed with the same error as rank {other}")
        with _abort_after_report(MPI.COMM_WORLD.Get_size() > 1, "failed"):
            main_hook(kind, error, tb)

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread is not None else ""
        with _abort_after_report(name.startswith(THREAD_NAME_PREFIX), f"failed in its thread {name}"):
            thread_hook(failed)

    thread_failed.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = main_failed, thread_failed


@contextmanager
def _abort_after_report(ends_the_job: bool, what: str) -> Iterator[None]:
    ends_the_job = ends_the_job and not MPI.Is_finalized()
    if ends_the_job:
        print(f"odc_mpi: rank {MPI.COMM_WORLD.Get_rank()} {what}:", file=sys.stderr)
    yield
    if ends_the_job:
        abort("ending all ranks")
