"""Durations of the startup phases, from the start of the process to the end of the first step. Does not use MPI."""

import os
import time
from pathlib import Path

#: Phases, in order. `other` is the setup except for `windows` and `weights`. `evaluation` is everything that
#: callbacks do before the first step, such as computing reference log-probabilities.
PHASES = ("imports", "mpi", "inputs", "probe", "windows", "weights", "other", "evaluation", "first_step")


class StartTimes:
    """Stopwatch for the startup phases. `began` is the start of the first phase, a value of `time.perf_counter`.

    `seconds` contains the duration of each phase so far, keyed by the names in `PHASES`.
    """

    def __init__(self, began: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = began

    def end(self, phase: str, **parts: float) -> None:
        """End `phase`, which began when the previous one ended. Seconds in `parts` count toward other phases."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last - sum(parts.values())
        for part, seconds in parts.items():
            self.seconds[part] += seconds
        self._last = now


def process_start() -> float:
    """Return the start time of this process on the clock of `time.perf_counter`, accurate to 10 ms on Linux."""
    now = time.perf_counter()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # no /proc: the time until this call is not counted
        return now
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
