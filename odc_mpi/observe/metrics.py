"""Metric files in the run directory: ``metrics.jsonl``, with a JSON object per step, and ``summary.json``.

A callback (`observe.callback`) reduces its metrics over the ranks, and declares how they appear on the terminal and in
the summary. Rank 0 writes the files.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from odc_mpi.errors import UserError
from odc_mpi.files import parse_json, read_lines, warn_write_failed, write_or_warn
from odc_mpi.islands.run_dir import combine_metrics, current_islands

METRICS = "metrics.jsonl"


class ProgressColumn(NamedTuple):
    """Column of the progress line, `width` characters wide. `template` is a format string, such as `{loss:.4f}`."""

    title: str
    width: int
    template: str

    def format(self, metrics: Mapping[str, Any]) -> str:
        """Return the text of the column for a step: "" if a metric is missing, or "-" if a metric is None."""
        try:
            return self.template.format_map(metrics)
        except KeyError:
            return ""
        except TypeError:
            return "-"


class SummaryField(NamedTuple):
    """Entry in ``summary.json``: one metric (a key in ``metrics.jsonl``), reduced over all steps.

    `mean` weights each step by its duration. `per_step` divides the sum by the number of steps. `first`, `last` and
    `min` ignore steps whose gradients were not finite. `start` is the value of step 0, the state before training. The
    other reductions ignore step 0.
    """

    metric: str
    reduce: Literal["sum", "mean", "per_step", "first", "last", "min", "start"]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Writer that appends lines to ``metrics.jsonl``. Creates the run directory if it is missing.

    Raises `UserError` if the directory cannot be created or the file cannot be opened. Lines that cannot be written
    later are dropped, because a full disk should not end a run. Only the first dropped line causes a warning.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            # A buffer would retry a failed write with the next line, and again on closing.
            self._file = (run_dir / METRICS).open("ab", buffering=0)
            self._warned = False
        except OSError as error:
            raise UserError(f"run.dir: expected a directory to write in, got {run_dir}: {error.strerror}") from None

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line without buffering, so a crash loses no completed step. NaN and infinity are written as null."""
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
                warn_write_failed(Path(self._file.name), error)
            self._warned = True

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()


def read_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` in the directory `path` up to and including `step`, ordered by step.

    If a step has several lines, only the last one is returned. Invalid lines are skipped. A line with step 0 contains
    the metrics of an evaluation before the first step.
    """
    lines: dict[int, dict[str, Any]] = {}
    for text in read_lines(path / METRICS):
        try:
            line = parse_json(text)
            number = int(line["step"])
            # `Summary` requires these two metrics.
            if not number or (isinstance(line["step_s"], int | float) and isinstance(line["skipped"], bool)):
                lines[number] = line
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return [line for number, line in sorted(lines.items()) if number <= step]


def read_run_metrics(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of `read_metrics`. If islands train apart, those of all islands are combined."""
    combined = combine_metrics([read_metrics(each, step) for each in current_islands(run_dir)])
    lines = {line["step"]: line for line in (*combined, *read_metrics(run_dir, step))}
    return [line for _, line in sorted(lines.items())]


class Summary:
    """Reduces the metrics of all steps to entries for ``summary.json``. `fields` defines the entries, keyed by name.

    `previous_lines` are the lines of ``metrics.jsonl`` from earlier starts of a resumed run.
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
        """Add the metrics of a step, which must include `step_s` and `skipped`, or the metrics of step 0."""
        is_start = metrics.get("step") == 0
        if not is_start:
            self._num_steps += 1
            self._step_s += metrics["step_s"]
        for key, (metric, reduce) in self._fields.items():
            value, before = metrics.get(metric), self._values[key]
            if is_start != (reduce == "start") or not isinstance(value, int | float):
                continue  # null, damaged, or from a run with other callbacks
            if reduce in ("sum", "mean", "per_step"):
                self._values[key] = before + value * (metrics["step_s"] if reduce == "mean" else 1)
            elif (is_start or not metrics["skipped"]) and (
                before is None or reduce in ("start", "last") or (reduce == "min" and value < before)
            ):
                self._values[key] = value

    def finish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return `fields`, the reduced entries, `steps` (the total number of steps) and `elapsed_s`.

        `elapsed_s` is the time since the last start plus the duration of earlier steps. If `fields` has the key of a
        reduced `sum`, its value replaces the sum of the metrics since the last start, because it is more precise.
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
    """Write ``summary.json`` atomically. If the file cannot be written, print a warning."""
    write_or_warn(run_dir / "summary.json", json.dumps(_finite(dict(summary)), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
