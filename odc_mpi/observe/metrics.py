"""What a run tells about itself: a line per step, progress on the terminal, a summary.

Nothing here communicates: the trainer reduces over ranks what has to be, and rank 0 hands it in. What is written:
``metrics.jsonl`` (one JSON object per step) and ``summary.json`` in the run directory, and standard output.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from odc_mpi.errors import UserError
from odc_mpi.files import keep, warn_lost

#: The file of a run that has a line per step.
METRICS = "metrics.jsonl"

WAITS = ("fetch_wait_s", "accumulate_wait_s", "boundary_wait_s")

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
        for name in ("step_s", *WAITS):
            self._seconds[name] += getattr(metrics, name)

    def with_earlier(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts, with the waits of the steps before this start added to those since. Local."""
        return {**facts, **{name: facts[name] + self._earlier.get(name, 0.0) for name in WAITS if name in facts}}

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
            **{name: self._seconds[name] for name in WAITS},
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
