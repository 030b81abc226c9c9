"""The process of a launcher: started, signaled, and ended when it does not end by itself."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"odc-mpi: interrupted; saving after this step. Press Ctrl-C again to end at once\n"
#: Seconds between checks of a launcher and of the run directory.
_POLL_S = 0.1
#: Seconds that a launcher has to end after a rank has reported a failure, and again after SIGTERM. It may wait forever
#: for a host that is gone.
_GRACE_S = 4.0
#: Seconds after the first signal during which others are ignored, since they may have the same origin.
_REPEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


class LauncherProcess:
    """Context manager that handles signals of this process, and runs one launcher at a time. Main thread only.

    The first signal asks the ranks to save and end: by SIGUSR1, which all launchers forward (docs/checkpoints.md). A
    later SIGTERM or Ctrl-C ends the launcher.

    Attributes:
        stop_requested: True after the first signal.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._signaled_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LauncherProcess":
        self._previous: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before)

    def run(self, command: Sequence[str], failure_file: Path, look: Callable[[], object]) -> int:
        """Run a launcher to its end, and return its exit code, or 128 plus the signal that ended it.

        Calls `look` periodically. Ends the launcher if it runs on after `failure_file` has appeared.
        """
        libc = ctypes.CDLL(None)
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # In a session of its own, so that Ctrl-C does not reach it. If this process is killed, launchers clean up.
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if self.stop_requested:
            process.send_signal(signal.SIGUSR1)
        failed_at = 0.0
        while process.poll() is None:
            time.sleep(_POLL_S)
            look()
            failed_at = failed_at or (time.monotonic() if failure_file.exists() else 0.0)
            late_s = time.monotonic() - failed_at if failed_at else 0.0
            if late_s > _GRACE_S:
                process.send_signal(signal.SIGTERM if late_s < 2 * _GRACE_S else signal.SIGKILL)
                time.sleep(_GRACE_S - _POLL_S)
        code = process.returncode
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), not self.stop_requested
        if is_first:
            self.stop_requested, self._signaled_at = True, now
            if number == signal.SIGINT:
                os.write(2, _INTERRUPTED)  # not with print, which the signal may have interrupted
        if self._process is None or not (is_first or now > self._signaled_at + _REPEAT_S):
            return
        if is_first or number != signal.SIGUSR1:
            self._process.send_signal(signal.SIGUSR1 if is_first else signal.SIGTERM)
