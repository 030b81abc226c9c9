"""Live view of a run from another process, which reads the files in the run directory while the run writes them.

On a terminal, the view is a table of the latest metrics with bar charts of their history, and is redrawn whenever the
run writes a step. Without a terminal, a line is printed for each step.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from odc_mpi import yaml_dialect
from odc_mpi.errors import UserError, warn
from odc_mpi.files import parse_json
from odc_mpi.formatting import format_duration
from odc_mpi.islands.run_dir import current_islands
from odc_mpi.observe.metrics import METRICS, Metric, read_declarations, read_run_metrics
from odc_mpi.observe.terminal import ProgressReporter, closing_table, make_console

#: Maximum number of earlier steps that are printed at the start, and time between reads of the files, in seconds.
_BACKLOG, _POLL_S = 20, 1.0
#: Characters for bars of increasing height, number of bars in a chart, and number of steps for estimating time left.
_HEIGHTS, _NUM_BARS, _RECENT = "▁▂▃▄▅▆▇█", 40, 50
#: Width of columns in characters, and number of metrics shown of a run that does not declare them.
_WIDTH, _NUM_UNDECLARED = 9, 8


def watch(run_dir: Path, is_running: Callable[[], bool], wait_s: float) -> None:
    """Show the progress of a run until it ends, then print its summary.

    `is_running` returns True while the run may write further lines. Raises `UserError` if the run has not started
    within `wait_s` seconds.
    """
    ends = time.monotonic() + wait_s
    if not (run_dir / "config.yaml").is_file():
        warn(f"{run_dir}: waiting up to {wait_s:g} s (--wait) for a run to start")
    while not (run_dir / "config.yaml").is_file():
        if time.monotonic() > ends:
            raise UserError(f"{run_dir}: expected a run directory, with config.yaml, within {wait_s:g} s (--wait)")
        time.sleep(_POLL_S)
    run = yaml_dialect.read_file(run_dir / "config.yaml")["run"]
    console, last = make_console(), -1
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            console.show_cursor(True)  # a killed process could not restore it
            for lines in _updates(run_dir, run["steps"], is_running):
                live.update(_block(lines, run["steps"], _shown(run_dir, lines)), refresh=True)
                last = lines[-1]["step"]
    else:
        reporter: ProgressReporter | None = None
        for lines in _updates(run_dir, run["steps"], is_running):
            reporter = reporter or ProgressReporter(run["steps"], _shown(run_dir, lines), console)
            for line in lines if last >= 0 else lines[-_BACKLOG:]:
                if line["step"] > last:
                    reporter.report(line)
                    last = line["step"]
    if (run_dir / "summary.json").is_file():
        summary = parse_json((run_dir / "summary.json").read_text(encoding="utf-8"))
        console.print(closing_table(summary, read_declarations(run_dir)))
    else:
        console.print(f"the run ended after step {max(0, last)} of {run['steps']}, without a summary")


def _updates(run_dir: Path, num_steps: int, is_running: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    """Yield all lines of ``metrics.jsonl`` whenever the file has changed, until the run ends."""
    size, goes_on = 0, True
    while goes_on:
        goes_on = is_running()  # before reading: a run writes its last line before it ends
        files = [each / METRICS for each in (run_dir, *current_islands(run_dir))]
        previous, size = size, sum(path.stat().st_size for path in files if path.exists())
        if size != previous and (lines := read_run_metrics(run_dir, num_steps)):
            yield lines
        if goes_on:
            time.sleep(_POLL_S)


def _shown(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the metrics to show, a held-out one after that of the training data.

    Without declarations, which older runs lack, these are the first ones in `lines`, with their keys as titles.
    """
    declared = [metric for metric in read_declarations(run_dir) if metric.column and "watch" in metric.views]
    if not declared:
        keys = [key for key in dict.fromkeys(itertools.chain(*lines)) if not key.startswith(("time", "step"))]
        return [Metric(key, "", column=(key, max(_WIDTH, len(key)))) for key in keys[:_NUM_UNDECLARED]]
    order = [metric.key.removeprefix("eval_") for metric in declared]
    declared.sort(key=lambda metric: order.index(metric.key.removeprefix("eval_")))
    titles = {metric.key: "held-out" for metric in declared if metric.key.startswith("eval_")}
    return [
        replace(metric, column=(titles.get(metric.key, metric.column[0]), _WIDTH))
        for metric in declared
        if metric.column
    ]


def _block(lines: Sequence[Mapping[str, Any]], num_steps: int, shown: Sequence[Metric]) -> Table:
    """Return a table with the progress and, for each metric, the latest value, a chart, the minimum and the maximum."""
    table = Table.grid(padding=(0, 2))
    step, recent = lines[-1]["step"], [line for line in lines if line["step"]][-_RECENT:]
    num_filled = round(_NUM_BARS * step / num_steps)
    times = [datetime.fromisoformat(line["time"]) for line in recent]
    left_s = (times[-1] - times[0]).total_seconds() / (len(times) - 1) * (num_steps - step) if len(times) > 1 else None
    left = "" if left_s is None else f"{format_duration(left_s)} left"
    table.add_row("step", f"{step}/{num_steps}", "█" * num_filled + "▁" * (_NUM_BARS - num_filled), left)
    for metric in shown:
        key, (title, _) = metric.key, metric.column or ("", 0)
        with_metric = [line for line in lines if line.get(key) is not None]
        if with_metric:
            ends = [metric.format(each(with_metric, key=lambda line: line[key])) for each in (min, max)]
            course = _bars([line[key] for line in with_metric])
            table.add_row(title, metric.format(with_metric[-1]), course, f"{ends[0]} to {ends[1]}")
    return table


def _bars(values: Sequence[float]) -> str:
    """Return a bar chart of at most `_NUM_BARS` characters. The heights are scaled to the range of the values."""
    count = min(_NUM_BARS, len(values))
    picked = [values[(number + 1) * len(values) // count - 1] for number in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_HEIGHTS[int(7 * (value - low) / (high - low or 1) + 0.5)] for value in picked)
