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
    later. Prints `startup_lines` first; if they are None, prints nothing. `steps` is the number of steps of the run.
    `writes` is True on rank 0.
    """

    metrics = (
        Metric("step", "number of the step, from 1; with `run.eval_on_start` there is a line of step 0"),
        Metric("steps", "steps", RESULT, "end", "{} ({skipped_steps} skipped)", row="steps"),
        Metric("elapsed_s", "duration", SPEED, "end"),
    )

    def __init__(
        self, run_dir: Path, steps: int, startup_lines: str | None, callbacks: Sequence[Callback], *, writes: bool
    ) -> None:
        self._run_dir = run_dir
        self._stack = ExitStack()
        #: Declarations of all metrics.
        self.declared = [metric for callback in (self, *callbacks) for metric in callback.metrics]
        self._summary = Summary(self.declared, read_metrics(run_dir, steps) if writes else [])
        self._writer = self._stack.enter_context(MetricsWriter(run_dir)) if writes else None
        self._reporter: ProgressReporter | None = None
        if writes:
            write_declarations(run_dir, self.declared)
        if writes and startup_lines is not None:
            print(startup_lines, flush=True)
            self._reporter = self._stack.enter_context(ProgressReporter(steps, self.declared))

    @override
    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        if len(metrics) > 1:
            self._log(metrics)

    @override
    def on_step_end(self, step: Step) -> None:
        self._log(step.metrics)

    def _log(self, metrics: dict[str, Any]) -> None:
        if self._writer:
            self._summary.add(metrics)
            self._writer.write(metrics)
        if self._reporter:
            self._reporter.report(metrics)

    def summarize(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the summary, including `fields` (see `Summary.finish`), on rank 0, which also writes it.

        Returns {} on the other ranks, which do not know the metrics of earlier starts.
        """
        if not self._writer:
            return {}
        summary = self._summary.finish(fields)
        write_summary(self._run_dir, summary)
        return summary

    def print_summary(self, summary: dict[str, Any]) -> None:
        """Print a summary if this rank prints the progress."""
        if self._reporter:
            self._reporter.finish(summary)

    @override
    def close(self) -> None:
        self._stack.close()
