"""Callback that sends the metrics of a run to trackers such as TensorBoard. Only rank 0 has trackers.

Each tracker has a thread, so no step waits for a tracker. A tracker that is too slow, hangs or fails is disabled with a
warning. The tags are those of the callbacks in transformers, such as `train/loss` and `eval/loss`.

The files of trackers are in `trackers/` of the run directory. A tracker cannot delete points. A resumed run therefore
starts a new series, and first writes the steps before the checkpoint from metrics.jsonl. Repeated steps appear once.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from odc_mpi.errors import one_line_message, warn
from odc_mpi.observe import trackers
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import read_metrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

DIRECTORY = "trackers"
#: Maximum number of steps in the queue of a tracker. A tracker that falls further behind is disabled.
MAX_WAITING = 10_000
#: Time for trackers to write their queued steps at the end of a run, in seconds.
FINISH_S = 30.0
#: Step number, and values of the step by tag. Step 0 is the state before the first step.
LogRecord: TypeAlias = tuple[int, dict[str, float]]


class TrackerCallback(Callback):
    """Sends the metrics of every step to trackers. Must run after the callbacks that add the metrics.

    Args:
        names: Names of the trackers, keys of `trackers.TRACKERS`. Must be empty on all ranks except 0.
        finish_s: Maximum time to wait for the trackers at the end of the run, in seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Mapping[str, Any],
        finish_s: float = FINISH_S,
    ) -> None:
        self._names, self._run_dir, self._finish_s = dict.fromkeys(names), run_dir, finish_s
        self._config = config
        self._threads: list[TrackerThread] = []

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Start a thread per tracker. The threads first write the steps that are in metrics.jsonl."""
        if not self._names:
            return
        previous = [_record(line) for line in read_metrics(self._run_dir, completed_steps)]
        run_name = self._run_dir.resolve().name
        for name in self._names:
            make = partial(trackers.start_tracker, name, self._run_dir / DIRECTORY / name, run_name, self._config)
            self._threads.append(TrackerThread(name, make, previous))

    def on_step_end(self, step: Step) -> None:
        """Queue the metrics of the step and return immediately."""
        for thread in self._threads:
            thread.put([_record(step.metrics)])

    def close(self) -> None:
        """Wait for the trackers to write their queued steps, for at most `finish_s` in total."""
        end = time.monotonic() + self._finish_s
        for thread in self._threads:
            thread.put(None)
        while self._threads:
            self._threads.pop().join(max(0.0, end - time.monotonic()))


class TrackerThread:
    """Thread that creates a tracker with `make`, writes the records in `previous`, and then writes queued steps."""

    def __init__(self, name: str, make: Callable[[], "GeneralTracker"], previous: list[LogRecord]) -> None:
        self._name, self._make = name, make
        self._failed = False
        self._waiting: queue.Queue[list[LogRecord] | None] = queue.Queue(MAX_WAITING)
        self._waiting.put_nowait(previous)
        self._thread = threading.Thread(target=self._run, name=f"odc_mpi-{name}", daemon=True)
        self._thread.start()

    def put(self, records: list[LogRecord] | None) -> None:
        """Queue the records of a step. None ends the thread. If the queue is full, disable the tracker and warn."""
        if self._failed:
            return
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end. If it does not end within `timeout_s`, disable the tracker and warn."""
        if not self._failed:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._give_up("it did not write the last steps in time")

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (records := self._waiting.get()) is not None and not self._failed:
                for step, values in records:
                    tracker.log(values, step=step)
            tracker.finish()
        except BaseException as error:  # also SystemExit: no error of a library ends the run
            self._give_up(one_line_message(error))

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            warn(f"WARNING: run.report_to: {self._name} disabled for the rest of the run: {reason}")


def _record(metrics: Mapping[str, Any]) -> LogRecord:
    return int(metrics["step"]), metrics_by_tag({key: value for key, value in metrics.items() if key != "step"})


def metrics_by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in `metrics`, by tag. The tags are those of `rewrite_logs` in transformers."""
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": number
        for key, number in numbers.items()
        if math.isfinite(number)
    }
