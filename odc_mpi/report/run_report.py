"""Reports on runs, created from the files in a run directory, some of which are missing if the run was killed."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi import yaml_dialect as dialect
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import UserError
from odc_mpi.files import parse_json, read_lines
from odc_mpi.formatting import format_duration, format_seconds, truncate_text
from odc_mpi.islands.run_dir import combine_metrics, current_islands
from odc_mpi.report.page import ReportPage, Table, Tile
from odc_mpi.report.run_figures import histograms, loss_figure, rewards_figure, time_breakdown, timeline

#: Maximum magnitude of numbers in plots, which prevents overflow. NaN is also excluded.
_MAX_PLOTTED = 1e100
#: Number of completions shown for each of the first and last steps, and maximum length of their texts in characters.
_NUM_SAMPLES, _SAMPLE_CHARS = 3, 400
#: Display name of each objective.
_OBJECTIVES = {
    "sft": "Supervised fine-tuning",
    "dpo": "Training on preferences (DPO)",
    "reward": "Training of a reward model",
    "grpo": "Training from rewards (GRPO)",
}
#: Groups of entries in ``summary.json``. Each heading is followed by indented entries: keys and their display names.
_SUMMARY = """
Result
    steps: steps; skipped_steps: skipped steps; loss_first: loss of the first step; loss_last: loss of the last step;
    reward_first: mean reward of the first step; reward_last: mean reward of the last step;
    eval_loss_start: held-out loss before training; eval_loss: held-out loss at the end;
    eval_loss_best: lowest held-out loss; eval_perplexity: held-out perplexity at the end;
    eval_accuracy_start: held-out accuracy before training; eval_accuracy: held-out accuracy at the end;
    eval_reward_start: held-out reward before training; eval_reward: held-out reward at the end;
    eval_exact_match_start: held-out exact match before training; eval_exact_match: held-out exact match at the end;
    failed_rewards: rewards that failed; best_checkpoint: step of the best checkpoint
Speed
    elapsed_s: duration; start_s: start, by phase; tokens: tokens; tokens_per_s: tokens per second;
    idle_fraction: idle, waiting at step ends; fetch_wait_s: waiting for parameters, per rank;
    accumulate_wait_s: waiting for pushes, per rank; boundary_wait_s: waiting at step ends, per rank;
    island_wait_s: waiting for islands, per rank;
    generate_s: generating, per rank; rollout_wait_s: waiting for completions, per rank;
    groups_claimed_from_other_ranks: prompt groups trained by another rank; eval_s: evaluating;
    checkpoint_pause_s: copying for checkpoints; checkpoint_wait_s: waiting for checkpoints
Memory and traffic
    peak_parameter_bytes: fetched parameters, peak per rank; peak_gradient_bytes: gradient buffers, peak per rank;
    parameter_cache_bytes: cache of parameters, per rank; gradient_cache_bytes: cache of gradients, per rank;
    bytes_fetched: fetched per step and rank; bytes_fetched_other_nodes: of these from other nodes;
    bytes_pushed: pushed per step and rank; bytes_pushed_other_nodes: of these to other nodes;
    bytes_between_islands: exchanged with other islands per step and rank;
    collectives_per_minibatch: collectives per step
Model and machine
    num_parameters: parameters; num_trained_parameters: trained parameters; param_dtype: type of parameters;
    device: device; world_size: ranks; num_nodes: nodes; hosts: hosts; mpi_library: MPI library;
    window_device: window memory; zero_copy: zero-copy reads on a node; reduction: gradients travel by;
    progress: progress thread; balance: balance of work; checkpoints_saved: checkpoints saved;
    checkpoints_failed: checkpoints failed; run_dir: run directory
"""
#: Entries that are not shown because they repeat others or are details of how communication was chosen.
_OMITTED = {
    *("decision", "ranks_per_node", "num_islands", "checkpoint_waits"),
    *("bytes_fetched_same_node", "bytes_pushed_same_node"),
}


def describe(run_dir: Path) -> ReportPage:
    """Create a report on a run from its run directory.

    Raises `UserError` if `run_dir` is not a run directory or its config.yaml is not valid YAML, OSError if a file
    cannot be read, and LookupError, TypeError or ValueError if a file has unexpected content.
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
    tiles = _tiles(steps, summary, settings)
    if has_rewards:  # the loss of a policy gradient says nothing about progress
        summary = {key: value for key, value in summary.items() if not key.startswith("loss_")}
    title = f"Run {run_dir.resolve().name}"
    return ReportPage(title, subtitle, notes, figures, samples, collapsed, tiles, _summary_groups(summary))


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
    kind = _OBJECTIVES.get(run.get("objective", "sft"), "")
    kind += f" of LoRA adapters, r={lora['r']}" if lora.get("r") else ""
    parts = [kind, *(str(part) for part in (data.get("path"), summary.get("mpi_library")) if part)]
    lines = [", ".join(filter(None, parts))]
    if steps:
        tokens = sum(step["num_input_tokens"] for step in steps)
        seconds = format_duration(sum(step["step_s"] for step in steps))
        lines.append(f"{len(steps):,} steps, {tokens:,} tokens in {seconds}.")
    return lines


def _tiles(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Tile]:
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
    for label, first, last in (
        ("mean reward", "reward_first", "reward_last"),
        ("held-out match", "eval_exact_match_start", "eval_exact_match"),
        ("held-out loss", "eval_loss_start", "eval_loss"),
        ("loss", "loss_first", "loss_last"),
    ):
        is_informative = label != "loss" or not summary.keys() & {"reward_last", "eval_loss"}
        if is_informative and summary.get(last) is not None:
            form = ".1%" if label == "held-out match" else ".3g"
            values = [format(summary[key], form) for key in (first, last) if summary.get(key) is not None]
            tiles.append(Tile(label, " → ".join(values), "first to last" if len(values) > 1 else "at the end"))
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


def _summary_groups(summary: Mapping[str, Any]) -> list[Table]:
    """Return one table for each group in `_SUMMARY`, and a final table for the other entries of the summary."""
    groups = _parse(_SUMMARY)
    known = {key for names in groups.values() for key in names} | _OMITTED
    others = {key: key.replace("_", " ") for key in summary if key not in known}
    tables = []
    for heading, names in {**groups, "Other": others}.items():
        rows = [[name, _format_value(key, summary[key])] for key, name in names.items() if summary.get(key) is not None]
        tables += [Table(heading, ["", ""], rows)] if rows else []
    return tables


def _parse(text: str) -> dict[str, dict[str, str]]:
    """Parse `_SUMMARY` into the display names of entries, keyed by heading and by entry."""
    blocks = [block.partition("\n") for block in re.split(r"\n(?=\w)", text.strip())]
    return {heading: dict(item.strip().split(": ", 1) for item in entries.split(";")) for heading, _, entries in blocks}


def _format_value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_format_value(key, part)}" for name, part in value.items() if part)
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    if "bytes" in key:
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
    if key.endswith("_per_s"):
        return f"{value:,.0f}"
    if key.endswith("_s"):
        return format_duration(value) if value >= 60 else format_seconds(value) if value else "0 s"
    if key.endswith(("_fraction", "_match", "_match_start", "_accuracy", "_accuracy_start")):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
