"""Durations of the phases of a start, from the start of the process to the end of the first step. Does not use MPI."""

import os
import time
from pathlib import Path

#: Phases in order. Windows and weights are parts of sharding the model.
PHASES = ("imports", "mpi", "inputs", "probe", "windows", "weights", "other", "evaluation", "first_step")


class StartTimes:
    """Duration of each phase so far in `seconds`. The first phase began at `began`, a time of `time.perf_counter`."""

    def __init__(self, began: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = began

    def end(self, phase: str, **parts: float) -> None:
        """Add the time since the last call to `phase`, without the seconds in `parts`, which belong to other phases."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last - sum(parts.values())
        for part, seconds in parts.items():
            self.seconds[part] += seconds
        self._last = now


def process_start() -> float:
    """Return the start time of this process as a value of `time.perf_counter`, exact to 10 ms."""
    since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
