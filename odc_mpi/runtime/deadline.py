"""A deadline for every wait, and a wait that leaves its core to others.

A blocking MPI call cannot be interrupted from its own thread, and MPI has no time-outs. So one daemon thread looks at
what this rank is waiting for; a wait that outlasts its deadline ends the job with a sentence that says which one it
was. mpi4py releases the GIL in the calls that wait, so the thread gets to look.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

#: A wait polls without pause for this long (a boundary among punctual ranks takes tens of microseconds) ...
SPIN_S = 200e-6
#: ... then sleeps between looks, so that a waiting rank leaves its core to those that compute.
SLEEP_S = 200e-6

#: The description of a wait.
W = TypeVar("W")


class Watchdog(Generic[W]):
    """Calls back once if a watched wait outlasts its deadline.

    Args:
        timeout_s: Seconds that one wait may last.
        on_expiry: Called from the watchdog's thread with the description of the wait; expected to end the process.
        on_poll: Called from the watchdog's thread at each check, at least once a second, until a wait has expired.
    """

    def __init__(
        self, timeout_s: float, on_expiry: Callable[[W], None], on_poll: Callable[[], None] = lambda: None
    ) -> None:
        self.timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._on_poll = on_poll
        self._waits: dict[int, tuple[float, W]] = {}
        self._tokens = itertools.count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="odc_mpi-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, wait: W) -> Iterator[None]:
        """Give the enclosed wait a deadline."""
        token = next(self._tokens)
        self._waits[token] = (time.monotonic() + self.timeout_s, wait)
        try:
            yield
        finally:
            del self._waits[token]

    def close(self) -> None:
        """Stop the watchdog. Local; a second call does nothing."""
        self._closed.set()

    def _poll(self) -> None:
        # A tenth of the deadline is precise enough and costs nothing: this thread wakes at most twenty times a second.
        while not self._closed.wait(min(1.0, max(0.05, self.timeout_s / 10))):
            self._on_poll()
            now = time.monotonic()
            # A copy: other threads add and remove waits while this one looks.
            late = [wait for deadline, wait in list(self._waits.values()) if now > deadline]
            if late:
                self._on_expiry(late[0])
                return


def wait_until(
    condition: Callable[[], bool], poll: Callable[[], object] = lambda: None, patience_s: float = math.inf
) -> bool:
    """Poll until a condition holds, or patience is at its end.

    Args:
        condition: Returns whether the condition holds, such as `Test` of a request of MPI.
        poll: Called again and again.
        patience_s: The most seconds; by default any.

    Returns:
        Whether the condition holds.
    """
    start = time.perf_counter()
    while not condition():
        poll()
        passed = time.perf_counter() - start
        if passed > patience_s:
            return False
        if passed > SPIN_S:
            time.sleep(SLEEP_S)
    return True
