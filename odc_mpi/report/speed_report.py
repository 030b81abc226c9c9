"""What a report tells of the benchmarks of single parts: transport, progress threads, checkpoints, GPUs. Local."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from odc_mpi.report import gpu_tables, pictures
from odc_mpi.report.page import Figure, Report
from odc_mpi.report.picture_parts import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Bar, Curve, Look, Panel, Picture
from odc_mpi.report.wording import told_load, told_ranks
from odc_mpi.wording import format_seconds, format_size

#: How a line over sizes is drawn: its name, look and marker.
Line = tuple[str, Look, str]
#: For lines that have no look of their own.
_LINES = (
    (Look(PURPLE, ":"), "x"),
    (Look(BLUE, "-"), "o"),
    (Look(ORANGE, "-"), "D"),
    (Look(GREEN, "-."), "s"),
    (Look(RED, "--"), "^"),
)
#: Of what others do, and of what is not ours.
_OTHER = Look(SKY, "\\\\\\")

_FETCHES: dict[str, Line] = {
    "memcpy": ("memcpy", Look(PURPLE, ":"), "x"),
    "fetch_copy": ("fetch", Look(BLUE, "-"), "o"),
    "mpi_allgather": ("MPI_Allgather", Look(GREEN, "-."), "s"),
    "gloo_all_gather": ("gloo", Look(RED, "--"), "^"),
}
_PUSHES: dict[str, Line] = {
    "memcpy": ("memcpy", Look(PURPLE, ":"), "x"),
    "push_accumulate": ("accumulate", Look(BLUE, "-"), "o"),
    "push_mailbox": ("mailbox", Look(ORANGE, "-"), "D"),
    "mpi_reduce_scatter": ("MPI_Reduce_scatter", Look(GREEN, "-."), "s"),
    "gloo_reduce_scatter": ("gloo", Look(RED, "--"), "^"),
}
_CHECKPOINT_WAYS = {"plain": "plain files", "odc_mpi": "odc_mpi", "dcp": "torch.distributed.checkpoint"}


def transport(result: Mapping[str, Any]) -> Report:
    """Return what is to be told of `odc-mpi bench transport`. Local."""
    panels = [
        _panel(heading, result["sizes"], "all_at_once", drawn)
        for heading, drawn in (("fetch a unit, GB/s", _FETCHES), ("push its gradient, GB/s", _PUSHES))
    ]
    title = _transport_title(result)
    caption = "GB/s of the whole unit for each rank; medians over rounds. Where a unit is read in place nothing moves."
    figure = Figure(_over_sizes("speeds", title, panels, "bytes of a unit"), caption)
    return _report(title, result, [f"{told_ranks(result)}, {result['repeats']} rounds, all ranks at once."], [figure])


def _transport_title(result: Mapping[str, Any]) -> str:
    largest = result["sizes"][-1]
    to_gloo = largest["all_at_once"]["fetch_copy"]["of_gloo"]
    size = format_size(largest["size_bytes"])
    if to_gloo is None:
        return f"A fetch of {size} moves {largest['all_at_once']['fetch_copy']['gb_per_s']['median']:.2g} GB/s"
    return f"A fetch of {size} is {to_gloo:.3g} times as fast as gloo's all-gather"


def checkpoint(result: Mapping[str, Any]) -> Report:
    """Return what is to be told of `odc-mpi bench checkpoint`. Local."""
    goals = {goal["goal"]: goal["figure"] for goal in result["goals"]}
    variants = result["variants"]
    panels = {
        f"{what}, GB/s with quartiles": [
            _speed_bar(label, variants[f"{what}_{way}"], result["state_bytes"], way)
            for way, label in _CHECKPOINT_WAYS.items()
            if f"{what}_{way}" in variants
        ]
        for what in ("write", "read")
    }
    title = (
        f"Checkpoints are written at {goals['write_of_plain']:.2f} of the speed of plain files and read at "
        f"{goals['read_of_plain']:.2f}"
    )
    speeds = pictures.bars("speeds", title, panels, [".2f", ".2f"], [None, None])
    pause_title = f"Training waits for {goals['pause_of_write']:.0%} of the time that a checkpoint takes"
    pause = {
        "seconds, with quartiles": [
            Bar(label, variants[name]["seconds"]["median"], look, _quartiles(variants[name]["seconds"]))
            for name, label, look in (
                ("write_odc_mpi", "until it is on the disk", Look(BLUE)),
                ("pause", "training waits", Look(ORANGE, "///")),
            )
        ]
    }
    figures = [
        Figure(speeds, "Of the bytes of all ranks together, synced to the disk; what is read comes from the disk."),
        Figure(pictures.bars("pause", pause_title, pause, [".3f"], [None])),
    ]
    size = f"{result['state_bytes'] / 1e9:.2f} GB of parameters and optimizer state"
    lead = [f"{result['library']}, {result['ranks']} ranks, {size}, {result['repeats']} rounds."]
    return _report(title, result, lead, figures)


def _speed_bar(label: str, entry: Mapping[str, Any], num_bytes: int, way: str) -> Bar:
    low_s, high_s = _quartiles(entry["seconds"])
    look = Look(BLUE) if way == "odc_mpi" else _OTHER
    return Bar(label, entry["gb_per_s"], look, (num_bytes / 1e9 / high_s, num_bytes / 1e9 / low_s))


def progress(result: Mapping[str, Any]) -> Report:
    """Return what is to be told of `odc-mpi bench progress`. Local."""
    worst_s = max(goal["figure"] for goal in result["goals"] if goal["goal"] == "get_delay_s")
    longer = format_seconds(max(0.0, worst_s))
    title = f"A Get from a rank that computes takes up to {longer} longer than from one that idles"
    kinds = _named(result["get"], "kinds")
    gets = _panel(
        "ms until a Get is complete, medians", result["get"], "kinds", kinds, lambda kind: 1e3 * kind["median_s"]
    )
    figures = [
        Figure(_over_sizes("gets", title, [gets], "bytes of a Get"), "By what the rank does that is read from."),
        _politeness(result["politeness"]),
        _reductions(result["reduction"]),
    ]
    where = "another node" if result["other_node"] else "the same node"
    lead = [f"{told_ranks(result)}, {result['repeats']} rounds; rank 0 turns to rank {result['target']}, on {where}."]
    if result["mpich_async_progress"]:
        lead.append("MPICH's own asynchronous progress was on.")
    left_out = {
        f"{name} of {format_size(size['size_bytes'])}": reason
        for size in result["reduction"]
        for name, reason in size["left_out"].items()
    }
    return _report(title, {**result, "left_out": left_out}, lead, figures)


def _politeness(polite: Mapping[str, Any]) -> Figure:
    slow_down = polite["slow_down"]
    worst = max(slow_down, key=lambda name: slow_down[name]["median"])
    title = f"With nothing to serve, a thread costs a rank that computes at most {slow_down[worst]['median']:.1%}"
    bars = [
        Bar(
            "no thread" if name == "without" else f"thread of {name}",
            seconds["median"],
            Look(BLUE) if name in slow_down else _OTHER,
            _quartiles(seconds),
        )
        for name, seconds in polite["seconds"].items()
    ]
    heading = f"seconds for {polite['steps']} steps of a small net on every rank, with quartiles"
    return Figure(
        pictures.bars("politeness", title, {heading: bars}, [".4f"], [polite["seconds"]["without"]["median"]]),
        "The title has the median over rounds of ratios within a round.",
    )


def _reductions(sizes: Sequence[Mapping[str, Any]]) -> Figure:
    parts = {size["size_bytes"]: size["variants"].get("mailbox", {}).get("of_put") for size in sizes}
    known = {num_bytes: part for num_bytes, part in parts.items() if part is not None}
    title = "Pushes to a rank that computes, beside a Put"
    if known:
        least = min(known, key=lambda num_bytes: known[num_bytes])
        title = (
            f"To a rank that computes the mailbox pushes at {known[least]:.2f} of the speed of a Put, or faster: "
            f"{format_size(least)} is the slowest"
        )
    panel = _panel("GB/s, medians", sizes, "variants", _named(sizes, "variants"))
    return Figure(_over_sizes("pushes", title, [panel], "bytes of a push"))


def gpu(result: Mapping[str, Any]) -> Report:
    """Return what is to be told of `odc-mpi bench gpu`, or of as much of it as was measured. Local."""
    figures = []
    if result["sizes"]:
        panels = [
            _panel(heading, result["sizes"], "variants", _named(result["sizes"], "variants", names))
            for heading, names in (
                ("fetch a unit, GB/s", gpu_tables.FETCHES),
                ("push its gradient, GB/s", gpu_tables.PUSHES),
            )
        ]
        title = "Units that come to a GPU and leave it, beside plain copies"
        figures.append(Figure(_over_sizes("speeds", title, panels, "bytes of a unit"), "Medians over rounds."))
    if result["kernels"]:
        figures.append(_kernels(result["kernels"][-1]))
    if result["step"]:
        figures.append(_gpu_step(result["step"]))
    lead = [
        f"{'; '.join(result['devices'])}.",
        f"{told_ranks(result)}, torch {result['torch']}, {result['repeats']} rounds.",
    ]
    overhead = (result["step"] or {}).get("overhead", {})
    title = f"Fetches, pushes and kernels on {result['devices'][0]}"
    if overhead:
        name, spread = next(iter(overhead.items()))
        part = f"{abs(spread['median']):.1%} {'longer' if spread['median'] > 0 else 'less'}"
        title = f"With {gpu_tables.CONTENDERS[name]} a step on one GPU takes {part} than plain torch's"
    return _report(title, result, lead, figures)


def _kernels(size: Mapping[str, Any]) -> Figure:
    bars = [
        Bar(name.replace("_", " "), task["of_copy"], _OTHER if name.endswith("_torch") else Look(BLUE))
        for name, task in sorted(size["tasks"].items())
        if name != "copy"
    ]
    heading = "GB/s that have to be moved, as a multiple of a plain copy's"
    title = f"The owner's add and flattening on shards of {format_size(size['size_bytes'])}, beside torch's operators"
    return Figure(pictures.bars("kernels", title, {heading: bars}, [".2f"], [1.0]))


def _gpu_step(step: Mapping[str, Any]) -> Figure:
    names = {name: gpu_tables.CONTENDERS[name] for name in step["seconds"]}
    panels = {
        "seconds per minibatch, with quartiles": [
            Bar(label, step["seconds"][name]["median"], _step_look(name), _quartiles(step["seconds"][name]))
            for name, label in names.items()
        ],
        "tokens per second": [
            Bar(label, step["tokens_per_s"][name], _step_look(name)) for name, label in names.items()
        ],
    }
    title = f"A step of {step['model_numel'] / 1e6:,.0f} M parameters in {step['param_dtype']} on one rank"
    return Figure(pictures.bars("step", title, panels, [".4f", ",.0f"], [None, None]))


def _step_look(contender: str) -> Look:
    return _OTHER if contender == "plain" else Look(BLUE)


def _report(title: str, result: Mapping[str, Any], lead: Sequence[str], figures: Sequence[Figure]) -> Report:
    left_out = [f"Left out: {name}, {reason}." for name, reason in result["left_out"].items()]
    tables = {"Goals": {_goal(goal): _verdict(goal) for goal in result["goals"]}} if result.get("goals") else {}
    return Report(title, [*lead, f"{told_load(result).capitalize()}."], left_out, figures, tables)


def _goal(goal: Mapping[str, Any]) -> str:
    size = goal.get("size_bytes")
    words = [goal["goal"], goal.get("variant", ""), "" if size is None else format_size(size)]
    return " ".join(word.replace("_", " ") for word in words if word)


def _verdict(goal: Mapping[str, Any]) -> str:
    return f"{goal['figure']:.3g}, goal {goal['expected']:g}: {'reached' if goal['reached'] else 'not reached'}"


def _quartiles(spread: Mapping[str, float]) -> tuple[float, float]:
    return spread["low"], spread["high"]


def _gb_per_s(entry: Mapping[str, Any]) -> float | None:
    """Return the median, or None where nothing moves."""
    return entry["gb_per_s"]["median"] if entry["gb_per_s"] else None


def _named(sizes: Sequence[Mapping[str, Any]], part: str, titles: Mapping[str, str] | None = None) -> dict[str, Line]:
    """Return a line for whatever was measured in some size, or for those of it that have a title."""
    measured = dict.fromkeys(name for size in sizes for name in size[part])
    if titles is None:
        titles = {name: name.replace("_", " ") for name in measured}
    shown = [(name, " ".join(title.split())) for name, title in titles.items() if name in measured]
    return {name: (title, *look) for (name, title), look in zip(shown, cycle(_LINES), strict=False)}


def _panel(
    heading: str,
    sizes: Sequence[Mapping[str, Any]],
    part: str,
    drawn: Mapping[str, Line],
    figure: Callable[[Mapping[str, Any]], float | None] = _gb_per_s,
) -> Panel:
    """Return a curve over sizes for each line of which there is a figure in any of them."""
    found = []
    for name, (label, look, marker) in drawn.items():
        figures = [(size["size_bytes"], figure(size[part][name])) for size in sizes if name in size[part]]
        points = [(x, y) for x, y in figures if y is not None]
        if points:
            x, y = zip(*points, strict=True)
            found.append(Curve(label, x, y, look, marker))
    return Panel(heading, found, "log", 3.4)


def _over_sizes(name: str, title: str, panels: Sequence[Panel], xlabel: str) -> Picture:
    return pictures.curves(name, title, panels, xlabel, lambda x: format_size(round(x)))
