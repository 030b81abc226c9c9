"""Sleeping until something comes over the network, where the network is one of TCP connections.

MPI libraries tell nobody when a message has come: one has to look. The kernel does, for a connection that somebody else
reads: of all TCP sockets of this process it is asked which have something to read. Nothing is read here.
"""

import os
import select
import socket
import stat
import time
from pathlib import Path

#: Where the system lists the files that this process has open.
OPEN_FILES = Path("/proc/self/fd")
#: How often to look for connections that were made meanwhile.
RESCAN_S = 1.0
#: The least time between two answers. The kernel's own unit of a wait is 1 ms; what is shorter is slept.
MIN_WAIT_S = 50e-6
POLL_S = 1e-3
#: A socket that has something to read so many times in a row is read by nobody, or slowly: it is left out for a while.
MAX_CONSECUTIVE = 200


class SocketWaiter:
    """Waits for what comes over this process's TCP connections. For one thread."""

    def __init__(self) -> None:
        self._scanned = float("-inf")
        self._poll = select.poll()
        self._num_consecutive: dict[int, int] = {}
        self._ignored: set[int] = set()

    @property
    def has_sockets(self) -> bool:
        """Whether there are connections at all."""
        return bool(self._num_consecutive)

    def wait(self, seconds: float) -> None:
        """Sleep for so long at most, less if something comes."""
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
        # Those that were left out may come back when all is read.
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
    """Return the TCP sockets of this process; none where they cannot be told without a change to them."""
    if socket.getdefaulttimeout() is not None:
        return set()  # Python would make every socket that it looks at a non-blocking one
    try:
        listed = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:
        return set()
    return {fd for fd in listed if _is_tcp(fd)}


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # takes any number of a file, and closed ones, which `select` does not
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _is_tcp(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        found = socket.socket(fileno=fd)
    except OSError:  # closed meanwhile
        return False
    try:
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    finally:
        found.detach()  # somebody else's
