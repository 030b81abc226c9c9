"""Files in a run directory, such as metrics and checkpoints. Only rank 0 may call the functions that change them."""

import json
import math
from pathlib import Path

from odc_mpi.checkpoint.manifest import CHECKPOINTS, steps_in
from odc_mpi.checkpoint.publish import remove_incomplete
from odc_mpi.files import make_directory, parse_json, read_lines, write_text_durable
from odc_mpi.islands.run_dir import ISLANDS
from odc_mpi.observe.metrics import DECLARATIONS, METRICS, SUMMARY, read_metrics
from odc_mpi.observe.trackers import DIRECTORY as TRACKERS
from odc_mpi.training.rundir.run_dir_lock import convert_write_errors

#: File for the completions of a GRPO run. Each line has the key `step`, as in metrics.jsonl.
COMPLETIONS = "completions.jsonl"
#: File that describes a non-finite gradient, if `run.detect_anomaly` is set.
ANOMALY = "anomaly.json"
#: Files of the supervisor of a run (`odc_mpi.supervisor`): what restarts cost, and the last failure.
RESTARTS, FAILURE = "restarts.json", "failure.json"
_CONFIG, _TRACE = "config.yaml", "trace.json"
#: Names of a run's files and subdirectories, which a new run in the same directory moves to `earlier-N`.
RECORDS = (
    *(_CONFIG, DECLARATIONS, METRICS, _TRACE, SUMMARY, "report.html"),
    *(CHECKPOINTS, ISLANDS, TRACKERS, COMPLETIONS, ANOMALY, RESTARTS, FAILURE),
)


def open_run_directory(path: Path, config_text: str) -> None:
    """Move an earlier run's files to `earlier-N`, and write config.yaml. Raises `UserError` if writing fails."""
    with convert_write_errors(path):
        make_directory(path)
        remove_incomplete(path / CHECKPOINTS)
        if (path / CHECKPOINTS).is_dir() and not any((path / CHECKPOINTS).iterdir()):
            (path / CHECKPOINTS).rmdir()
        _move_aside(path, [path / name for name in RECORDS if (path / name).exists()])
        write_text_durable(path / _CONFIG, config_text)


def reopen_run_directory(path: Path, config_text: str, step: int) -> None:
    """Prepare the directory of a run that resumes from the checkpoint of `step`, and write config.yaml.

    Deletes the trace, the summary, anomaly.json, and the metrics and completions of later steps. Moves the checkpoints
    of later steps to `earlier-N`. Raises `UserError` if a file cannot be written.
    """
    with convert_write_errors(path):
        remove_incomplete(path / CHECKPOINTS)
        _move_aside(path, [later for number, later in steps_in(path / CHECKPOINTS).items() if number > step])
        metrics_lines = [json.dumps(line) + "\n" for line in read_metrics(path, step)]
        write_text_durable(path / METRICS, "".join(metrics_lines))
        if (path / COMPLETIONS).exists():
            lines = [line for line in read_lines(path / COMPLETIONS) if _parse_step(line) <= step]
            write_text_durable(path / COMPLETIONS, "".join(lines))
        write_text_durable(path / _CONFIG, config_text)
        for name in (_TRACE, SUMMARY, ANOMALY):
            (path / name).unlink(missing_ok=True)


def has_records(path: Path) -> bool:
    """Return True if a directory contains files from a run."""
    return any((path / name).exists() for name in RECORDS)


def _parse_step(line: str) -> float:
    """Return the step of a JSON line, or infinity if the line is incomplete because the run was killed."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def next_earlier(path: Path) -> Path:
    """Return the path of the first `earlier-N` that does not exist, to which an earlier run's files can be moved."""
    return next(earlier for n in range(1, 1 << 30) if not (earlier := path / f"earlier-{n}").exists())


def _move_aside(path: Path, records: list[Path]) -> None:
    if records:
        earlier = next_earlier(path)
        for record in records:
            target = earlier / record.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            record.rename(target)
