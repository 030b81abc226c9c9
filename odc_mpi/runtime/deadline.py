"""Deadlines for waits, and polling that yields the core.

A blocking MPI call cannot be interrupted from its own thread, and MPI has no timeouts. Therefore, a daemon thread, the
watchdog, checks the current waits of this rank. It runs during blocking calls because mpi4py releases the GIL in them.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Time for which a wait polls without pausing, in seconds. A barrier takes tens of microseconds if the ranks arrive at
#: the same time.
SPIN_S = 200e-6
#: Time for which a longer wait sleeps between polls, in seconds, so that other ranks can compute on the core.
SLEEP_S = 200e-6


class Watchdog:
    """Thread that calls `on_expiry` when a wait exceeds its deadline, `timeout_s` seconds after the wait began.

    Args:
        on_expiry: Function called in the watchdog thread with the description of the wait and its duration so far in
            seconds. It returns the number of seconds from now until the new deadline, or 0 to end the watchdog thread.
            It may also end the process.
        on_poll: Function called in the watchdog thread before each check, at least once per second except while
            `on_expiry` is running.
    """

    def __init__(
        self, timeout_s: float, on_expiry: Callable[[Any, float], float], on_poll: Callable[[], None] = lambda: None
    ) -> None:
        self.timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._on_poll = on_poll
        self._waits: dict[int, _Wait] = {}
        self._tokens = itertools.count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="odc_mpi-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, wait: object) -> Iterator[None]:
        """Context manager that sets a deadline for a wait. `wait` is the description passed to `on_expiry`."""
        token = next(self._tokens)
        began = time.monotonic()
        self._waits[token] = _Wait(wait, began, began + self.timeout_s)
        try:
            yield
        finally:
            del self._waits[token]

    def close(self) -> None:
        """Stop the watchdog."""
        self._closed.set()

    def _poll(self) -> None:
        # A tenth of the deadline is precise enough, and at most twenty checks per second cost nothing.
        while not self._closed.wait(min(1.0, max(0.05, self.timeout_s / 10))):
            self._on_poll()
            # A copy, since other threads add and remove waits.
            for wait in list(self._waits.values()):
                now = time.monotonic()
                if now > wait.deadline:
                    extension_s = self._on_expiry(wait.what, now - wait.began)
                    if not extension_s:
                        return
                    wait.deadline = time.monotonic() + extension_s


@dataclass
class _Wait:
    what: object
    began: float
    deadline: float


def wait_until(
    condition: Callable[[], bool], poll: Callable[[], object] = lambda: None, patience_s: float = math.inf
) -> bool:
    """Call `condition`, such as `Test` of an MPI request, until it returns True or `patience_s` seconds have passed.

    `poll` is called whenever `condition` returns False. Returns True if the condition was met, or False on timeout.
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
