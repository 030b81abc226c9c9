"""Reports on runs, created from the files in a run directory. Some files are missing if the run was killed."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi import yaml_dialect as dialect
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import UserError
from odc_mpi.files import parse_json
from odc_mpi.report.page import Figure, ReportPage, Table
from odc_mpi.report.plot_types import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    Curve,
    GanttChart,
    GanttRow,
    Histogram,
    Panel,
    Plot,
    Style,
    choose_ranks,
)

#: Spans of trace.json in which a rank waits for all other ranks.
_SYNC_POINTS = ("gradients_complete", "grad_norm", "parameters_published")
COMPUTES, FETCHES, PUSHES, WAITS = "computes", "fetches", "pushes", "waits at the boundary"
#: Kinds of spans in drawing order: fetches and pushes are drawn over microbatches.
_STYLES = {
    COMPUTES: Style(BLUE),
    FETCHES: Style(ORANGE, "\\\\\\"),
    PUSHES: Style(GREEN, "---"),
    WAITS: Style("none", "////"),
}
#: Maximum number of bars in a plot. If there are more steps, they are averaged in groups.
_MAX_BARS = 80
_NUM_BINS = 40
#: Maximum magnitude of a number that matplotlib can draw without overflow, with a margin. Excludes NaN.
_MAX_DRAWN = 1e100


def describe(run_dir: Path) -> ReportPage:
    """Create the report of a run from its run directory.

    Raises:
        UserError: `run_dir` is not a run directory, or its config.yaml is damaged.
        LookupError, TypeError, ValueError: Another file in the run directory is damaged.
    """
    config, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    if not (config.is_file() or metrics.is_file()):
        raise UserError(
            f"{run_dir}: expected a run directory, which has config.yaml and metrics.jsonl, or the JSON of a benchmark"
        )
    notes: list[str] = []
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    settings = dialect.read_file(config) if text else {}
    if not isinstance(settings, dict):
        raise ValueError("config.yaml is not a mapping")
    steps = _read_lines(metrics, notes)
    summary = _read_json(run_dir / "summary.json", "the run is still active or ended before its last step", notes) or {}
    reason = "it is written at the end of a run, unless run.trace_steps is 0. Without it there is no timeline of ranks"
    trace = _read_json(run_dir / "trace.json", reason, notes)
    lengths = _read_lengths(settings, notes)

    figures = [_gantt(trace)] if trace else []
    figures += [_time_breakdown(steps)] if steps else []
    figures += _histograms(lengths, trace)
    figures += [_loss(steps)] if steps else []
    rows = [[name, _cell(name, value)] for name, value in summary.items()]
    tables = [Table("Summary", ["", ""], rows)] if rows else []
    subtitle = _subtitle(steps, summary, settings.get("data") or {})
    collapsed = {"Configuration": text} if text else {}
    return ReportPage(f"Run {run_dir.resolve().name}", subtitle, notes, figures, tables, collapsed)


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    steps = []
    for line in lines:
        try:
            step = parse_json(line)
        except ValueError:
            step = None
        if _is_step(step):
            steps.append(step)
        else:  # a run that was killed may have written only part of its last line
            notes.append(f"{path.name}: skipped a line that is not the JSON of a step, after {len(steps)} steps.")
    if not steps:
        notes.append(f"There is no step in {path.name}: the run ended before its first step.")
    return steps


def _is_step(step: Any) -> bool:
    """Return True if a line of metrics.jsonl is a mapping of names to numbers that can be drawn, or null."""
    return isinstance(step, dict) and all(
        value is None or (isinstance(value, int | float) and abs(value) <= _MAX_DRAWN) for value in step.values()
    )


def _read_json(path: Path, reason: str, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        notes.append(f"There is no {path.name}: {reason}.")
        return None
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} is not a mapping")
    return content


def _read_lengths(settings: Mapping[str, Any], notes: list[str]) -> np.ndarray | None:
    path = (settings.get("data") or {}).get("path")
    if path and not Path(path).exists():
        notes.append(f"The data set {path} (data.path) no longer exists: the lengths of its sequences are unknown.")
    elif path:
        try:
            with Dataset(path) as dataset:
                return np.array(dataset.lengths)
        except UserError as error:
            notes.append(f"The lengths of the sequences are unknown: {error}.")
    return None


def _subtitle(
    steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], data_settings: Mapping[str, Any]
) -> list[str]:
    lines = []
    if steps:
        tokens = sum(step["num_input_tokens"] for step in steps)
        speed = tokens / max(1e-9, sum(step["step_s"] for step in steps))
        lines.append(f"{len(steps)} steps, {tokens:,} tokens, {speed:,.0f} tokens per second.")
    ranks = f"{summary['world_size']} ranks" if "world_size" in summary else ""
    parts = [str(part) for part in (ranks, data_settings.get("balance"), summary.get("mpi_library")) if part]
    return [*lines, ", ".join(parts)] if parts else lines


def _gantt(trace: Mapping[str, Any]) -> Figure:
    steps = trace["steps"]
    ends = [max(local["end_s"] for local in step["ranks"]) for step in steps]
    offsets = np.cumsum([0.0, *ends]).tolist()
    busy = np.sum([[_seconds(local["microbatches"]) for local in step["ranks"]] for step in steps], axis=0)
    chosen = choose_ranks(busy.tolist())
    rows = [_gantt_row(rank, [step["ranks"][rank] for step in steps], offsets) for rank in chosen]
    marks = [(at, f"step {step['step']}") for at, step in zip(offsets, steps, strict=False)]
    locals_ = [local for step in steps for local in step["ranks"]]
    total_s = sum(ends) * len(steps[0]["ranks"])
    waits = sum(_seconds(local[point]) for local in locals_ for point in _SYNC_POINTS) / total_s
    moves = sum(_seconds(local[kind]) for local in locals_ for kind in ("fetch", "accumulate")) / total_s
    works = max(0.0, sum(_seconds(local["microbatches"]) for local in locals_) / total_s - moves)
    period = f"steps {steps[0]['step']} to {steps[-1]['step']}" if len(steps) > 1 else f"step {steps[0]['step']}"
    title = (
        f"In {period} ranks compute {works:.0%} of the time, fetch and push {moves:.0%}, "
        f"wait at the boundary {waits:.0%}"
    )
    caption = (
        "A minibatch begins when the parameters are published, and ends when they are published again. Numbers are "
        "tokens of a microbatch. Blank time is the optimizer step, planning, and writing metrics."
    )
    if len(chosen) < len(busy):
        caption += f" {len(chosen)} of {len(busy)} ranks are shown, from least to most busy."
    if left_out_s := sum(sum(local["left_out_s"].values()) for local in locals_):
        caption += f" Short spans of {left_out_s:.3g} s in total were not recorded."
    return Figure(Plot("gantt", "gantt", title, ([GanttChart("", rows, offsets[-1], marks)], _STYLES)), caption)


def _gantt_row(rank: int, steps: Sequence[Mapping[str, Any]], offsets: Sequence[float]) -> GanttRow:
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _STYLES}
    notes = []
    for step, offset in zip(steps, offsets, strict=False):
        for began, ended, tokens in step["microbatches"]:
            spans[COMPUTES].append((offset + began, offset + ended))
            notes.append((offset + began, offset + ended, f"{tokens:,}"))
        for kind, names in ((FETCHES, ("fetch",)), (PUSHES, ("accumulate",)), (WAITS, _SYNC_POINTS)):
            spans[kind] += [(offset + began, offset + ended) for name in names for began, ended in step[name]]
    return GanttRow(f"rank {rank}", spans, notes)


def _seconds(spans: Sequence[Sequence[float]]) -> float:
    return sum(span[1] - span[0] for span in spans)


def _time_breakdown(steps: Sequence[Mapping[str, Any]]) -> Figure:
    at_once = math.ceil(len(steps) / _MAX_BARS)
    groups = [steps[i : i + at_once] for i in range(0, len(steps), at_once)]
    x = [float(np.mean([step["step"] for step in group])) for group in groups]
    waits = {"fetches": "fetch_wait_s", "pushes": "accumulate_wait_s", WAITS: "boundary_wait_s"}
    parts = {kind: [_share(group, name) for group in groups] for kind, name in waits.items()}
    rest = "computes and everything else"
    parts = {rest: [max(0.0, 1.0 - sum(values)) for values in zip(*parts.values(), strict=True)], **parts}
    every = Curve(
        "", [step["step"] for step in steps], [step["idle_fraction"] for step in steps], Style(SKY, "none"), "."
    )
    mean = Curve("", x, [float(np.mean([step["idle_fraction"] for step in group])) for group in groups])
    idle = sum(step["idle_fraction"] * step["step_s"] for step in steps) / sum(step["step_s"] for step in steps)
    title = f"Ranks were idle {idle:.1%} of the time, waiting for the slowest at the boundary of each minibatch"
    panel = Panel("fraction of the time in which ranks waited at the boundary", [every, mean])
    caption = "Means over all ranks." + (f" Bars and the line are means over {at_once} steps." if at_once > 1 else "")
    styles = {**_STYLES, rest: _STYLES[COMPUTES]}
    return Figure(Plot("stack", "time", title, (x, parts, styles, "step", panel)), caption)


def _share(group: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(step[name] for step in group) / sum(step["step_s"] for step in group)


def _histograms(lengths: np.ndarray | None, trace: Mapping[str, Any] | None) -> list[Figure]:
    panels, title = [], []
    if lengths is not None and len(lengths):
        counts, edges = np.histogram(lengths, _NUM_BINS)
        median = int(np.median(lengths))
        marks = [(median, f"half are below {median:,}")]
        panels.append(Histogram("sequences of the data set", edges.tolist(), counts.tolist(), Style(SKY), marks))
        title.append(f"sequences have {lengths.min():,} to {lengths.max():,} tokens, half of them below {median:,}")
    if trace:
        tokens, max_tokens = trace["tokens_per_microbatch"], trace["max_tokens_per_microbatch"]
        middles = [(a + b) / 2 for a, b in pairwise(tokens["edges"])]
        full = float(np.average(middles, weights=tokens["counts"])) / max_tokens if sum(tokens["counts"]) else 0.0
        marks = [(max_tokens, f"at most {max_tokens:,}")]
        heading = f"microbatches of steps {tokens['first_step']} to {tokens['last_step']}"
        panels.append(Histogram(heading, tokens["edges"], tokens["counts"], Style(BLUE), marks))
        title.append(f"microbatches are {full:.0%} full")
    text = "; ".join(title)
    return [Figure(Plot("histograms", "lengths", text[:1].upper() + text[1:], [panels]))] if panels else []


def _loss(steps: Sequence[Mapping[str, Any]]) -> Figure:
    numbers = [step["step"] for step in steps]
    loss = [math.nan if step["loss"] is None or step["skipped"] else step["loss"] for step in steps]
    known = [value for value in loss if not math.isnan(value)]
    title = "No step has a loss"
    if known:
        verb = "fell" if known[-1] < known[0] else "went"
        title = f"The loss {verb} from {known[0]:.4g} to {known[-1]:.4g} in {len(steps):,} steps"
    curves, captions = [Curve("", numbers, loss)], []
    evaluated = [step for step in steps if step.get("eval_loss") is not None]
    if evaluated:
        points = [step["step"] for step in evaluated], [step["eval_loss"] for step in evaluated]
        curves.append(Curve("", *points, Style(ORANGE, "--"), "o"))
        captions.append(f"On held-out data, dashed, it was {points[1][0]:.4g} first and {points[1][-1]:.4g} last.")
    panels = [
        Panel("loss, mean over trained tokens", curves, height=2.8),
        Panel(
            "learning rate",
            [Curve("", numbers, [step["learning_rate"] for step in steps], Style(GREEN, "-"))],
            height=1.1,
        ),
    ]
    if skipped := sum(bool(step["skipped"]) for step in steps):
        captions.append(f"{skipped} steps were skipped: their gradients were not finite.")
    return Figure(Plot("curves", "loss", title, (panels, "step")), " ".join(captions))


def _cell(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_cell(key, part)}" for key, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else " ".join(str(value).split())
