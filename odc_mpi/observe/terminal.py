"""Progress of a run on the terminal: a line per step, a bar, the closing table. Local; for rank 0.

Terminals under mpiexec (seen with MPICH 5.0 and Open MPI 5.0 on a pseudo-terminal): rank 0's own standard output
tells nothing. With MPICH it is a pipe, and no rank has a controlling terminal, also where the user sits before one;
with Open MPI it is a pseudo-terminal of the launcher's, also where mpiexec's output goes into a file. Both forward at
once and unchanged what rank 0 writes, so a live display is drawn right if and only if *mpiexec's* output is a terminal.
`terminal_width` looks that up in /proc. It sees no launcher on another node, nor Slurm's: these mean plain lines. What
other ranks or mpiexec print lands behind the bar; nothing is lost, and the bar is drawn anew on the next line.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from odc_mpi.errors import UserError
from odc_mpi.observe.metrics import ProgressColumn

# As /proc shows them, cut to 15 characters: MPICH and its kin, Open MPI up to 4, Open MPI from 5 on.
_LAUNCHERS = {"mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun", "orterun", "orted", "prterun", "prted"}

_WAITS = ("fetch_wait_s", "accumulate_wait_s", "boundary_wait_s")


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """What the user sees while a run goes. Local; for rank 0.

    On a terminal: a line per step above a bar with elapsed and remaining time. Elsewhere the lines alone, without
    control characters. Every line is flushed at once. Use it as a context manager, so that an error finds the bar gone.

    Args:
        total_steps: steps of the whole run.
        columns: of a line, behind the step; of a step that was skipped the first alone is shown.
        console: where to write; None takes `make_console`'s.
    """

    def __init__(self, total_steps: int, columns: Sequence[ProgressColumn], console: Console | None = None) -> None:
        self.console = console or make_console()
        self._total_steps = total_steps
        self._columns = columns
        self._bar = _start_bar(self.console, total_steps) if self.console.is_terminal else None
        self._print(self._line("step", [column.title for column in columns]), "bold")

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step."""
        step = f"{metrics['step']}/{self._total_steps}"
        cells = [column.format_cell(metrics) for column in self._columns]
        if metrics["skipped"]:
            self._print(self._line(step, cells[:1]) + "  skipped: non-finite gradient", "yellow")
        else:
            self._print(self._line(step, cells))
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=metrics["step"], refresh=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remove the bar and show the closing table."""
        self.close()
        self.console.print(closing_table(summary))

    def close(self) -> None:
        """Give the terminal back; a second time does nothing."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, step: str, cells: list[str]) -> str:
        widths = [2 * len(str(self._total_steps)) + 1, *(column.width for column in self._columns)]
        return "  ".join(cell.rjust(width) for cell, width in zip([step, *cells], widths, strict=False))

    def _print(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _start_bar(console: Console, total_steps: int) -> Progress:
    """Start a bar that is drawn once per step: a thread that redraws it would run beside the training it shows."""
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    gap = TextColumn("")  # before what others print behind the bar
    bar = Progress(*columns, gap, console=console, auto_refresh=False, speed_estimate_period=3600)
    bar.add_task("steps", total=total_steps)
    bar.start()
    console.show_cursor(True)  # rich hides it; a rank that is killed could not bring it back
    return bar


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Return the table that ends a run, from the content of ``summary.json``; what is absent shows as "-"."""

    def format_entry(name: str, form: str = "", scale: float = 1.0) -> str:
        value = summary.get(name)
        return "-" if value is None else format(value * scale if form else value, form)

    rows = {
        "steps": f"{format_entry('steps')} ({format_entry('skipped_steps')} skipped)",
        "loss first -> last": f"{format_entry('loss_first', '.4f')} -> {format_entry('loss_last', '.4f')}",
        "tokens": f"{format_entry('tokens', ',.0f')}, {format_entry('tokens_per_s', ',.0f')} per second",
        "idle at boundaries": format_entry("idle_fraction", ".1%"),
        "fetch, accumulate, boundary wait": ", ".join(f"{format_entry(name, '.2f')} s" for name in _WAITS),
        "peak parameter memory": f"{format_entry('peak_parameter_bytes', ',.1f', 2**-20)} MiB",
        "collectives per minibatch": format_entry("collectives_per_minibatch"),
        "MPI library": " ".join(format_entry("mpi_library").partition("\n")[0].split()),
        "run directory": format_entry("run_dir"),
    }
    if "eval_loss" in summary:
        start = f"{format_entry('eval_loss_start', '.4f')} -> {format_entry('eval_loss', '.4f')}"
        rows["evaluation loss start -> last"] = f"{start}, perplexity {format_entry('eval_perplexity', ',.4g')}"
    table = Table("", "", box=SIMPLE, show_header=False)
    for name, text in rows.items():
        table.add_row(name, Text(text, overflow="fold"))
    return table


def make_console() -> Console:
    """Return a console on standard output that is a terminal exactly if `terminal_width` finds one.

    ``FORCE_COLOR`` colours the plain lines too; it does not call for a bar, as logs with colours cannot show one.
    """
    width = terminal_width()
    colors: Literal["auto", "standard"] | None = "standard" if os.environ.get("FORCE_COLOR") else None
    return Console(force_terminal=width is not None, width=width or 100, color_system="auto" if width else colors)


def terminal_width() -> int | None:
    """Return the columns of the terminal that shows this rank's standard output, or None.

    ``ODC_MPI_PROGRESS=bar`` or ``plain`` in the environment decides for those who know better.

    Raises:
        UserError: ``ODC_MPI_PROGRESS`` has another value.
    """
    requested = os.environ.get("ODC_MPI_PROGRESS", "")
    if requested not in ("", "bar", "plain"):
        raise UserError(f"ODC_MPI_PROGRESS: expected bar or plain, got {requested!r}")
    if requested == "plain" or (not requested and os.environ.get("TERM", "dumb") == "dumb"):
        return None
    return _columns(_outermost_launcher()) or (shutil.get_terminal_size().columns if requested else None)


def _outermost_launcher() -> int | None:
    """Return the process id of mpiexec itself, not of the helpers between it and this rank; None without one."""
    pid, found = os.getppid(), None
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # no /proc here, or not ours to read
            return found
        name, _, rest = stat.partition("(")[2].rpartition(")")
        found = pid if name in _LAUNCHERS else found
        pid = int(rest.split()[1])
    return found


def _columns(launcher: int | None) -> int | None:
    """Return the width of the terminal the launcher, or else this process, writes to; None if that is no terminal."""
    try:
        if launcher is None:
            return os.get_terminal_size(1).columns or 80  # 0: a terminal that does not know
        output = Path(f"/proc/{launcher}/fd/1")
        if not output.is_char_device():  # opening a pipe would make us one of its readers
            return None
        with os.fdopen(os.open(output, os.O_RDONLY | os.O_NOCTTY), "rb") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return None
