"""Log of a run on rank 0: the terminal, metrics.jsonl and summary.json."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import MetricsWriter, Summary, read_metrics, write_summary
from odc_mpi.observe.terminal import ProgressReporter


class RunLogger(Callback, AbstractContextManager["RunLogger"]):
    """Writes and prints the metrics on rank 0; other ranks only reduce them. Runs after the callbacks that fill them.

    Args:
        run_dir: Directory of metrics.jsonl and summary.json.
        steps: Number of steps of the whole run.
        startup_lines: Text to print first.
        callbacks: Callbacks that report metrics.
        is_main_rank: True on the rank that writes and prints.
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

    def on_step_end(self, step: Step) -> None:
        """Write and print the metrics of the step."""
        self._summary.add(step.metrics)
        if self._writer and self._reporter:
            self._writer.write(step.metrics)
            self._reporter.report(step.metrics)

    def summarize(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Complete, write, print and return the summary."""
        summary = self._summary.finish(fields)
        if self._reporter:
            write_summary(self._run_dir, summary)
            self._reporter.finish(summary)
        return summary

    def __exit__(self, *_: object) -> None:
        self._stack.close()
