"""Reports on runs, created from the files in a run directory, some of which are missing if the run was killed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi import yaml_dialect as dialect
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import UserError
from odc_mpi.files import parse_json, read_lines
from odc_mpi.formatting import format_duration, format_quantity, truncate_text
from odc_mpi.islands.run_dir import combine_metrics, current_islands
from odc_mpi.observe.metrics import DETAILS, GROUPS, OTHER, Metric, read_declarations
from odc_mpi.report.page import ReportPage, Table, Tile
from odc_mpi.report.run_figures import histograms, loss_figure, rewards_figure, time_breakdown, timeline

#: Maximum magnitude of numbers in plots, which prevents overflow. NaN is also excluded.
_MAX_PLOTTED = 1e100
#: Number of completions shown for each of the first and last steps, and maximum length of their texts in characters.
_NUM_SAMPLES, _SAMPLE_CHARS = 3, 400


def describe(run_dir: Path) -> ReportPage:
    """Create a report on a run from its run directory.

    Raises `UserError` if `run_dir` is not a run directory or its config.yaml is not valid YAML, OSError if a file
    cannot be read, and LookupError, TypeError or ValueError if a file has unexpected content.
    """
    config, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    if not (config.is_file() or metrics.is_file()):
        raise UserError(
            f"{run_dir}: expected a run directory, which has config.yaml and metrics.jsonl, or the JSON of odc-mpi "
            "simulate"
        )
    notes: list[str] = []
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    settings = dialect.read_file(config) if text else {}
    if not isinstance(settings, dict):
        raise ValueError("config.yaml is not a mapping")
    islands = current_islands(run_dir)  # that train apart; the trace is that of the first
    lines = combine_metrics([_read_lines(each / metrics.name, notes) for each in islands])
    lines = lines or _read_lines(metrics, notes)
    steps = [line for line in lines if line["step"]]
    summary = _read_json(run_dir / "summary.json", "the run is still active or ended before its last step", notes) or {}
    reason = "it is written at the end of a run, unless run.trace_steps is 0. Without it there is no timeline of ranks"
    trace = _read_json((islands or [run_dir])[0] / "trace.json", reason, notes)
    has_rewards = any("reward" in step for step in steps)
    lengths = None if has_rewards else _read_lengths(settings, notes)

    figures = [(rewards_figure if has_rewards else loss_figure)(lines)] if steps else []
    figures += [timeline(trace)] if trace else []
    figures += [time_breakdown(steps)] if steps else []
    figures += histograms(lengths, trace)
    samples = _samples(run_dir / "completions.jsonl") if has_rewards else []
    subtitle = _subtitle(steps, summary, settings)
    collapsed = {"Configuration": text} if text else {}
    declared = read_declarations(run_dir)
    tiles, groups = _tiles(steps, summary, settings, declared), _summary_groups(summary, declared)
    return ReportPage(f"Run {run_dir.resolve().name}", subtitle, notes, figures, samples, collapsed, tiles, groups)


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    steps = []
    for line in read_lines(path):
        try:
            step = parse_json(line)
        except ValueError:
            step = None
        if _is_step(step):
            steps.append({key: value for key, value in step.items() if not isinstance(value, str)})
        else:  # a run that was killed may have written only part of its last line
            notes.append(f"{path.name}: skipped a line that is not the JSON of a step, after {len(steps)} steps.")
    if not steps:
        notes.append(f"There is no step in {path.name}: the run ended before its first step.")
    return steps


def _is_step(step: Any) -> bool:
    """Return True if a line of ``metrics.jsonl`` maps all keys except `time` to plottable numbers or null."""
    return isinstance(step, dict) and all(
        value is None or key == "time" or (isinstance(value, int | float) and abs(value) <= _MAX_PLOTTED)
        for key, value in step.items()
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
        notes.append(f"The data set {path} (data.path) was not found: the lengths of its sequences are unknown.")
    elif path:
        try:
            with Dataset(path) as dataset:
                return np.array(dataset.lengths)
        except UserError as error:
            notes.append(f"The lengths of the sequences are unknown: {error}.")
    return None


def _subtitle(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    run, data, lora = (settings.get(section) or {} for section in ("run", "data", "lora"))
    kind = str(run.get("objective", ""))
    kind += f" of LoRA adapters, r={lora['r']}" if lora.get("r") else ""
    parts = [kind, *(str(part) for part in (data.get("path"), summary.get("mpi_library")) if part)]
    lines = [", ".join(filter(None, parts))]
    if steps:
        tokens = sum(step["num_input_tokens"] for step in steps)
        seconds = format_duration(sum(step["step_s"] for step in steps))
        lines.append(f"{len(steps):,} steps, {tokens:,} tokens in {seconds}.")
    return lines


def _tiles(
    steps: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    settings: Mapping[str, Any],
    declared: Iterable[Metric],
) -> list[Tile]:
    model = settings.get("model") or {}
    name = Path(str(model["path"])).name if model.get("path") else (model.get("config") or {}).get("model_type", "")
    total, trained = summary.get("num_parameters"), summary.get("num_trained_parameters")
    sizes = [f"{total / 1e6:,.1f} M parameters"] if total else []
    sizes += [f"{100 * trained / total:.2g}% trained"] if total and trained and trained < total else []
    tiles = [Tile("model", name, ", ".join(sizes))] if name else []
    if "world_size" in summary:
        tiles.append(Tile("ranks", f"{summary['world_size']:,}", _describe_ranks(summary, settings)))
    if steps:
        seconds = max(1e-9, sum(step["step_s"] for step in steps))
        speed = sum(step["num_input_tokens"] for step in steps) / seconds
        idle = sum(step["idle_fraction"] * step["step_s"] for step in steps) / seconds
        tiles += [Tile("tokens per second", f"{speed:,.0f}", f"{len(steps):,} steps in {format_duration(seconds)}")]
        tiles += [Tile("ranks idle", f"{idle:.1%}", "of the time, waiting at step ends")]
    shown = {metric.key: metric for metric in declared if "tile" in metric.views}
    for key, metric in shown.items():
        values = [summary.get(entry) for entry, reduce in metric.entries.items() if reduce != "best"]
        if f"eval_{key}" not in shown and values and values[-1] is not None:
            form = metric.form if "%" in metric.form else "{:.3g}"
            texts = [form.format(value) for value in values if value is not None]
            tiles.append(Tile(metric.label, " → ".join(texts), "first to last" if len(texts) > 1 else "at the end"))
    return tiles


def _describe_ranks(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    nodes, islands = summary.get("num_nodes", 1), summary.get("num_islands", 1)
    parts = [f"on {nodes} node{'s'[: nodes != 1]}", summary.get("device", "")]
    if islands > 1:
        num_ranks = summary["world_size"] // islands
        mode = (settings.get("islands") or {}).get("mode")
        parts = [f"{islands:,} islands of {num_ranks:,} rank{'s'[: num_ranks != 1]}", mode, *parts]
    return ", ".join(filter(None, parts))


def _samples(path: Path) -> list[Table]:
    records = []
    for text in read_lines(path):
        try:
            records.append(parse_json(text))
        except ValueError:  # a killed run may have written only part of its last line
            continue
    if not records:
        return []
    chosen: list[dict[str, Any]] = []
    for step in dict.fromkeys((records[0]["step"], records[-1]["step"])):
        chosen += [record for record in records if record["step"] == step][:_NUM_SAMPLES]
    functions = list(chosen[0]["rewards"]) if len(chosen[0]["rewards"]) > 1 else []
    rows = [
        [
            f"{record['step']:,}",
            *(truncate_text(_text(record[key]), _SAMPLE_CHARS) for key in ("prompt", "completion")),
            *(
                "-" if value is None else f"{value:.3g}"
                for value in (record["reward"], *map(record["rewards"].get, functions))
            ),
        ]
        for record in chosen
    ]
    return [Table("Completions, with their rewards", ["step", "prompt", "completion", "reward", *functions], rows)]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in content)
    return str(content)


def _summary_groups(summary: Mapping[str, Any], declared: Iterable[Metric]) -> list[Table]:
    """Return one table for each group of metrics that has entries in the summary. Undeclared entries are "Other"."""
    names = {
        key: (metric.group, metric.entry_label(reduce)) for metric in declared for key, reduce in metric.entries.items()
    }
    names |= {key: (OTHER, key.replace("_", " ")) for key in summary if key not in names}
    rows: dict[str, list[list[str]]] = {group: [] for group in GROUPS if group != DETAILS}
    for key, (group, name) in names.items():
        if group in rows and summary.get(key) is not None:
            rows[group].append([name, format_quantity(key, summary[key])])
    return [Table(group, ["", ""], entries) for group, entries in rows.items() if entries]
