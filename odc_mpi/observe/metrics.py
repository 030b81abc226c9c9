"""Metrics of a run: ``metrics.jsonl``, an object per step, and ``summary.json``, both in the run directory.

A callback (`observe.callback`) declares how its metrics appear on the terminal and in the summary, and reduces them
over the ranks. Nothing here communicates. Files are written by rank 0.
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

METRICS = "metrics.jsonl"


class ProgressColumn(NamedTuple):
    """A column of the progress line, `width` characters wide. `format_cell` formats it from the step's metrics."""

    title: str
    width: int
    format_cell: Callable[[Mapping[str, Any]], str]


class SummaryField(NamedTuple):
    """An entry of ``summary.json`` that is reduced from a metric of all steps.

    Attributes:
        metric: Key in ``metrics.jsonl``.
        reduce: `mean` weights each step by its seconds, `per_step` divides the sum by the number of steps. `first`,
            `last` and `min` ignore skipped steps.
    """

    metric: str
    reduce: Literal["sum", "mean", "per_step", "first", "last", "min"]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """``metrics.jsonl``, opened for appending. Creates a missing run directory.

    Raises a UserError if the directory or the file cannot be written. Lines that cannot be written later are dropped
    with one warning: a full disk does not end a run.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._path = run_dir / METRICS
            # A buffer would retry a failed write with the next line, and again on closing.
            self._file = self._path.open("ab", buffering=0)
            self._warned = False
        except OSError as error:
            raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from None

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line immediately, so that a crash loses no completed step. nan and inf become null."""
        line = (json.dumps(_finite(dict(metrics)), allow_nan=False) + "\n").encode()
        begin = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(begin)  # a partial line would make the next one unreadable
                self._file.seek(begin)
            if not self._warned:
                warn_write_failed(self._path, error)
            self._warned = True

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()


def read_metrics(path: Path, step: int) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl up to a step, without partial lines of killed runs."""
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
    """Content of ``summary.json``, reduced step by step.

    Args:
        fields: Entries by their key in ``summary.json``.
        previous_lines: Lines of ``metrics.jsonl`` from before a resumed run was started again.
    """

    def __init__(self, fields: Mapping[str, SummaryField], previous_lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self._start = perf_counter()
        self._fields = fields
        self._num_steps, self._step_s = 0, 0.0
        self._values: dict[str, Any] = {
            key: 0 if reduce in ("sum", "mean", "per_step") else None for key, (_, reduce) in fields.items()
        }
        for line in previous_lines:
            self.add(line)
        self._previous, self._previous_s = dict(self._values), self._step_s

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step."""
        self._num_steps += 1
        self._step_s += metrics["step_s"]
        for key, (metric, reduce) in self._fields.items():
            value, before = metrics.get(metric), self._values[key]
            if value is None:
                continue  # null, or from a run with other callbacks
            if reduce in ("sum", "per_step"):
                self._values[key] = before + value
            elif reduce == "mean":
                self._values[key] = before + value * metrics["step_s"]
            elif not metrics["skipped"] and (
                before is None or reduce == "last" or (reduce == "min" and value < before)
            ):
                self._values[key] = value

    def finish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``summary.json``.

        Args:
            fields: Further entries. If one has the key of a reduced sum, it is the more precise value since this start:
                it replaces the sum over these steps, and the sum over earlier steps is added.

        Returns:
            `fields`, the reduced entries, `steps`, and `elapsed_s`: seconds since this start and of the steps before.
        """
        values = dict(self._values)
        for key, (_, reduce) in self._fields.items():
            if reduce == "mean":
                values[key] /= self._step_s or math.inf  # without a step, means are 0
            elif reduce == "per_step":
                values[key] /= max(1, self._num_steps)
            elif reduce == "sum" and key in fields:
                values[key] = fields[key] + self._previous[key]
        elapsed_s = perf_counter() - self._start + self._previous_s
        return {**fields, "steps": self._num_steps, **values, "elapsed_s": elapsed_s}


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` atomically. A failure is only a warning."""
    write_or_warn(run_dir / "summary.json", json.dumps(_finite(dict(summary)), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace every nan and inf by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
