"""Live view of a run from another process, which reads the files in the run directory while the run writes them.

On a terminal, the view is a table of the latest metrics with bar charts of their history, and is redrawn whenever the
run writes a step. Without a terminal, a line is printed for each step.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from odc_mpi.observe.metrics import METRICS, ProgressColumn, read_run_metrics
from odc_mpi.observe.terminal import ProgressReporter, closing_table, make_console

#: Maximum number of earlier steps that are printed at the start, and time between reads of the files, in seconds.
_BACKLOG, _POLL_S = 20, 1.0
#: Characters for bars of increasing height, number of bars in a chart, and number of steps for estimating time left.
_HEIGHTS, _NUM_BARS, _RECENT = "▁▂▃▄▅▆▇█", 40, 50
#: Titles and templates of the columns to show, each with one metric: `_FIRST` has those of each objective, and `_LAST`
#: has those of all objectives.
_LOSS = [("loss", "{loss:.4f}"), ("held-out", "{eval_loss:.4f}")]
_FIRST = {
    "sft": _LOSS,
    "dpo": [*_LOSS, ("accuracy", "{rewards/accuracies:.1%}"), ("held-out", "{eval_rewards/accuracies:.1%}")],
    "reward": [*_LOSS, ("accuracy", "{accuracy:.1%}"), ("held-out", "{eval_accuracy:.1%}")],
    "grpo": [
        ("reward", "{reward:.4f}"),
        ("held-out", "{eval_reward:.4f}"),
        ("length", "{completions/mean_length:.1f}"),
    ],
}
_LAST = [("tokens/s", "{tokens_per_s:,.0f}"), ("idle", "{idle_fraction:.1%}")]


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
    columns = [*_FIRST.get(run["objective"], _LOSS), *_LAST]
    shown = [ProgressColumn(title, 9, template) for title, template in columns]
    console, last = make_console(), -1
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            console.show_cursor(True)  # a killed process could not restore it
            for lines in _updates(run_dir, run["steps"], is_running):
                live.update(_block(lines, run["steps"], shown), refresh=True)
                last = lines[-1]["step"]
    else:
        reporter = ProgressReporter(run["steps"], shown, console)
        for lines in _updates(run_dir, run["steps"], is_running):
            for line in lines if last >= 0 else lines[-_BACKLOG:]:
                if line["step"] > last:
                    reporter.report(line)
                    last = line["step"]
    if (run_dir / "summary.json").is_file():
        console.print(closing_table(parse_json((run_dir / "summary.json").read_text(encoding="utf-8"))))
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


def _block(lines: Sequence[Mapping[str, Any]], num_steps: int, shown: Sequence[ProgressColumn]) -> Table:
    """Return a table with the progress and, for each metric, the latest value, a chart, the minimum and the maximum."""
    table = Table.grid(padding=(0, 2))
    step, recent = lines[-1]["step"], [line for line in lines if line["step"]][-_RECENT:]
    num_filled = round(_NUM_BARS * step / num_steps)
    times = [datetime.fromisoformat(line["time"]) for line in recent]
    left_s = (times[-1] - times[0]).total_seconds() / (len(times) - 1) * (num_steps - step) if len(times) > 1 else None
    left = "" if left_s is None else f"{format_duration(left_s)} left"
    table.add_row("step", f"{step}/{num_steps}", "█" * num_filled + "▁" * (_NUM_BARS - num_filled), left)
    for column in shown:
        metric = column.template[1:].partition(":")[0]
        with_metric = [line for line in lines if line.get(metric) is not None]
        if with_metric:
            ends = [column.format(each(with_metric, key=lambda line: line[metric])) for each in (min, max)]
            course = _bars([line[metric] for line in with_metric])
            table.add_row(column.title, column.format(with_metric[-1]), course, f"{ends[0]} to {ends[1]}")
    return table


def _bars(values: Sequence[float]) -> str:
    """Return a bar chart of at most `_NUM_BARS` characters. The heights are scaled to the range of the values."""
    count = min(_NUM_BARS, len(values))
    picked = [values[(number + 1) * len(values) // count - 1] for number in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_HEIGHTS[int(7 * (value - low) / (high - low or 1) + 0.5)] for value in picked)
