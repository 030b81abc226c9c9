"""Figures on runs: metrics over the steps, activity of ranks over time, and lengths of sequences and microbatches."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, groupby, pairwise
from typing import Any

import numpy as np

from odc_mpi.report import plots
from odc_mpi.report.page import Figure
from odc_mpi.report.plots import Curve, GanttChart, GanttRow, Panel, Style
from odc_mpi.report.svg import BLUE, GREEN, ORANGE, PURPLE, RED, SKY

#: Kinds of spans in `trace.json` in which a rank waits for all others.
_SYNC_POINTS = ("values_gathered", "gradients_complete", "grad_norm", "parameters_published")
COMPUTES, GENERATES, FETCHES, PUSHES, WAITS = "computes", "generates", "fetches", "pushes", "waits for other ranks"
#: Style of each activity, and its kinds of spans in ``trace.json``. Fetches and pushes are drawn over other activities.
_KINDS: Mapping[str, tuple[Style, Sequence[str]]] = {
    COMPUTES: (Style(BLUE), ("microbatches",)),
    GENERATES: (Style(PURPLE), ("generate",)),
    "evaluates": (Style(SKY, "\\"), ("evaluate",)),
    "optimizer step": (Style("#8c959f"), ("optimize",)),
    "synchronizing islands": (Style("#bf3989"), ("outer_sync",)),
    "saves": (Style(RED, "/"), ("save",)),
    FETCHES: (Style(ORANGE, "\\"), ("fetch",)),
    PUSHES: (Style(GREEN, "-"), ("accumulate",)),
    WAITS: (Style("none", "/"), (*_SYNC_POINTS, "rollout_wait")),
}
_STYLES = {kind: style for kind, (style, _) in _KINDS.items()}
#: Maximum number of bars in a plot. If there are more steps, each bar is the mean over a group of steps.
_MAX_BARS = 80
_NUM_BINS = 40
_TRAINING: Mapping[str, str] = {"color": BLUE}
_HELD_OUT = {"color": ORANGE, "linestyle": "--", "marker": "o"}
#: Styles of the curves of individual reward functions.
_PARTS = [
    {"color": color, "linestyle": dashes} for color, dashes in ((SKY, "-."), (GREEN, ":"), (PURPLE, "--"), (RED, "-."))
]

Lines = Sequence[Mapping[str, Any]]


def loss_figure(lines: Lines) -> Figure:
    """Create a figure with the losses and, for DPO and reward models, accuracies, margins and log-probabilities.

    `lines` are the lines of ``metrics.jsonl``, including the line for step 0, if any.
    """
    loss = _curve(lines, "loss", "training")
    curves = [loss, *_curves(lines, {"eval_loss": ("held-out", _HELD_OUT)})]
    title = f"The loss {_change(loss.y)} in {len(loss.x):,} steps" if _known(loss.y) else "No step has a loss"
    if len(curves) > 1:
        title += f", on held-out data it {_change(curves[1].y)}"
    accuracies = ("eval_rewards/accuracies", "eval_accuracy")
    if accuracy := _curves(lines, dict.fromkeys(accuracies, ("", _HELD_OUT))):
        title += f", its accuracy {_change(accuracy[0].y, '.1%')}"
    preferences = _preference_panels(lines)
    heading = f"loss, mean over {'pairs' if preferences else 'trained tokens'}"
    return _figure("loss", title, [[Panel(heading, curves, height=300)], preferences], lines)


def _preference_panels(lines: Lines) -> list[Panel]:
    panels = []
    for heading, names, form in (
        ("pairs whose chosen answer has the higher reward", ("rewards/accuracies", "accuracy"), ".0%"),
        ("reward of the chosen minus the rejected answer", ("rewards/margins", "margin"), ""),
    ):
        curves: dict[str, tuple[str, Mapping[str, str]]] = {}
        for key in names:  # of DPO, and of reward models
            curves |= {key: ("training", _TRAINING), f"eval_{key}": ("held-out", _HELD_OUT)}
        panels.append(Panel(heading, _curves(lines, curves), form))
    answers = {"logps/chosen": ("chosen", _TRAINING), "logps/rejected": ("rejected", {"color": RED})}
    panels.append(Panel("log-probability of an answer", _curves(lines, answers)))
    return [panel for panel in panels if panel.curves]


def rewards_figure(lines: Lines) -> Figure:
    """Create a figure with the GRPO metrics over the steps, such as rewards, completion lengths and entropy."""
    names = dict.fromkeys(key for line in lines for key in line if key.startswith("rewards/"))
    parts = {key: (key.split("/")[1].lstrip("_"), style) for key, style in zip(names, cycle(_PARTS), strict=False)}
    reward = _curve(lines, "reward", "mean reward")
    held_out = _curves(lines, {"eval_reward": ("held-out, greedy decoding", _HELD_OUT)})
    curves = [reward, *(_curves(lines, parts) if len(parts) > 1 else []), *held_out]
    match = _curves(lines, {"eval_exact_match": ("", _HELD_OUT)})
    title = f"The mean reward {_change(reward.y)} in {len(reward.x):,} steps" if _known(reward.y) else "No rewards"
    if match:
        title += f", exact match on held-out prompts {_change(match[0].y, '.1%')}"
    elif held_out:
        title += f", on held-out prompts it {_change(held_out[0].y)}"
    lengths = {
        "completions/mean_length": ("mean", _TRAINING),
        "completions/max_length": ("longest", {"color": SKY, "linestyle": "--"}),
        "completions/min_length": ("shortest", {"color": SKY, "linestyle": ":"}),
    }
    ratios = {
        "completions/clipped_ratio": ("truncated", {"color": RED}),
        "frac_reward_zero_std": ("equal rewards", {"color": PURPLE, "linestyle": "--"}),
    }
    rows = [
        [Panel("reward", curves, height=300)],
        [
            Panel("exact match on held-out prompts", match, ".0%"),
            Panel("tokens of a completion", _curves(lines, lengths), ",.0f"),
            Panel("truncated completions, equal rewards", _curves(lines, ratios), ".0%"),
        ],
        [_single(lines, "KL divergence from the start", "kl"), _single(lines, "entropy", "entropy")],
    ]
    return _figure("rewards", title, rows, lines)


def _change(values: Iterable[float], form: str = ".4g") -> str:
    """Describe the change from the first to the last value that is not NaN, for example "fell from 8.3 to 5.1"."""
    known = _known(values)
    first, last = format(known[0], form), format(known[-1], form)
    if first == last:
        return f"stayed at {last}"
    return f"{'fell' if known[-1] < known[0] else 'rose'} from {first} to {last}"


def _figure(name: str, title: str, rows: list[list[Panel]], lines: Lines) -> Figure:
    last = [("learning rate", "learning_rate"), ("gradient norm", "grad_norm")]
    speed = _single(lines, "tokens per second", "tokens_per_s", ",.0f")
    rows.append([*(_single(lines, *each) for each in last), speed])
    nonempty = [[panel for panel in row if panel.curves] for row in rows]
    skipped = sum(bool(line.get("skipped")) for line in lines)
    caption = f"{skipped} steps were skipped: their gradients were not finite." if skipped else ""
    draw = partial(plots.curves, rows=[row for row in nonempty if row], xlabel="step")
    return Figure(name, title, draw, caption)


def _single(lines: Lines, heading: str, key: str, form: str = "") -> Panel:
    return Panel(heading, _curves(lines, {key: ("", _TRAINING)}), form)


def _curves(lines: Lines, keys: Mapping[str, tuple[str, Mapping[str, str]]]) -> list[Curve]:
    """Return the curves of the metrics that have values. `keys` maps each metric to its label and style."""
    curves = [_curve(lines, key, *drawn) for key, drawn in keys.items()]
    return [curve for curve in curves if _known(curve.y)]


def _curve(lines: Lines, key: str, label: str, style: Mapping[str, str] = _TRAINING) -> Curve:
    """Return the curve of a metric. Training metrics of skipped steps are NaN."""
    present = [line for line in lines if key in line]
    is_training = not key.startswith("eval")
    y = [math.nan if line[key] is None or (is_training and line.get("skipped")) else line[key] for line in present]
    return Curve(label, [line["step"] for line in present], y, style)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def timeline(trace: Mapping[str, Any]) -> Figure:
    """Create a Gantt chart of the last steps on up to `MAX_RANKS` ranks, from the content of ``trace.json``.

    Ranks are grouped by island if there are several islands.
    """
    steps = trace["steps"]
    ends = [max(local["end_s"] for local in step["ranks"]) for step in steps]
    offsets = np.cumsum([0.0, *ends]).tolist()
    busy = np.sum([[_seconds(local["microbatches"]) for local in step["ranks"]] for step in steps], axis=0)
    chosen = plots.choose_ranks(busy.tolist())
    num_islands = trace.get("num_islands", 1)  # islands have consecutive ranks
    marks = [(at, f"step {step['step']}") for at, step in zip(offsets, steps, strict=False)]
    period = f"steps {steps[0]['step']} to {steps[-1]['step']}" if len(steps) > 1 else f"step {steps[0]['step']}"
    charts = []
    for island, ranks in groupby(chosen, lambda rank: rank * num_islands // len(busy)):
        rows = [_row(rank, [step["ranks"][rank] for step in steps], offsets) for rank in ranks]
        charts.append(GanttChart(f"island {island}" if num_islands > 1 else "", rows, offsets[-1], marks))
    title = f"In {period} ranks {_shares([local for step in steps for local in step['ranks']])}"
    caption = (
        "A step begins when the parameters are published, and ends when they are published again. Numbers are tokens "
        "of a microbatch. Blank time is planning, reading, and writing metrics."
    )
    if len(chosen) < len(busy):
        caption += f" {len(chosen)} of {len(busy)} ranks are shown, from least to most busy."
    if left_out_s := sum(sum(local["left_out_s"].values()) for step in steps for local in step["ranks"]):
        caption += f" Short spans of {left_out_s:.3g} s in total were not recorded."
    return Figure("gantt", title, partial(plots.gantt, charts=charts, styles=_STYLES), caption)


def _shares(locals_: Sequence[Mapping[str, Any]]) -> str:
    """Return each activity's share of the time as text. Fetches and pushes within other activities count separately."""
    seconds = dict.fromkeys(_KINDS, 0.0)
    for local in locals_:
        moves = sorted((*local["fetch"], *local["accumulate"]))
        begins = [span[0] for span in moves]
        for kind, (_, names) in _KINDS.items():
            spans = [span for name in names for span in local.get(name, ())]
            seconds[kind] += _seconds(spans)
            if kind not in (FETCHES, PUSHES, WAITS):
                inside = [moves[bisect_right(begins, s[0]) : bisect_right(begins, s[1])] for s in spans]
                seconds[kind] -= sum(map(_seconds, inside))
    total_s = sum(local["end_s"] for local in locals_)
    words = {
        "generate": seconds[GENERATES],
        "compute": seconds[COMPUTES],
        "fetch and push": seconds[FETCHES] + seconds[PUSHES],
        "wait": seconds[WAITS],
        "evaluate": seconds["evaluates"],
        "save": seconds["saves"],
    }
    shares = [(word, f"{value / total_s:.0%}") for word, value in words.items() if value >= 0.005 * total_s]
    return ", ".join(f"{word} {share}{'' if i else ' of the time'}" for i, (word, share) in enumerate(shares))


def _row(rank: int, steps: Sequence[Mapping[str, Any]], offsets: Sequence[float]) -> GanttRow:
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    notes = []
    for step, offset in zip(steps, offsets, strict=False):
        notes += [(offset + began, offset + ended, f"{tokens:,}") for began, ended, tokens in step["microbatches"]]
        for kind, (_, names) in _KINDS.items():
            spans[kind] += [(offset + span[0], offset + span[1]) for name in names for span in step.get(name, ())]
    return GanttRow(f"rank {rank}", spans, notes)


def _seconds(spans: Sequence[Sequence[float]]) -> float:
    return sum(span[1] - span[0] for span in spans)


def time_breakdown(steps: Sequence[Mapping[str, Any]]) -> Figure:
    """Create a figure of each activity's share of the step time, averaged over ranks, from ``metrics.jsonl`` lines."""
    at_once = math.ceil(len(steps) / _MAX_BARS)
    groups = [steps[i : i + at_once] for i in range(0, len(steps), at_once)]
    x = [float(np.mean([step["step"] for step in group])) for group in groups]
    names = {FETCHES: ["fetch_wait_s"], PUSHES: ["accumulate_wait_s"], WAITS: ["boundary_wait_s"]}
    if "generate_s" in steps[0]:
        # Generation has little communication.
        names = {GENERATES: ["generate_s"], **names, WAITS: ["boundary_wait_s", "rollout_wait_s"]}
    parts = {kind: [_share(group, keys) for group in groups] for kind, keys in names.items()}
    rest = "computes and everything else"
    parts = {rest: [max(0.0, 1.0 - sum(values)) for values in zip(*parts.values(), strict=True)], **parts}
    idle = sum(step["idle_fraction"] * step["step_s"] for step in steps) / sum(step["step_s"] for step in steps)
    title = f"Ranks were idle {idle:.1%} of the time, waiting for the slowest at the boundary of each minibatch"
    caption = "Means over all ranks, without evaluations and checkpoints."
    if at_once > 1:
        caption += f" Bars are means over {at_once} steps."
    styles = {**_STYLES, rest: _STYLES[COMPUTES]}
    return Figure("time", title, partial(plots.stack, x=x, parts=parts, styles=styles), caption)


def _share(group: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float:
    return sum(step[name] for step in group for name in names) / sum(step["step_s"] for step in group)


def histograms(lengths: np.ndarray | None, trace: Mapping[str, Any] | None) -> list[Figure]:
    """Return a list with one figure of sequence lengths and tokens per microbatch, or [] if there is no data."""
    panels, title = [], []
    if lengths is not None and len(lengths):
        width = math.ceil((np.ptp(lengths) + 1) / _NUM_BINS)  # an integer, so that all bins have as many lengths
        counts, edges = np.histogram(lengths, np.arange(lengths.min(), lengths.max() + 1 + width, width))
        median = int(np.median(lengths))
        mark = (median, f"half are below {median:,}")
        panels.append(plots.Histogram("sequences of the data set", edges.tolist(), counts.tolist(), SKY, mark))
        title.append(f"sequences have {lengths.min():,} to {lengths.max():,} tokens, half of them below {median:,}")
    if trace and sum(trace["tokens_per_microbatch"]["counts"]):  # rollouts are not planned
        tokens, max_tokens = trace["tokens_per_microbatch"], trace["max_tokens_per_microbatch"]
        middles = [(a + b) / 2 for a, b in pairwise(tokens["edges"])]
        full = float(np.average(middles, weights=tokens["counts"])) / max_tokens
        mark = (max_tokens, f"at most {max_tokens:,}")
        heading = f"microbatches of steps {tokens['first_step']} to {tokens['last_step']}"
        panels.append(plots.Histogram(heading, tokens["edges"], tokens["counts"], BLUE, mark))
        title.append(f"microbatches are {full:.0%} full")
    text = "; ".join(title)
    draw = partial(plots.histograms, panels=panels)
    return [Figure("lengths", text[:1].upper() + text[1:], draw)] if panels else []
