"""Running a command on all ranks: MPI startup, time limits, error handling, and exit codes. Does not import MPI itself.

The watchdog cannot check MPI_Init, which holds the GIL, and MPI_Finalize, which runs after the interpreter has ended.
If either hangs, for example because another rank is stopped, the kernel ends this process with SIGALRM, and the
launcher then ends all ranks.
"""

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.errors import AllRanksUserError, StoppedError, TrainingError, UserError, one_line_message
from odc_mpi.runtime.failure import report_failure

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

#: Default of ODC_MPI_START_TIMEOUT_S, the time limit for MPI_Init in seconds. Thousands of ranks may take minutes.
START_S = 300.0
#: Minimum time limit for MPI_Finalize, in seconds. With more processes than cores, MPI_Finalize takes seconds.
END_S = 10.0
#: EX_TEMPFAIL from sysexits.h. A scheduler can be configured to requeue jobs that end with this exit code.
_STOPPED = 75


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager that pauses garbage collection during imports, then exempts all objects from it (`gc.freeze`).

    torch and transformers create half a million permanent objects. Garbage collection would take a third of the import
    time, and each later full collection would take 0.2 s, at a different time on every rank.
    """
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def mpi_startup() -> Iterator[None]:
    """Context manager for imports that start MPI. Main thread only.

    Ends this process if MPI does not start within ODC_MPI_START_TIMEOUT_S. Raises `UserError` if there is no MPI
    library, or if the library does not support the launcher.
    """
    from odc_mpi.runtime.start.pmi import check_before_start

    try:
        seconds = float(os.environ.get("ODC_MPI_START_TIMEOUT_S", START_S))
    except ValueError:
        seconds = START_S
    before = _arm(seconds if seconds > 0 else START_S)
    try:
        check_before_start()
        yield
    except (ImportError, RuntimeError) as error:
        if not re.search(r"cannot load MPI|libmpi", str(error)):
            raise
        raise UserError(
            f"no MPI library found ({one_line_message(error)}): pip install 'odc_mpi[mpich]', "
            "or load the library of your cluster"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_finalize(seconds: float) -> None:
    """Set a timer that ends this process after the larger of `seconds` and `END_S`, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        _arm(max(seconds, END_S))


def exit_as_interrupted() -> None:
    """End this process with SIGINT, as an uncaught `KeyboardInterrupt` does. The launcher then ends the other ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def run_on_all_ranks(world: "World", work: Callable[[], object]) -> int:
    """Call `work` on all ranks, close the world, and return the exit code of the process. Collective.

    A `UserError` that other ranks may not have raised, or an interrupt, aborts the whole job. After an error that all
    ranks raise (`AllRanksUserError`, `TrainingError`), rank 0 prints it, and the world closes when the program ends.
    """
    from odc_mpi.runtime.abort import abort

    code = 0
    try:
        work()
    except StoppedError as stopped:
        code = _report_stopped(stopped, world.rank)
    except (AllRanksUserError, TrainingError) as error:
        if world.rank == 0:
            if isinstance(error, TrainingError):
                report_failure(error, 0, final=True)
            print_error(error)
        return 2 if isinstance(error, UserError) else 1
    except UserError as error:
        # Perhaps only this rank raised: the others may wait for it.
        abort(f"rank {world.rank}: {error}", code=2)
    except KeyboardInterrupt:
        abort("interrupted", code=130)
    world.close()
    return code


def _report_stopped(stopped: StoppedError, rank: int) -> int:
    """Print that the run stopped as requested, and return the exit code.

    The exit code is 75. Some launchers end all ranks at the first nonzero exit code, and would kill slower ranks. For
    these, if ODC_MPI_STOPPED_FILE names a file, rank 0 creates it and the code is 0, except on rank 0 if that fails.
    """
    path = os.environ.get("ODC_MPI_STOPPED_FILE")
    if rank == 0:
        print(f"odc-mpi: {stopped}", file=sys.stderr, flush=True)
    if rank == 0 and path:
        try:
            Path(path).touch()
        except OSError as error:
            print(f"odc-mpi: cannot write ODC_MPI_STOPPED_FILE={path}: {error.strerror}", file=sys.stderr, flush=True)
            return _STOPPED
    return 0 if path else _STOPPED


def print_error(error: object) -> None:
    """Print an error to standard error."""
    print(f"odc-mpi: error: {error}", file=sys.stderr, flush=True)


def _arm(seconds: float) -> signal.Handlers:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # `setitimer` rejects very large values; a year is as good as no limit.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 3e7))
    return before  # type: ignore[return-value]
