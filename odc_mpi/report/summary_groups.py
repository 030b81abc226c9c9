"""The content of summary.json as groups of named values with units, for readers who do not know the keys."""

import re
from collections.abc import Mapping
from typing import Any

from odc_mpi.formatting import format_duration, format_seconds
from odc_mpi.report.page import Table

#: Groups, each followed by indented entries of summary.json with their names.
_TEXT = """
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
    generate_s: generating, per rank; rollout_wait_s: waiting for completions, per rank;
    groups_claimed_from_other_ranks: prompt groups trained by another rank; eval_s: evaluating;
    checkpoint_pause_s: copying for checkpoints; checkpoint_wait_s: waiting for checkpoints
Memory and traffic
    peak_parameter_bytes: fetched parameters, peak per rank; peak_gradient_bytes: gradient buffers, peak per rank;
    parameter_cache_bytes: cache of parameters, per rank; gradient_cache_bytes: cache of gradients, per rank;
    bytes_fetched: fetched per step and rank; bytes_fetched_other_nodes: of these from other nodes;
    bytes_pushed: pushed per step and rank; bytes_pushed_other_nodes: of these to other nodes;
    collectives_per_minibatch: collectives per step
Model and machine
    num_parameters: parameters; num_trained_parameters: trained parameters; param_dtype: type of parameters;
    device: device; world_size: ranks; num_nodes: nodes; hosts: hosts; mpi_library: MPI library;
    window_device: window memory; zero_copy: zero-copy reads on a node; reduction: gradients travel by;
    progress: progress thread; balance: balance of work; checkpoints_saved: checkpoints saved;
    checkpoints_failed: checkpoints failed; run_dir: run directory
"""
#: Entries that repeat others, or that are details of the choice of communication.
_OMITTED = {"decision", "ranks_per_node", "checkpoint_waits", "bytes_fetched_same_node", "bytes_pushed_same_node"}


def summary_groups(summary: Mapping[str, Any]) -> list[Table]:
    """Return a table per group of the entries of a summary. Entries with other keys are in a last group."""
    groups = _parse(_TEXT)
    known = {key for names in groups.values() for key in names} | _OMITTED
    others = {key: key.replace("_", " ") for key in summary if key not in known}
    tables = []
    for heading, names in {**groups, "Other": others}.items():
        rows = [[name, _format_value(key, summary[key])] for key, name in names.items() if summary.get(key) is not None]
        tables += [Table(heading, ["", ""], rows)] if rows else []
    return tables


def _parse(text: str) -> dict[str, dict[str, str]]:
    """Return the names of entries by group and key."""
    blocks = [block.partition("\n") for block in re.split(r"\n(?=\w)", text.strip())]
    return {heading: dict(item.strip().split(": ", 1) for item in entries.split(";")) for heading, _, entries in blocks}


def _format_value(key: str, value: Any) -> str:
    """Format an entry of a summary with its unit, which the key determines."""
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
