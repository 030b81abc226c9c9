"""The figures of a run: ``metrics.jsonl``, an object per step, and ``summary.json``, both in the run directory.

What a step reports, and what becomes of it on the terminal and in the summary, is declared by whoever reports it
(`observe.callback`). Nothing here communicates: metrics are reduced over ranks where they are made.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from odc_mpi.errors import UserError
from odc_mpi.files import warn_write_failed, write_or_warn

#: The file of a run that has a line per step.
METRICS = "metrics.jsonl"


class ProgressColumn(NamedTuple):
    """A column of the terminal's line per step.

    Attributes:
        title: Of the column.
        width: In characters.
        show: Makes the cell from the step's metrics.
    """

    title: str
    width: int
    format_cell: Callable[[Mapping[str, Any]], str]


class SummaryField(NamedTuple):
    """An entry of ``summary.json`` that is made from a metric of all steps.

    Attributes:
        metric: Its name.
        rule: The sum; the mean, in which each second weighs the same; the sum per step; the first, the last or the
            least of the steps that were not skipped.
    """

    metric: str
    reduce: Literal["sum", "mean", "per_step", "first", "last", "min"]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """``metrics.jsonl``, open for appending in a run directory that is made if need be. Local; for rank 0.

    Once it is open, what cannot be written is dropped with a warning: a full disk is no reason to end a run.

    Raises:
        UserError: the directory or the file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._path = run_dir / METRICS
            # Without a buffer: it would hand what could not be written over once more, and again on closing.
            self._file = self._path.open("ab", buffering=0)
            self._warned = False
        except OSError as error:
            raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from None

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line at once: a run that dies leaves all its finished steps. nan and inf are null."""
        line = (json.dumps(_finite(dict(metrics)), allow_nan=False) + "\n").encode()
        begin = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(begin)  # a part of a line would spoil the next one
                self._file.seek(begin)
            if not self._warned:
                warn_write_failed(self._path, error)
            self._warned = True

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        with suppress(OSError):
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path, step: int) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl up to a step. Local; a line that a killed run left in half is left out."""
    lines: dict[int, dict[str, object]] = {}
    if (path / METRICS).exists():
        for text in (path / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                lines[int(line["step"])] = line
            except (ValueError, KeyError, TypeError):
                continue
    return [line for number, line in sorted(lines.items()) if number <= step]


class Summary:
    """A run in few numbers, gathered step by step. Local; for rank 0.

    Args:
        fields: By their key in ``summary.json``.
        previous_lines: Lines of ``metrics.jsonl`` of the steps before this start, where a run goes on.
    """

    def __init__(self, fields: Mapping[str, SummaryField], previous_lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self._start = perf_counter()
        self._fields = fields
        self._num_steps, self._step_s = 0, 0.0
        self._values: dict[str, Any] = {
            key: 0 if rule in ("sum", "mean", "per_step") else None for key, (_, rule) in fields.items()
        }
        for line in previous_lines:
            self.add(line)
        self._previous, self._previous_s = dict(self._values), self._step_s

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step."""
        self._num_steps += 1
        self._step_s += metrics["step_s"]
        for key, (metric, rule) in self._fields.items():
            value, before = metrics.get(metric), self._values[key]
            if value is None:
                continue  # of a run that reported something else, or no number
            if rule in ("sum", "per_step"):
                self._values[key] = before + value
            elif rule == "mean":
                self._values[key] = before + value * metrics["step_s"]
            elif not metrics["skipped"] and (before is None or rule == "last" or (rule == "min" and value < before)):
                self._values[key] = value

    def finish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``summary.json``.

        Args:
            fields: What the steps do not tell, or tell less well: the sum of an entry since this start, which is then
                added to that of the steps before.

        Returns:
            The facts, an entry for each of `fields`, `steps`, and `elapsed_s`, in which only those steps count of what
            was before this start.
        """
        step_s = self._step_s or math.inf  # without a step, means are 0
        rules = {key: entry.reduce for key, entry in self._fields.items()}
        means = {key: self._values[key] / step_s for key, rule in rules.items() if rule == "mean"}
        means |= {key: self._values[key] / max(1, self._num_steps) for key, rule in rules.items() if rule == "per_step"}
        measured = {
            key: fields[key] + self._previous[key] for key, rule in rules.items() if rule == "sum" and key in fields
        }
        elapsed_s = perf_counter() - self._start + self._previous_s
        return {**fields, "steps": self._num_steps, **self._values, **means, **measured, "elapsed_s": elapsed_s}


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json``, whole or not at all, or warn that it cannot be written. Local; for rank 0."""
    write_or_warn(run_dir / "summary.json", json.dumps(_finite(dict(summary)), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Return the same with None for every nan and inf: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
