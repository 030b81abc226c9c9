"""Callback that sends the metrics of a run to trackers such as TensorBoard. On rank 0.

Each tracker has a thread, so no step waits for its library. A tracker that is too slow, hangs or fails is disabled with
a warning. The tags are those of the callbacks of transformers: `train/loss`, `eval/loss`.

Files of trackers are in `trackers/` of the run directory. A tracker cannot delete points, so a resumed run starts a new
series with the steps before the checkpoint, from metrics.jsonl. Repeated steps then appear once.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
#: Maximum number of steps that are queued for a tracker; a slower tracker is disabled.
MAX_WAITING = 10_000
#: Seconds that trackers have at the end of a run to write their queued steps.
FINISH_S = 30.0
#: Step and its values by tag. Step 0 is before the first.
LogRecord: TypeAlias = tuple[int, dict[str, float]]


class TrackerCallback(Callback):
    """Sends the metrics of every step to trackers. Runs after the callbacks that fill the metrics.

    Args:
        names: Keys of `trackers.TRACKERS`; empty on all ranks except 0.
        run_dir: Directory with metrics.jsonl.
        config: All settings by name.
        steps_per_epoch: Steps of a pass over the data.
        finish_s: Seconds to wait for the trackers at the end.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Mapping[str, Any],
        steps_per_epoch: int,
        finish_s: float = FINISH_S,
    ) -> None:
        self._names, self._run_dir, self._finish_s = dict.fromkeys(names), run_dir, finish_s
        self._config, self._steps_per_epoch = config, steps_per_epoch
        self._threads: list[TrackerThread] = []

    def on_train_begin(self, completed_steps: int) -> None:
        """Start the threads, which first write the completed steps."""
        if not self._names:
            return
        previous = [record for line in read_metrics(self._run_dir, completed_steps) for record in self._records(line)]
        run_name = self._run_dir.resolve().name
        for name in self._names:
            make = partial(trackers.start_tracker, name, self._run_dir / DIRECTORY / name, run_name, self._config)
            self._threads.append(TrackerThread(name, make, previous))

    def on_step_end(self, step: Step) -> None:
        """Queue the metrics of the step and return immediately."""
        for thread in self._threads:
            thread.put(list(self._records(step.metrics)))

    def close(self) -> None:
        """Wait up to `finish_s` for the trackers to write their queues."""
        end = time.monotonic() + self._finish_s
        for thread in self._threads:
            thread.put(None)
        while self._threads:
            self._threads.pop().join(max(0.0, end - time.monotonic()))

    def _records(self, metrics: Mapping[str, Any]) -> Iterator[LogRecord]:
        metrics = dict(metrics)
        step = int(metrics.pop("step"))
        at_start = {name.removesuffix("_start"): metrics.pop(name) for name in list(metrics) if name.endswith("_start")}
        if at_start:
            yield step - 1, metrics_by_tag(at_start)
        yield step, metrics_by_tag({"epoch": step / self._steps_per_epoch, **metrics})


class TrackerThread:
    """Thread that writes queued steps to a tracker. It creates the tracker, too."""

    def __init__(self, name: str, make: Callable[[], "GeneralTracker"], previous: list[LogRecord]) -> None:
        self._name, self._make = name, make
        self._failed = False
        self._waiting: queue.Queue[list[LogRecord] | None] = queue.Queue(MAX_WAITING)
        self._waiting.put_nowait(previous)
        self._thread = threading.Thread(target=self._run, name=f"odc_mpi-{name}", daemon=True)
        self._thread.start()

    def put(self, records: list[LogRecord] | None) -> None:
        """Queue the records of a step; None ends the thread. A full queue disables the tracker with a warning."""
        if self._failed:
            return
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; disable the tracker with a warning if it does not end in time."""
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


def metrics_by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers by tag, in the form of `rewrite_logs` of transformers."""
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": number
        for key, number in numbers.items()
        if math.isfinite(number)
    }
