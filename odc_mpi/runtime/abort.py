"""The end of a job that cannot go on: every rank ends, whatever it is doing."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from odc_mpi.errors import UserError

#: A launcher that does not answer ends nobody, and MPI_Abort hangs then (Open MPI) or returns (MPICH): after so many
#: seconds the process ends by itself.
ABORT_GRACE_S = 10.0
#: A launcher drops what it has not forwarded when the job is aborted; of a traceback once came the first line only.
FORWARD_S = 0.3
STDERR = 2


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


def run_child(main: Callable[[list[str]], None]) -> None:
    """Run the main function of a process that does its parent's part in a job; an error ends this process alone.

    Not the job: by way of MPI_Abort it would end the parents, which are to tell the answer. Local, but for what the
    function does.
    """
    try:
        main(sys.argv[1:])
    except Exception as error:
        traceback.print_exception(error, limit=0 if isinstance(error, UserError) else None)
        sys.stderr.flush()
        os._exit(1)


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
