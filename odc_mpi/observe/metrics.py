"""Declarations of metrics, and the metric files in the run directory, which rank 0 writes.

    metrics.json    the declarations of the run's metrics, for programs that read the other files
    metrics.jsonl   a JSON object per step
    summary.json    the metrics reduced over all steps, and values that are computed once

A callback (`observe.callback`) reduces its metrics over the ranks, and declares each of them once, as a `Metric`. The
terminal, the summary, `odc-mpi watch`, the report and the manual follow the declarations.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.files import parse_json, read_lines, warn_write_failed, write_or_warn
from odc_mpi.formatting import format_quantity
from odc_mpi.islands.run_dir import combine_metrics, current_islands

METRICS, DECLARATIONS, SUMMARY = "metrics.jsonl", "metrics.json", "summary.json"
#: Headings of the tables of metrics in the manual and, except for `DETAILS`, in the report.
GROUPS = ("Result", "Speed", "Memory and traffic", "Model and machine", "Other", "Details")
RESULT, SPEED, MEMORY, MACHINE, OTHER, DETAILS = GROUPS
#: Reductions over all steps, with the suffix of the entry's key and the phrase for its display name.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "mean", "per_step", "end"), ("", "{label}")),
    "first": ("_first", "{label} of the first step"),
    "last": ("_last", "{label} of the last step"),
    "start": ("_start", "{label} before training"),
    "final": ("", "{label} at the end"),
    "best": ("_best", "{better}est {label}"),
}


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric by the callback that computes it.

    Attributes:
        key: Key in ``metrics.jsonl``. In a family of metrics, NAME stands for a part that a run fills in.
        label: Display name in the report, and meaning in the manual.
        group: Heading in the report and in the manual, one of `GROUPS`.
        summary: Reductions over all steps, separated by spaces, each to an entry of ``summary.json``. `mean` weights
            each step by its duration, `per_step` does not. `start` is the value of step 0, the state before training,
            which the others ignore. `first`, `last`, `final` (the last value) and `best` ignore steps whose gradients
            were not finite. An `end` is only in the summary: `on_train_end` of the callback returns it.
        form: Format string on the terminal, where `{}` is the value and `{NAME}` another one of the same step or
            summary. By default, the unit in the key determines the format.
        column: Title and width of a column of the progress line.
        row: Title of a row of the closing table. Values of metrics with the same row are joined.
        views: Further places, separated by spaces: `watch` for a column in `odc-mpi watch`, which needs `column`, and
            `tile` for the key figures of the report.
        better: The better direction, for `best`.
        summary_key: Key of the entries of ``summary.json`` without suffix, if not `key`.
    """

    key: str
    label: str
    group: str = OTHER
    summary: str = ""
    form: str = ""
    column: tuple[str, int] | None = None
    row: str = ""
    views: str = ""
    better: Literal["low", "high", ""] = ""
    summary_key: str = ""

    def __post_init__(self) -> None:
        if self.group not in GROUPS or not set(self.summary.split()) <= _REDUCTIONS.keys():
            raise ValueError(
                f"{self.key}: expected one of {GROUPS} and reductions, got {self.group} and {self.summary}"
            )

    @property
    def entries(self) -> dict[str, str]:
        """Reductions, keyed by the key of the entry in ``summary.json``."""
        return {(self.summary_key or self.key) + _REDUCTIONS[each][0]: each for each in self.summary.split()}

    def expand(self, names: Iterable[str]) -> list["Metric"]:
        """Return the metrics of a family for `names`, or only this one if it is not a family."""
        keys = [self.key.replace("NAME", name) for name in names] if "NAME" in self.key else [self.key]
        return [replace(self, key=key) for key in keys]

    def entry_label(self, reduce: str) -> str:
        """Return the display name of the entry of a reduction in the report."""
        return _REDUCTIONS[reduce][1].format(label=self.label, better=self.better)

    def format(self, values: Mapping[str, Any], key: str | None = None) -> str:
        """Return the text for `values[key]` (by default of the metric's key): "" if missing, "-" if None or damaged."""
        key = key or self.key
        if key not in values:
            return ""
        try:
            return self.form.format(values[key], **values) if self.form else format_quantity(key, values[key])
        except (LookupError, TypeError, ValueError):
            return "-"


def write_declarations(run_dir: Path, metrics: Sequence[Metric]) -> None:
    """Write ``metrics.json`` atomically. If the file cannot be written, print a warning."""
    declared = [{name: value for name, value in asdict(metric).items() if value} for metric in metrics]
    write_or_warn(run_dir / DECLARATIONS, json.dumps(declared, indent=2) + "\n")


def read_declarations(run_dir: Path) -> list[Metric]:
    """Return the metrics that a run declared, or [] if ``metrics.json`` is missing, as in older runs, or damaged."""
    try:
        declared = parse_json("".join(read_lines(run_dir / DECLARATIONS)))
        return [Metric(**entry | {"column": tuple(entry.get("column", ())) or None}) for entry in declared]
    except (ValueError, TypeError, AttributeError):
        return []


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
    """Reduces the metrics of all steps to entries for ``summary.json``, as declared by `metrics`.

    `previous_lines` are the lines of ``metrics.jsonl`` from earlier starts of a resumed run.
    """

    def __init__(self, metrics: Sequence[Metric], previous_lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self._start = perf_counter()
        #: The metric and the reduction of each entry, except for values that are computed at the end.
        self._fields = {
            key: (metric, reduce) for metric in metrics for key, reduce in metric.entries.items() if reduce != "end"
        }
        self._num_steps, self._step_s = 0, 0.0
        self._values: dict[str, Any] = {
            key: 0 if reduce in ("sum", "mean", "per_step") else None for key, (_, reduce) in self._fields.items()
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
            value, before = metrics.get(metric.key), self._values[key]
            if is_start != (reduce == "start") or not isinstance(value, int | float):
                continue  # null, damaged, or from a run with other callbacks
            if reduce in ("sum", "mean", "per_step"):
                self._values[key] = before + value * (metrics["step_s"] if reduce == "mean" else 1)
            elif is_start or not metrics["skipped"]:
                if before is None or reduce in ("start", "last", "final"):
                    self._values[key] = value
                elif reduce == "best":
                    self._values[key] = (min if metric.better == "low" else max)(before, value)

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
    write_or_warn(run_dir / SUMMARY, json.dumps(_finite(dict(summary)), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
