"""Progress of a run on the terminal of rank 0: a line per step, a progress bar, and a closing table.

Under mpiexec, the type of rank 0's standard output does not reveal whether there is a terminal (tested with MPICH 5.0
and Open MPI 5.0). With MPICH, it is a pipe, and no rank has a controlling terminal. With Open MPI, it is a
pseudo-terminal of the launcher, even if mpiexec writes to a file. Both launchers forward the output of rank 0
immediately and unchanged, so a progress bar works if and only if the output of *mpiexec* is a terminal, which
`terminal_width` reads from /proc. If the launcher is Slurm's or runs on another node, no terminal is found, and only
plain lines are printed. Output from other ranks or mpiexec appears after the bar, which is drawn again on a new line.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from odc_mpi.errors import UserError
from odc_mpi.formatting import format_duration
from odc_mpi.observe.metrics import GROUPS, Metric

# Names of launchers in /proc, of at most 15 characters each: MPICH and derivatives, Open MPI 4, Open MPI 5.
_LAUNCHERS = {"mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun", "orterun", "orted", "prterun", "prted"}

#: Last column: estimated time until the last step, based on the mean duration of the steps since this start.
_LEFT = Metric("left", "", form="{}", column=("left", 8))


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """Prints a line per step and, on a terminal, a progress bar with the remaining time.

    The step number precedes the columns that `metrics` declare, of which only the first is printed for a skipped step.
    `console` defaults to `make_console()`. Use the reporter as a context manager, so that the bar is removed before an
    error is printed.
    """

    def __init__(self, total_steps: int, metrics: Sequence[Metric], console: Console | None = None) -> None:
        self.console = console or make_console()
        self._total_steps, self._metrics = total_steps, metrics
        self._columns = [(metric, *metric.column) for metric in (*metrics, _LEFT) if metric.column]
        self._bar = _start_bar(self.console, total_steps) if self.console.is_terminal else None
        self._began_s, self._first_step = 0.0, 0
        self._print(self._line("step", [title for _, title, _ in self._columns]), "bold")

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Print the line for a completed step, or for step 0 (the state before training), and advance the bar."""
        step = f"{metrics['step']}/{self._total_steps}"
        if "time" in metrics and metrics["step"]:
            now_s = datetime.fromisoformat(metrics["time"]).timestamp()
            if not self._first_step:
                self._began_s, self._first_step = now_s - metrics["step_s"], metrics["step"]
            step_s = (now_s - self._began_s) / (metrics["step"] - self._first_step + 1)
            metrics = {**metrics, "left": format_duration(step_s * (self._total_steps - metrics["step"]))}
        cells = [metric.format(metrics) for metric, _, _ in self._columns]
        if metrics.get("skipped"):
            self._print(self._line(step, cells[:1]) + "  skipped: non-finite gradient", "yellow")
        else:
            self._print(self._line(step, cells))
        if self._bar:
            left = _LEFT.format(metrics)
            self._bar.update(self._bar.task_ids[0], completed=metrics["step"], left=left, refresh=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remove the bar and print the closing table."""
        self.close()
        self.console.print(closing_table(summary, self._metrics))

    def close(self) -> None:
        """Remove the bar. May be called more than once."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, step: str, cells: list[str]) -> str:
        widths = [2 * len(str(self._total_steps)) + 1, *(width for _, _, width in self._columns)]
        return "  ".join(cell.rjust(width) for cell, width in zip([step, *cells], widths, strict=False))

    def _print(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _start_bar(console: Console, total_steps: int) -> Progress:
    """Start a bar that is drawn once per step, because a thread that redraws the bar would slow down training."""
    columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("{task.fields[left]} left"))
    gap = TextColumn("")  # before output of other processes after the bar
    bar = Progress(*columns, gap, console=console, auto_refresh=False)
    bar.add_task("steps", total=total_steps, left="-")
    bar.start()
    console.show_cursor(True)  # rich hides it, and a killed rank could not restore it
    return bar


def closing_table(summary: Mapping[str, Any], metrics: Sequence[Metric]) -> Table:
    """Return the closing table of a run: the rows that its metrics declare, based on the content of ``summary.json``.

    Rows without values are omitted. Without declarations, which older runs lack, the table has all numbers and texts.
    """
    known = {key: value for key, value in summary.items() if value is not None}
    if not metrics:
        metrics = [
            Metric(key, "", summary="end", row=key) for key, value in known.items() if not isinstance(value, dict)
        ]
    rows: dict[str, tuple[str, list[str]]] = {}
    for metric in sorted(metrics, key=lambda each: GROUPS.index(each.group)):
        texts = {reduce: metric.format(known, key) for key, reduce in metric.entries.items() if reduce != "best"}
        if metric.row and any(texts.values()):
            title = metric.row + (f" ({' -> '.join(texts)})" if len(texts) > 1 else "")
            rows.setdefault(metric.row, (title, []))[1].append(" -> ".join(text or "-" for text in texts.values()))
    table = Table("", "", box=SIMPLE, show_header=False)
    for title, parts in rows.values():
        table.add_row(title, Text(", ".join(parts), overflow="fold"))
    return table


def make_console() -> Console:
    """Return a console for standard output, in terminal mode if `terminal_width` finds a terminal."""
    width = terminal_width()
    return Console(force_terminal=width is not None, width=width or 100, color_system="auto" if width else None)


def terminal_width() -> int | None:
    """Return the width in columns of the terminal that shows this rank's standard output, or None if there is none.

    Setting ``ODC_MPI_PROGRESS`` to ``bar`` or ``plain`` in the environment overrides the detection. Raises `UserError`
    if it has any other value.
    """
    requested = os.environ.get("ODC_MPI_PROGRESS", "")
    if requested not in ("", "bar", "plain"):
        raise UserError(f"ODC_MPI_PROGRESS: expected bar or plain, got {requested!r}")
    if requested == "plain" or (not requested and os.environ.get("TERM", "dumb") == "dumb"):
        return None
    return _columns(_outermost_launcher()) or (shutil.get_terminal_size().columns if requested else None)


def _outermost_launcher() -> int | None:
    """Return the process ID of the outermost launcher (mpiexec) among the ancestors of this process, or None."""
    pid, launcher = os.getppid(), None
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # /proc is missing or not readable
            return launcher
        name, _, rest = stat.partition("(")[2].rpartition(")")
        launcher = pid if name in _LAUNCHERS else launcher
        pid = int(rest.split()[1])
    return launcher


def _columns(launcher: int | None) -> int | None:
    """Return the width of the terminal to which `launcher` (None: this process) writes, or None if there is none."""
    try:
        if launcher is None:
            return os.get_terminal_size(1).columns or 80  # 0: the terminal does not report its width
        output = Path(f"/proc/{launcher}/fd/1")
        if not output.is_char_device():  # opening a pipe would make this process a reader of it
            return None
        with os.fdopen(os.open(output, os.O_RDONLY | os.O_NOCTTY), "rb") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return None
