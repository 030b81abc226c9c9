"""The end of a job that cannot go on: every rank ends, whatever it is doing."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI

#: A launcher that does not answer ends nobody, and MPI_Abort hangs then (Open MPI) or returns (MPICH): after so many
#: seconds the process ends by itself.
ABORT_GRACE_S = 10.0
#: A launcher drops what it has not forwarded when the job is aborted; of a traceback once came the first line only.
FORWARD_S = 0.3
STDERR = 2
#: How the names of all threads of this package begin.
OUR_THREADS = "odc_mpi"


def abort(message: str, code: int = 1) -> NoReturn:
    """End every rank of the job now, whatever they are doing. Local to call; does not return."""
    # Where nobody reads any more, the job still has to end.
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        # Straight to the descriptor: what stands in for sys.stderr, such as pytest's, would keep it to itself.
        os.write(STDERR, f"odc_mpi: {message}\n".encode(errors="backslashreplace"))
    # Not a thread of Python's: mpi4py keeps its lock during MPI_Abort.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lasts
    faulthandler.dump_traceback_later(FORWARD_S + ABORT_GRACE_S, exit=True, file=nowhere)
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(code)
    time.sleep(ABORT_GRACE_S / 2)
    os._exit(code)


def install_excepthooks() -> None:
    """Let an exception that ends the main program, or a thread of this package, end the job.

    The job ends after the hook that was there before has reported the exception. Without its threads the package would
    go on in silence, and no wait would have a deadline any more. A user's own thread is the user's affair, as under
    plain Python: its exception is printed, and the main program goes on.
    """
    report, report_of_thread = sys.excepthook, threading.excepthook
    if getattr(report_of_thread, "ends_the_job", False):
        return

    def main_failed(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        with _ending(MPI.COMM_WORLD.Get_size() > 1, "failed"):
            report(kind, error, tb)

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread is not None else ""
        with _ending(name.startswith(OUR_THREADS), f"failed in its thread {name}"):
            report_of_thread(failed)

    thread_failed.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = main_failed, thread_failed


@contextmanager
def _ending(ends_the_job: bool, what: str) -> Iterator[None]:
    """Enclose the report of an exception, after which the job ends if it is to."""
    ends_the_job = ends_the_job and not MPI.Is_finalized()
    if ends_the_job:
        print(f"odc_mpi: rank {MPI.COMM_WORLD.Get_rank()} {what}:", file=sys.stderr)
    yield
    if ends_the_job:
        abort("ending all ranks")
