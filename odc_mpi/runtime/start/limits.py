"""Time limits for MPI_Init and MPI_Finalize, which the watchdog cannot check. Does not use MPI.

MPI_Init runs during an import and holds the GIL, and MPI_Finalize runs after the interpreter has ended. If either
hangs, for example because another rank is stopped, the kernel ends this process with SIGALRM, and the launcher then
ends all ranks.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Default of ODC_MPI_START_TIMEOUT_S, the time limit for MPI_Init in seconds. Thousands of ranks may take minutes.
START_S = 300.0
#: Minimum time limit for MPI_Finalize, in seconds. With more processes than cores, MPI_Finalize takes seconds.
END_S = 10.0


@contextmanager
def start_limit() -> Iterator[None]:
    """Context manager that ends this process if its block, which starts MPI, takes too long. Main thread only."""
    before = _arm(_start_s())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_finalize(seconds: float) -> None:
    """In the main thread, set a timer that ends this process after the larger of `seconds` and `END_S`."""
    if threading.current_thread() is threading.main_thread():
        _arm(max(seconds, END_S))


def exit_as_interrupted() -> None:
    """End this process with SIGINT, like an uncaught `KeyboardInterrupt`. The launcher then ends the other ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _arm(seconds: float) -> signal.Handlers:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # `setitimer` rejects very large values; a year is as good as no limit.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 3e7))
    return before  # type: ignore[return-value]


def _start_s() -> float:
    try:
        seconds = float(os.environ.get("ODC_MPI_START_TIMEOUT_S", START_S))
    except ValueError:
        return START_S
    return seconds if seconds > 0 else START_S
