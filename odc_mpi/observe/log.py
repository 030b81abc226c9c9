"""Where rank 0 tells of a run: the terminal, metrics.jsonl, summary.json. Local."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from odc_mpi.observe.metrics import MetricsWriter, Summary, read_metrics, write_summary
from odc_mpi.observe.participant import Participant, Step
from odc_mpi.observe.terminal import ProgressReporter


class Log(Participant, AbstractContextManager["Log"]):
    """Where rank 0 tells of the run; on other ranks it only counts. It comes after those who report.

    Args:
        run_dir: Of the run.
        steps: Of the run.
        opening: Lines to begin with.
        reporting: Who reports metrics.
        speaks: Whether this is the rank that writes and prints.
    """

    def __init__(
        self, run_dir: Path, steps: int, opening: str, reporting: Sequence[Participant], *, speaks: bool
    ) -> None:
        self._run_dir = run_dir
        self._stack = ExitStack()
        entries = {key: entry for each in reporting for key, entry in each.summary.items()}
        # Of a run that goes on, the summary tells all.
        self._summary = Summary(entries, read_metrics(run_dir, steps) if speaks else [])
        if speaks:
            print(opening, flush=True)
        columns = [column for each in reporting for column in each.columns]
        self._writer = self._stack.enter_context(MetricsWriter(run_dir)) if speaks else None
        self._reporter = self._stack.enter_context(ProgressReporter(steps, columns)) if speaks else None

    def after_step(self, step: Step) -> None:
        """Write a line and show it. Local."""
        self._summary.add(step.metrics)
        if self._writer and self._reporter:
            self._writer.write(step.metrics)
            self._reporter.report(step.metrics)

    def summarize(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write and show the summary, and return it. Local."""
        summary = self._summary.finish(facts)
        if self._reporter:
            write_summary(self._run_dir, summary)
            self._reporter.finish(summary)
        return summary

    def __exit__(self, *_: object) -> None:
        self._stack.close()
