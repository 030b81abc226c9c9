"""The end of a job that cannot go on: every rank ends, whatever it is doing."""

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from mpi4py import MPI

#: MPI_Abort itself may hang on a broken network: after this the process ends by itself.
ABORT_GRACE_S = 10.0
#: A launcher drops what it has not forwarded when the job is aborted; of a traceback once came the first line only.
FORWARD_S = 0.3


def abort(message: str, code: int = 1) -> None:
    """End every rank of the job now, whatever they are doing. Local to call; does not return."""
    print(f"odc_mpi: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(code,))
    timer.daemon = True
    # From Python 3.12 on no thread can be started once the program has ended.
    with suppress(RuntimeError):
        timer.start()
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(code)


def install_excepthook() -> None:
    """Let an exception that leaves the main program end the job, after whoever reported it before. Local."""
    report = sys.excepthook
    if MPI.COMM_WORLD.Get_size() == 1 or getattr(report, "ends_the_job", False):
        return

    def report_and_abort(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> Any:
        if MPI.Is_finalized():
            return report(kind, error, tb)
        print(f"odc_mpi: rank {MPI.COMM_WORLD.Get_rank()} failed:", file=sys.stderr)
        report(kind, error, tb)
        return abort("ending all ranks")

    report_and_abort.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = report_and_abort
