"""Reports on benchmarks and simulations, from the output of `odc-mpi bench --json` or `odc-mpi simulate --json`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from odc_mpi.formatting import format_seconds, format_size
from odc_mpi.report import plots
from odc_mpi.report.page import Figure, ReportPage, Table
from odc_mpi.report.plots import BarPanel, Curve, GanttChart, GanttRow, Panel, Style
from odc_mpi.report.svg import BLUE, GREEN, ORANGE, PURPLE, SKY
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
#: Styles of bars, keyed by the first component of the variant's name. Other variants are plain blue.
_BAR_STYLES = {
    "collective": Style(ORANGE, "/"),
    "floor": Style("none"),
    # References that do not use this package for communication.
    **dict.fromkeys(("ceiling", "fsdp2"), Style(SKY, "\\")),
}
#: Labels of curves and table columns, keyed by variant.
_FETCHES = {
    "memcpy": "memcpy",
    "fetch_copy": "fetch",
    "fetch_zero_copy": "zero-copy",
    "mpi_allgather": "MPI_Allgather",
}
_PUSHES = {
    "memcpy": "memcpy",
    "push_accumulate": "accumulate",
    "push_mailbox": "mailbox",
    "mpi_reduce_scatter": "MPI_Reduce_\nscatter",
}
#: Styles of the curves, in order.
_LINES = (
    {"color": PURPLE, "linestyle": ":", "marker": "x"},
    {"color": BLUE, "marker": "o"},
    {"color": ORANGE, "marker": "D"},
    {"color": GREEN, "linestyle": "-.", "marker": "s"},
)


def describe(result: Mapping[str, Any]) -> ReportPage:
    """Create a report on a benchmark or a simulation from its JSON object.

    Raises LookupError, TypeError or ValueError if `result` is not a JSON object of this kind.
    """
    return KINDS[result["benchmark"]](result)


def _schedule(result: Mapping[str, Any]) -> ReportPage:
    scenario = result["scenario"]
    measured = result["benchmark"] == "schedule"
    subtitle = [
        f"{scenario['ranks']} ranks, {scenario['per_rank']} sequences each, lengths {scenario['lengths']}, speeds "
        f"vary by {scenario['speed_variation']:.0%}, costs err by {scenario['cost_error']:.0%}; "
        f"{scenario['num_minibatches']} minibatches, seed {scenario['seed']}"
    ]
    if measured:
        subtitle.append(
            f"Measured on {result['library']}, {result['nodes']} node{'s'[: result['nodes'] != 1]}, with sleeps in "
            f"place of computation, scaled so that an even share of a minibatch takes {result['slept_step_s']:g} s; "
            "times are before scaling"
        )
    else:
        subtitle.append("Simulated by odc-mpi simulate, not measured")
    gain = result["speedup"][ON_DEMAND]
    best = "on demand" if measured else "on demand, as simulated"
    title = f"{gain:.2f} times as fast {best}: {ON_DEMAND} compared with {BASELINE}"
    figures = [_first_minibatch(result), _speedups(result)]
    return _benchmark_report(result, title, subtitle, figures)


def _first_minibatch(result: Mapping[str, Any]) -> Figure:
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
    source = "measured on the real runtime" if result["benchmark"] == "schedule" else "as simulated by odc-mpi simulate"
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
    return _bar_figure("speedups", title, panels, names, caption)


def _train(result: Mapping[str, Any]) -> ReportPage:
    ratios, speeds = result["ratio_to_fsdp2"], result["tokens_per_s"]
    panels = [
        BarPanel("tokens per second, with quartiles", speeds, ",.0f", quartiles=result["quartiles"]),
        BarPanel("as a multiple of FSDP2", ratios, ".2f", 1.0),
        BarPanel("as a multiple of the ceiling", result["ratio_to_ceiling"], ".2f", 1.0),
    ]
    best, fsdp = (max((n for n in ratios if n.startswith(kind)), key=ratios.get) for kind in ("window/", "fsdp2"))
    title = f"{best} trains {ratios[best] / ratios[fsdp]:.2f} times as fast as FSDP2 with its better plan ({fsdp})"
    caption = "Medians over rounds. The ceiling is the speed of a single process, multiplied by the number of ranks."
    figures = [_bar_figure("speeds", title, panels, speeds, caption)]
    losses = result["losses"]
    heading = f"All train the same: losses differ by at most {max(result['loss_deviation'].values()):.1g} of the loss"
    values = [math.nan if loss is None else loss for loss in losses]
    curve = Curve("", range(1, len(losses) + 1), values, {"color": BLUE})
    draw = partial(plots.curves, rows=[[Panel("loss", [curve])]], xlabel="minibatch")
    figures.append(Figure("loss", heading, draw))
    subtitle = [
        f"{result['library']}, {result['ranks']} ranks of {result['threads']} thread{'s'[: result['threads'] != 1]}, "
        f"{result['model_numel'] / 1e6:.1f} M parameters; {result['repeats']} rounds of {result['steps']} minibatches",
        f"reduction {result['reduction']}, zero-copy {result['zero_copy']}, progress {result['progress']}",
    ]
    return _benchmark_report(result, title, subtitle, figures)


def _bar_figure(name: str, title: str, panels: Sequence[BarPanel], names: Iterable[str], caption: str) -> Figure:
    """Create a figure with a bar plot and a table, both of which compare the variants in `names` that have values."""
    styles = {each: _BAR_STYLES.get(each.split("/")[0], Style(BLUE)) for each in names if each in panels[0].values}
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


def _transport(result: Mapping[str, Any]) -> ReportPage:
    sizes = result["sizes"]
    largest = sizes[-1]["all_at_once"]["fetch_copy"]
    title = f"A fetch of {format_size(sizes[-1]['size_bytes'])} moves {largest['gb_per_s']['median']:.2g} GB/s"
    panels = {"fetch a unit, GB/s": _FETCHES, "push its gradient, GB/s": _PUSHES}
    curves = [_curves(heading, sizes, titles) for heading, titles in panels.items()]
    draw = partial(plots.curves, rows=[curves], xlabel="bytes of a unit", x_form=lambda x: format_size(round(x)))
    tables = [
        _table_over_sizes(f"{heading} ± half the interquartile range", sizes, titles)
        for heading, titles in panels.items()
    ]
    caption = "GB/s of the full unit per rank; medians over rounds. Zero-copy fetches move no data, so have no speed."
    ranks, nodes, cores = result["ranks"], result["nodes"], result["cores_per_rank"]
    subtitle = [
        f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}, "
        f"{cores} core{'s'[: cores != 1]} each, {result['repeats']} rounds, all ranks at once"
    ]
    return _benchmark_report(result, title, subtitle, [Figure("speeds", title, draw, caption, tables)])


def _curves(heading: str, sizes: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Panel:
    curves = []
    for (name, title), style in zip(titles.items(), _LINES, strict=True):
        entries = [(size["size_bytes"], size["all_at_once"].get(name)) for size in sizes]
        points = [(x, entry["gb_per_s"]["median"]) for x, entry in entries if entry and entry["gb_per_s"]]
        if points:
            x, y = zip(*points, strict=True)
            curves.append(Curve(title.replace("\n", ""), x, y, style))
    return Panel(heading, curves, "log", 320)


def _table_over_sizes(heading: str, sizes: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    entries = [size["all_at_once"] for size in sizes]
    names = {name: title for name, title in titles.items() if any(name in each for each in entries)}
    rows = [
        [format_size(size["size_bytes"]), *(_gb_per_s(each[name]) if name in each else "-" for name in names)]
        for size, each in zip(sizes, entries, strict=True)
    ]
    return Table(heading, ["unit", *names.values()], rows)


def _gb_per_s(entry: Mapping[str, Any]) -> str:
    """Format the median GB/s with half the interquartile range in %, or the time if the variant moves no data."""
    speed = entry["gb_per_s"]
    if speed is None:
        return format_seconds(entry["seconds"]["median"])
    digits = 0 if speed["median"] >= 100 else 1 if speed["median"] >= 10 else 2
    return f"{speed['median']:.{digits}f} ±{(speed['high'] - speed['low']) / 2 / speed['median']:4.0%}"


def _benchmark_report(
    result: Mapping[str, Any], title: str, subtitle: Sequence[str], figures: Sequence[Figure]
) -> ReportPage:
    if "load_average" in result:
        subtitle = [*subtitle, "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])]
    return ReportPage(title, subtitle, figures=figures)


KINDS: Mapping[str, Callable[[Mapping[str, Any]], ReportPage]] = {
    "schedule": _schedule,
    "simulate": _schedule,
    "train": _train,
    "transport": _transport,
}
