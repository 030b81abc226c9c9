"""Files of a run whose islands train apart.

RUN/config.yaml, RUN/summary.json     settings, and the summary of all islands
RUN/islands/size                      number of islands
RUN/islands/K/                        run directory of island K, with metrics and checkpoints
RUN/islands/merges/                   decisions on the merges of this start, with `islands.quorum`
"""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odc_mpi.files import write_text_durable

ISLANDS, MERGES = "islands", "merges"
#: Metrics whose values on the islands are added. Of most others, the mean is taken.
_SUMS = {"num_tokens", "num_input_tokens", "tokens_per_s"}
#: Metrics that are means over loss tokens.
_TOKEN_MEANS = {"loss", "mean_token_accuracy", "entropy"}
#: Metrics that describe a rank of one island.
_OMITTED = {"slowest_rank"}


def island_directories(run_dir: Path) -> list[Path]:
    """Return the run directories of all islands in `run_dir`, in order, also of an earlier start with more islands."""
    folder = run_dir / ISLANDS
    found = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def current_islands(run_dir: Path) -> list[Path]:
    """Return the run directories of the islands of the last start, in order; empty if the run has no such islands."""
    try:
        size = int((run_dir / ISLANDS / "size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []
    return island_directories(run_dir)[:size]


def write_size(run_dir: Path, size: int) -> None:
    """Write the number of islands. Raises `OSError` if that fails."""
    (run_dir / ISLANDS).mkdir(exist_ok=True)
    write_text_durable(run_dir / ISLANDS / "size", f"{size}\n")


def combine_metrics(islands: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Combine the lines of ``metrics.jsonl`` of all islands up to the last step that all of them have taken.

    A step from an earlier start with fewer islands has the lines of these.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in (line for lines in islands for line in lines):
        by_step.setdefault(line["step"], []).append(line)
    last = min((lines[-1]["step"] if lines else -1 for lines in islands), default=-1)
    return [_combine(by_step[step]) for step in sorted(by_step) if step <= last]


def _combine(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    combined: dict[str, Any] = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        present = [line for line in lines if line.get(key) is not None]
        values, counts = [line[key] for line in present], [line.get("num_tokens") or 0 for line in present]
        if key in _OMITTED:
            continue
        if not values:
            combined[key] = None
        elif isinstance(values[0], bool):
            combined[key] = any(values)
        elif key == "time" or key.endswith("_max") or key.startswith("peak_"):
            combined[key] = max(values)
        elif key == "step" or key.endswith("_min"):
            combined[key] = min(values)
        elif key in _SUMS:
            combined[key] = sum(values)
        elif key in _TOKEN_MEANS and any(counts):
            combined[key] = sum(map(operator.mul, values, counts)) / sum(counts)
        else:
            combined[key] = sum(values) / len(values)
    return combined
