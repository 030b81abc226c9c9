"""Where rank 0 tells of a run: the terminal, metrics.jsonl, summary.json. Local."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from odc_mpi.observe.metrics import MetricsWriter, StepMetrics, Summary, read_metrics, write_summary
from odc_mpi.observe.terminal import ProgressReporter


class Log:
    """Where rank 0 tells of the run; on other ranks it only counts.

    Args:
        run_dir: Of the run.
        steps: Of the run.
        opening: A line to begin with.
        speaks: Whether this is the rank that writes and prints.
    """

    def __init__(self, run_dir: Path, steps: int, opening: str, *, speaks: bool) -> None:
        self._run_dir = run_dir
        self._stack = ExitStack()
        # Of a run that goes on, the summary tells all.
        self._summary = Summary(read_metrics(run_dir, steps) if speaks else [])
        if speaks:
            print(opening, flush=True)
        self._writer = self._stack.enter_context(MetricsWriter(run_dir)) if speaks else None
        self._reporter = self._stack.enter_context(ProgressReporter(steps)) if speaks else None

    def step(self, metrics: StepMetrics) -> None:
        """Take a finished step. Local."""
        self._summary.add(metrics)
        if self._writer and self._reporter:
            self._writer.write(metrics)
            self._reporter.report(metrics)

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write and show the summary. Local."""
        # The facts come last: waits measured in whole over all ranks replace the sum of what the steps told.
        summary = self._summary.finish(facts) | self._summary.with_earlier(facts)
        if self._reporter:
            write_summary(self._run_dir, summary)
            self._reporter.finish(summary)
        return summary

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
