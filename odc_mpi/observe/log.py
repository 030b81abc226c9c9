"""Logging of a run's metrics on rank 0: to the terminal, to ``metrics.jsonl`` and to ``summary.json``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import MetricsWriter, Summary, read_metrics, write_summary
from odc_mpi.observe.terminal import ProgressReporter


class RunLogger(Callback, AbstractContextManager["RunLogger"]):
    """Writes and prints the metrics on rank 0. Every rank reduces the metrics of all steps to a summary.

    Must run after the callbacks that add the metrics. In a resumed run, only rank 0's summary includes earlier steps.

    Args:
        startup_lines: Text to print before the metrics.
        callbacks: Callbacks whose columns are printed and whose summary entries are written.
        is_main_rank: True on rank 0, which writes and prints.
    """

    def __init__(
        self, run_dir: Path, steps: int, startup_lines: str, callbacks: Sequence[Callback], *, is_main_rank: bool
    ) -> None:
        self._run_dir = run_dir
        self._stack = ExitStack()
        entries = {key: entry for callback in callbacks for key, entry in callback.summary.items()}
        # The summary of a resumed run includes the steps of earlier starts.
        self._summary = Summary(entries, read_metrics(run_dir, steps) if is_main_rank else [])
        if is_main_rank:
            print(startup_lines, flush=True)
        columns = [column for callback in callbacks for column in callback.columns]
        self._writer = self._stack.enter_context(MetricsWriter(run_dir)) if is_main_rank else None
        self._reporter = self._stack.enter_context(ProgressReporter(steps, columns)) if is_main_rank else None

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Log the metrics before the first step, such as those of an evaluation, if there are any."""
        if len(metrics) > 1:
            self._log(metrics)

    def on_step_end(self, step: Step) -> None:
        """Add the metrics of the step to the summary. Rank 0 also writes and prints them."""
        self._log(step.metrics)

    def _log(self, metrics: dict[str, Any]) -> None:
        self._summary.add(metrics)
        if self._writer and self._reporter:
            self._writer.write(metrics)
            self._reporter.report(metrics)

    def summarize(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the summary, including `fields` (see `Summary.finish`). Rank 0 also writes and prints it."""
        summary = self._summary.finish(fields)
        if self._reporter:
            write_summary(self._run_dir, summary)
            self._reporter.finish(summary)
        return summary

    def __exit__(self, *_: object) -> None:
        self._stack.close()
