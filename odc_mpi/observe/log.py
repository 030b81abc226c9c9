"""Logging of a run's metrics on rank 0: to the terminal, and to the files of `observe.metrics`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import (
    RESULT,
    SPEED,
    Metric,
    MetricsWriter,
    Summary,
    read_metrics,
    write_declarations,
    write_summary,
)
from odc_mpi.observe.terminal import ProgressReporter


class RunLogger(Callback):
    """Writes and prints the metrics on rank 0, and reduces those of all steps, also of earlier starts, to a summary.

    Must run after `callbacks`, which declare and add the metrics; those that only return entries of the summary may run
    later. Prints `startup_lines` first. `steps` is the number of steps of the run.
    """

    metrics = (
        Metric("step", "number of the step, from 1; with `run.eval_on_start` there is a line of step 0"),
        Metric("step_s", "duration of the step", SPEED),
        Metric("steps", "steps", RESULT, "end", "{} ({skipped_steps} skipped)", row="steps"),
        Metric("elapsed_s", "duration", SPEED, "end"),
    )

    def __init__(
        self, run_dir: Path, steps: int, startup_lines: str, callbacks: Sequence[Callback], *, is_main_rank: bool
    ) -> None:
        self._run_dir = run_dir
        self._stack = ExitStack()
        declared = [metric for callback in (self, *callbacks) for metric in callback.metrics]
        self._summary = Summary(declared, read_metrics(run_dir, steps) if is_main_rank else [])
        self._writer = self._stack.enter_context(MetricsWriter(run_dir)) if is_main_rank else None
        if is_main_rank:
            write_declarations(run_dir, declared)
            print(startup_lines, flush=True)
        self._reporter = self._stack.enter_context(ProgressReporter(steps, declared)) if is_main_rank else None

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        if len(metrics) > 1:
            self._log(metrics)

    @override
    def on_step_end(self, step: Step) -> None:
        self._log(step.metrics)

    def _log(self, metrics: dict[str, Any]) -> None:
        if self._writer and self._reporter:
            self._summary.add(metrics)
            self._writer.write(metrics)
            self._reporter.report(metrics)

    def summarize(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the summary, including `fields` (see `Summary.finish`), on rank 0, which also writes and prints it.

        Returns {} on the other ranks, which do not know the metrics of earlier starts.
        """
        if not self._reporter:
            return {}
        summary = self._summary.finish(fields)
        write_summary(self._run_dir, summary)
        self._reporter.finish(summary)
        return summary

    @override
    def close(self) -> None:
        self._stack.close()
