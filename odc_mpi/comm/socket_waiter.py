"""Sleep that ends early when data arrives on one of this process's TCP connections.

MPI libraries do not report the arrival of a message, but `poll(2)` does. This module does not read the data.
"""

import os
import select
import socket
import stat
import time
from pathlib import Path

#: Directory that lists this process's open file descriptors.
OPEN_FILES = Path("/proc/self/fd")
#: Time between searches for new connections, in seconds.
RESCAN_S = 1.0
#: Minimum time between polls, in seconds. `poll(2)` waits in units of `POLL_S`, so shorter waits use `time.sleep`.
MIN_WAIT_S = 50e-6
POLL_S = 1e-3
#: Maximum number of consecutive polls that find a socket readable. After that, it is ignored until its data is read.
MAX_CONSECUTIVE = 200


class SocketWaiter:
    """Sleeper that wakes up early when data arrives on one of this process's TCP connections. Not thread-safe."""

    def __init__(self) -> None:
        self._scanned = float("-inf")
        self._poll = select.poll()
        self._num_consecutive: dict[int, int] = {}
        self._ignored: set[int] = set()

    @property
    def has_sockets(self) -> bool:
        """True if `wait` currently polls any TCP connections."""
        return bool(self._num_consecutive)

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds` or until data arrives. Sleeps shorter than `POLL_S` never end early."""
        if time.perf_counter() > self._scanned + RESCAN_S:
            self._scan()
        if seconds < POLL_S or not self._num_consecutive:
            time.sleep(seconds)
            return
        if any(self._num_consecutive.values()):
            time.sleep(MIN_WAIT_S)
        ready = set()
        for fd, event in self._poll.poll(1e3 * seconds):
            if event & select.POLLNVAL:
                self._ignore(fd)
            else:
                ready.add(fd)
        for fd in list(self._num_consecutive):
            self._num_consecutive[fd] = self._num_consecutive[fd] + 1 if fd in ready else 0
            if self._num_consecutive[fd] > MAX_CONSECUTIVE:
                self._ignored.add(fd)
                self._ignore(fd)

    def _scan(self) -> None:
        self._scanned = time.perf_counter()
        connections = _connections()
        # Ignored sockets whose data has been read are polled again.
        self._ignored = {fd for fd in self._ignored & connections if _is_readable(fd)}
        for fd in set(self._num_consecutive) - connections:
            self._ignore(fd)
        for fd in connections - set(self._num_consecutive) - self._ignored:
            self._num_consecutive[fd] = 0
            self._poll.register(fd, select.POLLIN)

    def _ignore(self, fd: int) -> None:
        del self._num_consecutive[fd]
        self._poll.unregister(fd)


def _connections() -> set[int]:
    """Return the TCP sockets of this process, or an empty set if identifying them would modify them."""
    if socket.getdefaulttimeout() is not None:
        return set()  # `socket.socket` would make each socket non-blocking
    try:
        fds = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:
        return set()
    return {fd for fd in fds if _is_tcp(fd)}


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # accepts descriptors above 1023 and closed ones, unlike `select`
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _is_tcp(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        connection = socket.socket(fileno=fd)
    except OSError:  # closed since it was listed
        return False
    try:
        return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    finally:
        connection.detach()  # do not close it
