"""Reports on schedules, from the output of `odc-mpi simulate --json` or of a benchmark with the same keys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from odc_mpi.report import plots
from odc_mpi.report.page import Figure, ReportPage, Table
from odc_mpi.report.plots import BarPanel, GanttChart, GanttRow, Style
from odc_mpi.report.svg import BLUE, ORANGE
from odc_mpi.simulate.events import merge_intervals
from odc_mpi.simulate.simulate import BASELINE, BOUNDS, ON_DEMAND, SCHEDULES, SPLIT

#: Savings below this fraction of the time of a minibatch are not shown.
MIN_SHOWN_GAIN = 0.02
#: Chart headings, keyed by schedule. The fraction of the time that ranks wait is appended.
HEADINGS = {
    BASELINE: f"Collectives, {BASELINE}: ranks synchronize at each layer of each microbatch, and wait",
    ON_DEMAND: f"On demand, {ON_DEMAND}: ranks synchronize once, at the end, and wait",
    SPLIT: f"The longest sequences split, {SPLIT}: ranks wait",
}
COMPUTES, WAITS = "computes", "waits for other ranks"
_STYLES = {COMPUTES: Style(BLUE), WAITS: Style("none", "/")}
#: Styles of bars, keyed by the first component of the variant's name.
BAR_STYLES = {"collective": Style(ORANGE, "/"), "floor": Style("none")}


def describe(result: Mapping[str, Any], measured: str | None = None) -> ReportPage:
    """Create a report on schedules from the JSON object of a simulation or a benchmark.

    `measured` describes how the schedules were measured; None: they were simulated. Raises LookupError, TypeError or
    ValueError if `result` is not a JSON object of this kind.
    """
    scenario = result["scenario"]
    subtitle = [
        f"{scenario['ranks']} ranks, {scenario['per_rank']} sequences each, lengths {scenario['lengths']}, speeds "
        f"vary by {scenario['speed_variation']:.0%}, costs err by {scenario['cost_error']:.0%}; "
        f"{scenario['num_minibatches']} minibatches, seed {scenario['seed']}",
        measured or "Simulated by odc-mpi simulate, not measured",
    ]
    gain = result["speedup"][ON_DEMAND]
    best = "on demand" if measured else "on demand, as simulated"
    title = f"{gain:.2f} times as fast {best}: {ON_DEMAND} compared with {BASELINE}"
    source = "measured on the real runtime" if measured else "as simulated by odc-mpi simulate"
    return ReportPage(title, subtitle, figures=[_first_minibatch(result, source), _speedups(result)])


def _first_minibatch(result: Mapping[str, Any], source: str) -> Figure:
    timeline = result["timeline"]
    names = [name for name in (BASELINE, ON_DEMAND, SPLIT) if name in timeline]
    ends = {name: max((spans[-1][1] for spans in timeline[name] if spans), default=0.0) for name in names}
    if ends.get(SPLIT, math.inf) > (1 - MIN_SHOWN_GAIN) * ends[ON_DEMAND]:
        ends.pop(SPLIT, None)
    saved_s = ends[BASELINE] - ends[ON_DEMAND]
    chosen = plots.choose_ranks([sum(b - a for a, b in spans) for spans in timeline[BASELINE]])
    charts = [
        GanttChart(
            f"{HEADINGS[name]} {_idle(timeline[name], end):.0%} of the time",
            [_gantt_row(rank, timeline[name][rank], end) for rank in chosen],
            end,
            [(end, f"{end:.1f} s")],
        )
        for name, end in ends.items()
    ]
    title = f"The same {len(timeline[BASELINE])} ranks and the same sequences: " + (
        f"on demand the minibatch ends {saved_s / ends[BASELINE]:.0%} earlier"
        if saved_s > MIN_SHOWN_GAIN * ends[BASELINE]
        else "here on demand gains nothing"
    )
    if SPLIT in ends:
        title += f", split {1 - ends[SPLIT] / ends[BASELINE]:.0%}"
    caption = f"The first minibatch, {source}: when each rank computes, and when it waits. "
    if len(chosen) < len(timeline[BASELINE]):
        caption += f"{len(chosen)} of {len(timeline[BASELINE])} ranks are shown, from least to most busy."
    return Figure("gantt", title, partial(plots.gantt, charts=charts, styles=_STYLES), caption)


def _idle(ranks: Sequence[Sequence[Sequence[float]]], end_s: float) -> float:
    return 1 - sum(b - a for spans in ranks for a, b in spans) / (len(ranks) * end_s) if end_s > 0 else 0.0


def _gantt_row(rank: int, busy: Sequence[Sequence[float]], end_s: float) -> GanttRow:
    # Pauses below half a pixel are invisible.
    computes = merge_intervals(((a, b) for a, b in busy), end_s / 1800)
    edges = [0.0, *(edge for span in computes for edge in span), end_s]
    return GanttRow(f"rank {rank}", {COMPUTES: computes, WAITS: list(zip(edges[::2], edges[1::2], strict=True))})


def _speedups(result: Mapping[str, Any]) -> Figure:
    wait = result["idle_fraction"]
    islands = [name for name in wait if name.startswith(("islands/", "outer/"))]
    names = [*SCHEDULES, *islands, *BOUNDS]
    simulated = {name: value for name, value in result.get("simulated", {}).items() if name in wait}
    references = {"simulated": simulated} if simulated else {}
    panels = [
        BarPanel(f"speed-up over {BASELINE}", result["speedup"], ".2f", 1.0, references=references),
        BarPanel("fraction of the time in which ranks wait", wait, ".0%"),
        BarPanel("s / step", result["step_s"], ".2f"),
    ]
    title = f"Ranks wait {wait[BASELINE]:.0%} of the time with {BASELINE}, {wait[ON_DEMAND]:.0%} with {ON_DEMAND}"
    fraction = result["longest_sequence_bound_fraction"]
    caption = (
        "No schedule of unsplit sequences can exceed the floor: the longest sequence alone, or all work distributed "
        f"evenly, which is the even share. In {fraction:.0%} of the minibatches it is the longest sequence."
    )
    return bar_figure("speedups", title, panels, names, caption, BAR_STYLES)


def bar_figure(
    name: str,
    title: str,
    panels: Sequence[BarPanel],
    names: Iterable[str],
    caption: str,
    styles_by_kind: Mapping[str, Style],
) -> Figure:
    """Create a figure with a bar plot and a table, both of which compare the variants in `names` that have values.

    `styles_by_kind` has the styles of bars, keyed by the first component of a variant's name. Others are plain blue.
    """
    styles = {each: styles_by_kind.get(each.split("/")[0], Style(BLUE)) for each in names if each in panels[0].values}
    columns = {panel.heading: {each: _bar_text(panel, each) for each in styles} for panel in panels}
    for panel in panels:
        for source, values in panel.references.items():
            columns[source] = {each: format(value, panel.form) for each, value in values.items()}
    rows = [[each, *(column.get(each, "") for column in columns.values())] for each in styles]
    draw = partial(plots.bars, panels=panels, styles=styles)
    return Figure(name, title, draw, caption, [Table("", ["", *columns], rows)])


def _bar_text(panel: BarPanel, name: str) -> str:
    quartiles = ", ".join(format(value, panel.form) for value in panel.quartiles.get(name, ()))
    return f"{panel.values[name]:{panel.form}}" + (f" [{quartiles}]" if quartiles else "")
