"""View of a run from another process: the rows of its table, from the files in its directory, as they are written."""

import time
from collections.abc import Callable
from pathlib import Path

from odc_mpi import yaml_dialect
from odc_mpi.errors import UserError
from odc_mpi.files import parse_json
from odc_mpi.observe.metrics import METRICS, ProgressColumn, read_metrics
from odc_mpi.observe.terminal import ProgressReporter

#: Number of earlier lines that are shown at the start, and time between two looks at the files, in seconds.
_BACKLOG, _POLL_S = 20, 1.0


def _column(title: str, width: int, key: str, form: str) -> ProgressColumn:
    return ProgressColumn(title, width, lambda line: "-" if line[key] is None else format(line[key], form))


_FIRST = {
    "sft": [_column("loss", 8, "loss", ".4f"), _column("held-out", 8, "eval_loss", ".4f")],
    "grpo": [
        _column("reward", 8, "reward", ".4f"),
        _column("held-out", 8, "eval_reward", ".4f"),
        _column("length", 7, "completions/mean_length", ".1f"),
    ],
}
_LAST = [_column("tokens/s", 9, "tokens_per_s", ",.0f"), _column("idle", 6, "idle_fraction", ".1%")]


def watch(run_dir: Path, is_running: Callable[[], bool], wait_s: float) -> None:
    """Print the steps of a run until it ends, and its summary.

    Args:
        is_running: Function that returns True while the run may write further lines.
        wait_s: Time to wait for a run that has not started, in seconds.

    Raises:
        UserError: No run started in time.
    """
    ends = time.monotonic() + wait_s
    while not (run_dir / "config.yaml").is_file():
        if time.monotonic() > ends:
            raise UserError(f"{run_dir}: expected a run directory, with config.yaml, within {wait_s:g} s (--wait)")
        time.sleep(_POLL_S)
    run = yaml_dialect.read_file(run_dir / "config.yaml")["run"]
    with ProgressReporter(run["steps"], [*_FIRST.get(run["objective"], _FIRST["sft"]), *_LAST]) as reporter:
        shown, size, goes_on = -1, -1, True
        while goes_on:
            goes_on = is_running()  # before reading: a run writes its last line before it ends
            metrics = run_dir / METRICS
            previous, size = size, metrics.stat().st_size if metrics.exists() else -1
            if size != previous:
                lines = [line for line in read_metrics(run_dir, run["steps"]) if line["step"] > shown]
                for line in lines if shown >= 0 else lines[-_BACKLOG:]:
                    reporter.report(line)
                    shown = line["step"]
            if goes_on:
                time.sleep(_POLL_S)
        if (run_dir / "summary.json").is_file():
            reporter.finish(parse_json((run_dir / "summary.json").read_text(encoding="utf-8")))
        else:
            reporter.console.print(f"the run ended after step {max(0, shown)} of {run['steps']}, without a summary")
