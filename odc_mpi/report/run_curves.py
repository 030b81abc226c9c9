"""Figures that show the metrics of a run, such as loss and rewards, as curves over its steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from odc_mpi.report import plots
from odc_mpi.report.page import Figure
from odc_mpi.report.plot_types import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Curve, Panel, Plot, Style

Lines = Sequence[Mapping[str, Any]]
_HELD_OUT = Style(ORANGE, "--")
#: Styles of the curves of individual reward functions.
_PARTS = (Style(SKY, "-."), Style(GREEN, ":"), Style(PURPLE, "--"), Style(RED, "-."))


def loss_figure(lines: Lines) -> Figure:
    """Create a figure with the losses and, for DPO and reward models, accuracies, margins and log-probabilities.

    `lines` are the lines of ``metrics.jsonl``, including that of step 0, if any.
    """
    loss = _curve(lines, "loss", "training")
    curves = [loss, *_curves(lines, {"eval_loss": ("held-out", _HELD_OUT, "o")})]
    title = f"The loss {change(loss.y)} in {len(loss.x):,} steps" if _known(loss.y) else "No step has a loss"
    if len(curves) > 1:
        title += f", on held-out data it {change(curves[1].y)}"
    accuracies = ("eval_rewards/accuracies", "eval_accuracy")
    if accuracy := _curves(lines, dict.fromkeys(accuracies, ("", _HELD_OUT, "o"))):
        title += f", its accuracy {change(accuracy[0].y, '.1%')}"
    preferences = _preference_panels(lines)
    heading = f"loss, mean over {'pairs' if preferences else 'trained tokens'}"
    return _figure("loss", title, [[Panel(heading, curves, height=300)], preferences], lines)


def _preference_panels(lines: Lines) -> list[Panel]:
    panels = []
    for heading, names, form in (
        ("pairs whose chosen answer has the higher reward", ("rewards/accuracies", "accuracy"), ".0%"),
        ("reward of the chosen minus the rejected answer", ("rewards/margins", "margin"), ""),
    ):
        curves: dict[str, tuple[str, Style, str]] = {}
        for key in names:  # of DPO, and of reward models
            curves |= {key: ("training", Style(BLUE), ""), f"eval_{key}": ("held-out", _HELD_OUT, "o")}
        panels.append(Panel(heading, _curves(lines, curves), form))
    answers = {"logps/chosen": ("chosen", Style(BLUE), ""), "logps/rejected": ("rejected", Style(RED), "")}
    panels.append(Panel("log-probability of an answer", _curves(lines, answers)))
    return [panel for panel in panels if panel.curves]


def rewards_figure(lines: Lines) -> Figure:
    """Create a figure with the GRPO metrics over the steps, such as rewards, completion lengths and entropy."""
    names = dict.fromkeys(key for line in lines for key in line if key.startswith("rewards/"))
    parts = {key: (key.split("/")[1], style, "") for key, style in zip(names, _PARTS * len(names), strict=False)}
    reward = _curve(lines, "reward", "mean reward")
    held_out = _curves(lines, {"eval_reward": ("held-out, greedy decoding", _HELD_OUT, "o")})
    curves = [reward, *(_curves(lines, parts) if len(parts) > 1 else []), *held_out]
    match = _curves(lines, {"eval_exact_match": ("", _HELD_OUT, "o")})
    title = f"The mean reward {change(reward.y)} in {len(reward.x):,} steps" if _known(reward.y) else "No rewards"
    if match:
        title += f", exact match on held-out prompts {change(match[0].y, '.1%')}"
    elif held_out:
        title += f", on held-out prompts it {change(held_out[0].y)}"
    lengths = {
        "completions/mean_length": ("mean", Style(BLUE), ""),
        "completions/max_length": ("longest", Style(SKY, "--"), ""),
        "completions/min_length": ("shortest", Style(SKY, ":"), ""),
    }
    ratios = {
        "completions/clipped_ratio": ("truncated", Style(RED), ""),
        "frac_reward_zero_std": ("equal rewards", Style(PURPLE, "--"), ""),
    }
    rows = [
        [Panel("reward", curves, height=300)],
        [
            Panel("exact match on held-out prompts", match, ".0%"),
            Panel("tokens of a completion", _curves(lines, lengths), ",.0f"),
            Panel("truncated completions, equal rewards", _curves(lines, ratios), ".0%"),
        ],
        [
            Panel(heading, _curves(lines, {key: ("", Style(BLUE), "")}))
            for heading, key in (("KL divergence from the start", "kl"), ("entropy", "entropy"))
        ],
    ]
    return _figure("rewards", title, rows, lines)


def change(values: Iterable[float], form: str = ".4g") -> str:
    """Describe the change from the first to the last value that is not NaN, for example "fell from 8.3 to 5.1"."""
    known = _known(values)
    first, last = format(known[0], form), format(known[-1], form)
    if first == last:
        return f"stayed at {last}"
    return f"{'fell' if known[-1] < known[0] else 'rose'} from {first} to {last}"


def _figure(name: str, title: str, rows: list[list[Panel]], lines: Lines) -> Figure:
    last = [("learning rate", "learning_rate"), ("gradient norm", "grad_norm"), ("tokens per second", "tokens_per_s")]
    forms = {"tokens_per_s": ",.0f"}
    rows.append(
        [Panel(heading, _curves(lines, {key: ("", Style(BLUE), "")}), forms.get(key, "")) for heading, key in last]
    )
    drawn = [[panel for panel in row if panel.curves] for row in rows]
    skipped = sum(bool(line.get("skipped")) for line in lines)
    caption = f"{skipped} steps were skipped: their gradients were not finite." if skipped else ""
    draw = partial(plots.curves, [row for row in drawn if row], "step")
    return Figure(Plot(name, title, draw), caption)


def _curves(lines: Lines, keys: Mapping[str, tuple[str, Style, str]]) -> list[Curve]:
    """Return the curves of the metrics that have values. `keys` maps each metric to its label, style and marker."""
    curves = [_curve(lines, key, *drawn) for key, drawn in keys.items()]
    return [curve for curve in curves if _known(curve.y)]


def _curve(lines: Lines, key: str, label: str, style: Style = Style(BLUE), marker: str = "") -> Curve:  # noqa: B008
    """Return the curve of a metric. Training metrics of skipped steps are NaN."""
    present = [line for line in lines if key in line]
    missing = [line[key] is None or (line.get("skipped") and not key.startswith("eval")) for line in present]
    y = [math.nan if is_missing else line[key] for line, is_missing in zip(present, missing, strict=True)]
    return Curve(label, [line["step"] for line in present], y, style, marker)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
