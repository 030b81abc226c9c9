"""A run's metrics for trackers, such as TensorBoard, which show the series of many runs. Local; for rank 0.

Each tracker has a thread, so no step waits for a library: one that is too slow, hangs or fails is given up with a
warning. The tags are those that transformers' callbacks write: `train/loss`, `eval/loss`.

A tracker's files are in `trackers/` of the run directory. A tracker cannot take back what it has written; so a run that
resumes writes all steps before the checkpoint to a new series, from metrics.jsonl, and steps that it repeats are there
once.
"""

import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from odc_mpi.errors import one_line_message, warn
from odc_mpi.observe import trackers
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import read_metrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

#: The directory of all trackers' files in a run directory.
DIRECTORY = "trackers"
#: Points that may wait for a tracker; what comes then is lost.
MAX_WAITING = 10_000
#: At the end of a run a tracker gets so long to write what is left.
FINISH_S = 30.0


class LogRecord(NamedTuple):
    """Values of a step by tag. Steps count from 1; 0 is before the first."""

    step: int
    values: dict[str, float]


class TrackerCallback(Callback):
    """Hands the metrics of every step to trackers. It comes after those who report. Making one writes nothing.

    Args:
        names: Of trackers; none on ranks other than 0.
        run_dir: Of the run, which has its metrics.jsonl.
        config: All settings by their names.
        steps_per_epoch: Steps of a pass over the data.
        finish_s: At the end a tracker gets so long to write what is left.
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
        """Start the threads, which write the steps that are done first."""
        if not self._names:
            return
        previous = [record for line in read_metrics(self._run_dir, completed_steps) for record in self._records(line)]
        for name in self._names:
            run_name = self._run_dir.resolve().name
            make = partial(_recreate, name, self._run_dir / DIRECTORY / name, run_name, self._config)
            self._threads.append(TrackerThread(name, make, previous))

    def on_step_end(self, step: Step) -> None:
        """Hand on what the step reports. Local; returns immediately."""
        if self._threads:
            records = list(self._records(step.metrics))
            for thread in self._threads:
                thread.put(records)

    def close(self) -> None:
        """Have the trackers write what is left, for a limited time."""
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
            yield LogRecord(step - 1, metrics_by_tag(at_start))
        yield LogRecord(step, metrics_by_tag({"epoch": step / self._steps_per_epoch, **metrics}))


class TrackerThread:
    """A thread that hands points to a tracker."""

    def __init__(self, name: str, make: Callable[[], "GeneralTracker"], previous: list[LogRecord]) -> None:
        self._name, self._make = name, make
        self._failed = False
        self._waiting: queue.Queue[list[LogRecord] | None] = queue.Queue(MAX_WAITING)
        self._waiting.put_nowait(previous)
        self._thread = threading.Thread(target=self._run, name=f"odc_mpi-{name}", daemon=True)
        self._thread.start()

    def put(self, records: list[LogRecord] | None) -> None:
        """Hand on points; those for which there is no room are lost, with a warning the first time.

        None: the thread ends when all is written.
        """
        if self._failed:
            return
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def join(self, timeout_s: float) -> None:
        """Wait for the thread for a limited time."""
        if not self._failed:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._give_up("it did not write the last points in time")

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (records := self._waiting.get()) is not None and not self._failed:
                for record in records:
                    tracker.log(record.values, step=record.step)
            tracker.finish()
        except BaseException as error:  # whatever a library does, down to SystemExit, the run goes on
            self._give_up(one_line_message(error))

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            warn(f"WARNING: run.report_to: {self._name} is incomplete: {reason}; the run goes on without")


def metrics_by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among metrics by the tags of transformers' `rewrite_logs`."""
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": number
        for key, number in numbers.items()
        if math.isfinite(number)
    }


def _recreate(name: str, directory: Path, run_name: str, config: Mapping[str, Any]) -> "GeneralTracker":
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return trackers.start_tracker(name, directory, run_name, config)
