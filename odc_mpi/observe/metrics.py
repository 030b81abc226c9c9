"""What a run tells about itself: a line per step, progress on the terminal, a summary.

Nothing here communicates: the trainer reduces over ranks what has to be, and rank 0 hands it in. What is written:
``metrics.jsonl`` (one JSON object per step) and ``summary.json`` in the run directory, and standard output.

Terminals under mpiexec (seen with MPICH 5.0 and Open MPI 5.0 on a pseudo-terminal): rank 0's own standard output
tells nothing. With MPICH it is a pipe, and no rank has a controlling terminal, also where the user sits before one;
with Open MPI it is a pseudo-terminal of the launcher's, also where mpiexec's output goes into a file. Both forward at
once and unchanged what rank 0 writes, so a live display is drawn right if and only if *mpiexec's* output is a terminal.
`terminal_width` looks that up in /proc. It sees no launcher on another node, nor Slurm's: these mean plain lines. What
other ranks or mpiexec print lands behind the bar; nothing is lost, and the bar is drawn anew on the next line.
"""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from odc_mpi.errors import UserError
from odc_mpi.files import keep, warn_lost

# As /proc shows them, cut to 15 characters: MPICH and its kin, Open MPI up to 4, Open MPI from 5 on.
_LAUNCHERS = {"mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun", "orterun", "orted", "prterun", "prted"}

#: The file of a run that has a line per step.
METRICS = "metrics.jsonl"

_COLUMNS = {"loss": 8, "grad norm": 9, "lr": 8, "tokens/s": 9, "idle": 6, "micro": 7, "slowest": 7}
_WAITS = ("fetch_wait_s", "accumulate_wait_s", "boundary_wait_s")

# What a summary needs besides the steps; the trainer knows it.
_FACTS = (
    *("world_size", "transport", "reduction", "balance", "zero_copy", "progress"),
    *("peak_parameter_bytes", "collectives_per_minibatch", "mpi_library"),
)


@dataclass(frozen=True)
class StepMetrics:
    """One step, reduced over all ranks; a line of ``metrics.jsonl``. Tokens are those of all ranks, waits the mean."""

    step: int  # counted from 1
    loss: float  # mean over the minibatch's trained tokens
    grad_norm: float | None  # global and before clipping; None when clipping is off
    learning_rate: float  # the one this step used
    num_tokens: int  # trained tokens
    num_input_tokens: int  # tokens that went through the model
    step_s: float  # from one boundary to the next
    tokens_per_s: float  # input tokens
    idle_fraction: float  # that ranks stood at the boundary: 1 - mean / maximum over ranks of their busy seconds
    microbatches_min: int  # of the rank that ran fewest
    microbatches_max: int  # of the rank that ran most
    slowest_rank: int  # the last to come to the boundary
    skipped: bool  # the gradient was not finite: the parameters stayed as they were
    fetch_wait_s: float  # for parameters
    accumulate_wait_s: float  # for gradients to leave
    boundary_wait_s: float  # for other ranks, between minibatches


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

    def write(self, metrics: StepMetrics) -> None:
        """Append a line at once, so that a run which dies leaves all its finished steps. nan and inf are null."""
        line = (json.dumps(_finite(asdict(metrics)), allow_nan=False) + "\n").encode()
        begin = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(begin)  # a part of a line would spoil the next one
                self._file.seek(begin)
            if not self._warned:
                warn_lost(self._path, error)
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
        earlier: Lines of ``metrics.jsonl`` of the steps before this start, where a run goes on.
    """

    def __init__(self, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        self._start = perf_counter()
        self._num_steps = self._num_skipped = self._num_tokens = 0
        self._losses: list[float] = []  # first and last of the steps that were not skipped
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for line in earlier:
            values: dict[str, Any] = {name: math.nan if value is None else value for name, value in line.items()}
            self.add(StepMetrics(**values))
        self._earlier = dict(self._seconds)

    def add(self, metrics: StepMetrics) -> None:
        """Take in one step."""
        self._num_steps += 1
        self._num_tokens += metrics.num_input_tokens
        if metrics.skipped:
            self._num_skipped += 1
        else:
            self._losses = [*self._losses[:1], metrics.loss]
        self._seconds["idle_s"] += metrics.idle_fraction * metrics.step_s
        for name in ("step_s", *_WAITS):
            self._seconds[name] += getattr(metrics, name)

    def with_earlier(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts, with the waits of the steps before this start added to those since. Local."""
        return {**facts, **{name: facts[name] + self._earlier.get(name, 0.0) for name in _WAITS if name in facts}}

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``summary.json``.

        Args:
            facts: what the steps do not tell: world_size, transport, reduction, balance, zero_copy, progress,
                peak_parameter_bytes, collectives_per_minibatch, mpi_library, and whatever else is worth keeping.

        Returns:
            The facts and, over all steps: steps, skipped_steps, loss_first and loss_last (of steps not skipped; None
            without any), tokens (input tokens of all ranks), tokens_per_s, idle_fraction (weighted by step_s), the
            waits in seconds (mean over ranks), and elapsed_s since this object was made.

        Raises:
            KeyError: a fact is missing.
        """
        step_s = self._seconds["step_s"] or math.inf  # without a step, the rates below are 0
        return {
            **{name: facts[name] for name in _FACTS},
            **facts,
            "steps": self._num_steps,
            "skipped_steps": self._num_skipped,
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": self._losses[-1] if self._losses else None,
            "tokens": self._num_tokens,
            "tokens_per_s": self._num_tokens / step_s,
            "idle_fraction": self._seconds["idle_s"] / step_s,
            **{name: self._seconds[name] for name in _WAITS},
            "elapsed_s": perf_counter() - self._start + self._earlier.get("step_s", 0.0),
        }


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json``, whole or not at all, or warn that it cannot be written. Local; for rank 0."""
    keep(run_dir / "summary.json", json.dumps(_finite(dict(summary)), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Return the same with None for every nan and inf: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """What the user sees while a run goes. Local; for rank 0.

    On a terminal: a line per step above a bar with elapsed and remaining time. Elsewhere the lines alone, without
    control characters. Every line is flushed at once. Use it as a context manager, so that an error finds the bar gone.

    Args:
        total_steps: steps of the whole run.
        console: where to write; None takes `make_console`'s.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.console = console or make_console()
        self._total_steps = total_steps
        self._bar = _start_bar(self.console, total_steps) if self.console.is_terminal else None
        self._print(self._line("step", list(_COLUMNS)), "bold")

    def report(self, metrics: StepMetrics) -> None:
        """Show one finished step."""
        step = f"{metrics.step}/{self._total_steps}"
        if metrics.skipped:
            self._print(self._line(step, [f"{metrics.loss:.4f}"]) + "  skipped: non-finite gradient", "yellow")
        else:
            self._print(self._line(step, _cells(metrics)))
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=metrics.step, refresh=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the bar away and show the closing table."""
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
        widths = [2 * len(str(self._total_steps)) + 1, *_COLUMNS.values()]
        return "  ".join(cell.rjust(width) for cell, width in zip([step, *cells], widths, strict=False))

    def _print(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _cells(metrics: StepMetrics) -> list[str]:
    return [
        f"{metrics.loss:.4f}",
        "-" if metrics.grad_norm is None else f"{metrics.grad_norm:.4g}",
        f"{metrics.learning_rate:.2e}",
        f"{metrics.tokens_per_s:,.0f}",
        f"{metrics.idle_fraction:.1%}",
        f"{metrics.microbatches_min}-{metrics.microbatches_max}",
        f"rank {metrics.slowest_rank}",
    ]


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
    """Return the table that ends a run, from the content of ``summary.json``; what is absent shows as "-". Local."""

    def show(name: str, form: str = "", scale: float = 1.0) -> str:
        value = summary.get(name)
        return "-" if value is None else format(value * scale if form else value, form)

    rows = {
        "steps": f"{show('steps')} ({show('skipped_steps')} skipped)",
        "loss first -> last": f"{show('loss_first', '.4f')} -> {show('loss_last', '.4f')}",
        "tokens": f"{show('tokens', ',.0f')}, {show('tokens_per_s', ',.0f')} per second",
        "idle at boundaries": show("idle_fraction", ".1%"),
        "fetch, accumulate, boundary wait": ", ".join(f"{show(name, '.2f')} s" for name in _WAITS),
        "peak parameter memory": f"{show('peak_parameter_bytes', ',.1f', 2**-20)} MiB",
        "collectives per minibatch": show("collectives_per_minibatch"),
        "MPI library": " ".join(show("mpi_library").partition("\n")[0].split()),
        "run directory": show("run_dir"),
    }
    table = Table("", "", box=SIMPLE, show_header=False)
    for name, text in rows.items():
        table.add_row(name, Text(text, overflow="fold"))
    return table


def make_console() -> Console:
    """Return a console on standard output that is a terminal exactly if `terminal_width` finds one. Local.

    ``FORCE_COLOR`` colours the plain lines too; it does not call for a bar, as logs with colours cannot show one.
    """
    width = terminal_width()
    colours: Literal["auto", "standard"] | None = "standard" if os.environ.get("FORCE_COLOR") else None
    return Console(force_terminal=width is not None, width=width or 100, color_system="auto" if width else colours)


def terminal_width() -> int | None:
    """Return the columns of the terminal that shows this rank's standard output, or None. Local.

    ``ODC_MPI_PROGRESS=bar`` or ``plain`` in the environment decides for those who know better.

    Raises:
        UserError: ``ODC_MPI_PROGRESS`` has another value.
    """
    wish = os.environ.get("ODC_MPI_PROGRESS", "")
    if wish not in ("", "bar", "plain"):
        raise UserError(f"ODC_MPI_PROGRESS: expected bar or plain, got {wish!r}")
    if wish == "plain" or (not wish and os.environ.get("TERM", "dumb") == "dumb"):
        return None
    return _columns(_outermost_launcher()) or (shutil.get_terminal_size().columns if wish else None)


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
