"""Reports on benchmarks of single parts: transport, progress threads, checkpoints, GPUs. Local."""

from collections.abc import Mapping, Sequence
from typing import Any

from odc_mpi.report.figures import (
    Column,
    OverSizes,
    gb_per_s_text,
    look,
    over_sizes,
    report_on,
    side_by_side,
    told_ranks,
)
from odc_mpi.report.page import Figure, Report, Table
from odc_mpi.report.picture_parts import Bar, picture
from odc_mpi.wording import format_seconds, format_size

#: Variants by name, as curves and as heads of columns.
_FETCHES = {
    "memcpy": "memcpy",
    "fetch_copy": "fetch",
    "fetch_zero_copy": "zero-copy",
    "mpi_allgather": "MPI_Allgather",
    "gloo_all_gather": "gloo",
}
_PUSHES = {
    "memcpy": "memcpy",
    "push_accumulate": "accumulate",
    "push_mailbox": "mailbox",
    "mpi_reduce_scatter": "MPI_Reduce_\nscatter",
    "gloo_reduce_scatter": "gloo",
}
_ALONE = {name: title for name, title in {**_FETCHES, **_PUSHES}.items() if name.startswith(("fetch", "push"))}
_GPU_FETCHES = {
    "copy_device": "copy\non GPU",
    "copy_to_device": "copy\nto GPU",
    "fetch_host": "from\nhosts",
    "fetch_host_in_place": "hosts,\nin place",
    "fetch_device": "from\nGPUs",
}
_GPU_PUSHES = {
    "copy_to_host": "copy\nto host",
    "push_host_accumulate": "hosts,\naccumulate",
    "push_host_mailbox": "hosts,\nmailbox",
    "push_device_accumulate": "GPUs,\naccumulate",
    "push_device_mailbox": "GPUs,\nmailbox",
}
_TASKS = ("copy", "add_fp32", "add_bf16", "flatten_fp32", "flatten_bf16")
_TORCH = "_torch"
_CONTENDERS = {"plain": "plain torch", "host_windows": "windows on hosts", "device_windows": "windows on GPUs"}
_CHECKPOINT_WAYS = {"plain": "plain files", "odc_mpi": "odc_mpi", "dcp": "torch.distributed.checkpoint"}


def transport(result: Mapping[str, Any]) -> Report:
    """Report on `odc-mpi bench transport`. Local."""
    sizes = result["sizes"]
    largest = sizes[-1]["all_at_once"]["fetch_copy"]
    title = f"A fetch of {format_size(sizes[-1]['size_bytes'])} "
    if largest["of_gloo"] is None:
        title += f"moves {largest['gb_per_s']['median']:.2g} GB/s"
    else:
        title += f"is {largest['of_gloo']:.3g} times as fast as gloo's all-gather"
    panels = [
        OverSizes("fetch a unit, GB/s", sizes, "all_at_once", _FETCHES),
        OverSizes("push its gradient, GB/s", sizes, "all_at_once", _PUSHES),
    ]
    caption = "GB/s of the whole unit for each rank; medians over rounds. Where a unit is read in place nothing moves."
    cores = result["cores_per_rank"]
    lead = [
        f"{told_ranks(result)}, {cores} core{'s'[: cores != 1]} each, {result['repeats']} rounds, all ranks at once"
    ]
    alone = OverSizes(
        "Rank 0 alone: time while the others idle; as a multiple, while they compute",
        sizes,
        "one_alone",
        _ALONE,
        cell=lambda entry: f"{format_seconds(entry['idle_s'])}; {entry['busy_s'] / entry['idle_s']:.2f}",
        told="",
    )
    tables = [alone.table()] if alone.measured() else []
    return report_on(result, title, lead, [over_sizes("speeds", title, panels, "bytes of a unit", caption)], tables)


def checkpoint(result: Mapping[str, Any]) -> Report:
    """Report on `odc-mpi bench checkpoint`. Local."""
    reached = {goal["goal"]: goal["figure"] for goal in result["goals"]}
    variants = result["variants"]
    seconds = {name: entry["seconds"] for name, entry in variants.items()}
    speeds = {name: _speed(entry, result["state_bytes"]) for name, entry in variants.items()}
    columns = [
        Column(f"{what}, GB/s with quartiles", {name.removeprefix(f"{what}_"): s for name, s in speeds.items()}, ".2f")
        for what in ("write", "read")
    ]
    title = (
        f"Checkpoints are written at {reached['write_of_plain']:.2f} of the speed of plain files and read at "
        f"{reached['read_of_plain']:.2f}"
    )
    caption = "Of the bytes of all ranks together, synced to the disk; what is read comes from the disk."
    pause_title = f"Training waits for {reached['pause_of_write']:.0%} of the time that a checkpoint takes"
    pause = {"write_odc_mpi": "until it is on the disk", "pause": "training waits"}
    figures = [
        side_by_side("speeds", title, columns, _CHECKPOINT_WAYS, caption),
        side_by_side("pause", pause_title, [Column("seconds, with quartiles", seconds, ".3f")], pause),
    ]
    size = f"{result['state_bytes'] / 1e9:.2f} GB of parameters and optimizer state"
    lead = [f"{result['library']}, {result['ranks']} ranks, {size}, {result['repeats']} rounds"]
    return report_on(result, title, lead, figures)


def _speed(entry: Mapping[str, Any], num_bytes: int) -> dict[str, float]:
    gb, seconds = num_bytes / 1e9, entry["seconds"]
    return {"low": gb / seconds["high"], "median": entry["gb_per_s"], "high": gb / seconds["low"]}


def progress(result: Mapping[str, Any]) -> Report:
    """Report on `odc-mpi bench progress`. Local."""
    worst_s = max(goal["figure"] for goal in result["goals"] if goal["goal"] == "get_delay_s")
    longer = format_seconds(max(0.0, worst_s))
    title = f"A Get from a rank that computes takes up to {longer} longer than from one that idles"
    gets = OverSizes(
        "ms until a Get is complete, medians",
        result["get"],
        "kinds",
        value=lambda kind: 1e3 * kind["median_s"],
        cell=lambda kind: f"{1e3 * kind['median_s']:.3g} ({1e3 * kind['longest_s']:.3g})",
        told=" (longest)",
    )
    caption = "By what the rank does that is read from."
    figures = [
        over_sizes("gets", title, [gets], "bytes of a Get", caption),
        _politeness(result["politeness"], "MPICH's own thread" if result["mpich_async_progress"] else "no thread"),
        _reductions(result["reduction"]),
    ]
    where = "another node" if result["other_node"] else "the same node"
    lead = [
        f"{told_ranks(result)}, {result['repeats']} rounds; rank 0 turns to rank {result['target']}, on {where}",
        f"cores that the ranks keep to: {', '.join(map(str, result['cores']))}",
    ]
    if result["mpich_async_progress"]:
        lead.append("MPICH's own asynchronous progress was on")
    left_out = {
        f"{name} of {format_size(size['size_bytes'])}": reason
        for size in result["reduction"]
        for name, reason in size["left_out"].items()
    }
    return report_on({**result, "left_out": left_out}, title, lead, figures)


def _politeness(polite: Mapping[str, Any], without: str) -> Figure:
    slow_down = polite["slow_down"]
    worst = max(slow_down, key=lambda name: slow_down[name]["median"])
    title = f"With nothing to serve, a thread costs a rank that computes at most {slow_down[worst]['median']:.1%}"
    labels = {name: f"thread of {name}" if name in slow_down else without for name in polite["seconds"]}
    heading = f"seconds for {polite['steps']} steps of a small net on every rank, with quartiles"
    columns = [
        Column(heading, polite["seconds"], ".4f", polite["seconds"]["without"]["median"]),
        Column("longer by", slow_down, "+.1%", is_drawn=False),
    ]
    caption = "The title has the median over rounds of ratios within a round."
    return side_by_side("politeness", title, columns, labels, caption)


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
    return over_sizes("pushes", title, [OverSizes("GB/s, medians", sizes, "variants")], "bytes of a push")


def gpu(result: Mapping[str, Any]) -> Report:
    """Report on as much of `odc-mpi bench gpu` as was measured. Local."""
    figures = []
    if result["sizes"]:
        panels = [
            OverSizes("fetch a unit, GB/s", result["sizes"], "variants", _GPU_FETCHES),
            OverSizes("push its gradient, GB/s", result["sizes"], "variants", _GPU_PUSHES),
        ]
        title = "Units that come to a GPU and leave it, beside plain copies"
        figures.append(over_sizes("speeds", title, panels, "bytes of a unit", "Medians over rounds."))
    if result["kernels"]:
        figures.append(_kernels(result["kernels"]))
    if result["step"]:
        figures.append(_step(result["step"]))
    lead = [
        f"{'; '.join(result['devices'])}",
        f"{told_ranks(result)}, torch {result['torch']}, {result['repeats']} rounds",
    ]
    overhead = (result["step"] or {}).get("overhead", {})
    title = f"Fetches, pushes and kernels on {result['devices'][0]}"
    if overhead:
        name, spread = next(iter(overhead.items()))
        part = f"{abs(spread['median']):.1%} {'longer' if spread['median'] > 0 else 'less'}"
        title = f"With {_CONTENDERS[name]} a step on one GPU takes {part} than plain torch's"
    return report_on(result, title, lead, figures)


def _kernels(sizes: Sequence[Mapping[str, Any]]) -> Figure:
    size = sizes[-1]
    bars = [
        Bar(name.replace("_", " "), task["of_copy"], look("torch" if name.endswith(_TORCH) else name))
        for name, task in sorted(size["tasks"].items())
        if name != "copy"
    ]
    heading = "GB/s that have to be moved, as a multiple of a plain copy's"
    title = f"The owner's add and flattening on shards of {format_size(size['size_bytes'])}, beside torch's operators"
    rows = [[format_size(size["size_bytes"]), *(_task(size["tasks"], name) for name in _TASKS)] for size in sizes]
    table = Table(
        "Copy: GB/s read and written; add, flatten: times the copy's; times torch's",
        ["shard", *(name.replace("_", "\n") for name in _TASKS)],
        rows,
        is_over_sizes=True,
    )
    return Figure(picture("bars", "kernels", title, {heading: bars}, [".2f"], [1.0]), tables=[table])


def _task(tasks: Mapping[str, Any], name: str) -> str:
    entry = tasks.get(name) or tasks[name + _TORCH]  # without kernels torch's operators stand for them
    if name == "copy":
        return gb_per_s_text(entry)
    beside = f"; {entry['of_torch']:.2f}" if entry["of_torch"] is not None else " (torch)"
    return f"{entry['of_copy']:.2f}{beside}"


def _step(step: Mapping[str, Any]) -> Figure:
    columns = [
        Column("seconds per minibatch, with quartiles", step["seconds"], ".4f"),
        Column("tokens per second", step["tokens_per_s"], ",.0f"),
        Column("overhead", step["overhead"], "+.1%", is_drawn=False),
    ]
    title = f"A step of {step['model_numel'] / 1e6:,.0f} M parameters in {step['param_dtype']} on one rank"
    caption = f"Losses are alike within {max(step['loss_deviation'].values()):.1g} of the loss."
    return side_by_side("step", title, columns, _CONTENDERS, caption)
