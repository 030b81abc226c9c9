"""The figures of `odc-mpi bench gpu` as tables for people, for terminals from 80 columns on. Local; for rank 0."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from odc_mpi.report.wording import told_load, told_ranks
from odc_mpi.wording import format_size

#: What is measured, by the name in the object, as the head of a column.
FETCHES = {
    "copy_device": "copy\non GPU",
    "copy_to_device": "copy\nto GPU",
    "fetch_host": "from\nhosts",
    "fetch_host_in_place": "hosts,\nin place",
    "fetch_device": "from\nGPUs",
}
PUSHES = {
    "copy_to_host": "copy\nto host",
    "push_host_accumulate": "hosts,\naccumulate",
    "push_host_mailbox": "hosts,\nmailbox",
    "push_device_accumulate": "GPUs,\naccumulate",
    "push_device_mailbox": "GPUs,\nmailbox",
}
_KERNELS = {
    "copy": "copy",
    "add_fp32": "add\nfp32",
    "add_bf16": "add\nbf16",
    "flatten_fp32": "flatten\nfp32",
    "flatten_bf16": "flatten\nbf16",
}
_TORCH = "_torch"
CONTENDERS = {"plain": "plain torch", "host_windows": "windows on hosts", "device_windows": "windows on GPUs"}


def gpu_tables(result: Mapping[str, Any]) -> Group:
    """Return the tables for what `bench.gpu.benchmark.measure` returned, or as much of it as was measured. Local."""
    sections = {}
    if result["sizes"]:
        sections["Fetch: GB/s of the unit ± half the distance of the quartiles"] = _speeds(FETCHES, result)
        sections["Push: GB/s"] = _speeds(PUSHES, result)
    if result["kernels"]:
        sections["Copy: GB/s read and written; add, flatten: times the copy's; times torch's"] = _kernels(result)
    if result["step"]:
        sections[_step_title(result["step"])] = _step(result["step"])
    parts = (part for title, table in sections.items() for part in (Text(title, "bold"), table))
    return Group(*_heading(result), Text(), *parts)


def _heading(result: Mapping[str, Any]) -> list[Text]:
    lines = [
        f"{'; '.join(result['devices'])}",
        f"{told_ranks(result)}, torch {result['torch']}, {result['repeats']} rounds",
        told_load(result),
        *(f"left out: {name}, {reason}" for name, reason in result["left_out"].items()),
    ]
    return [Text(line) for line in lines]


def _table(first: str, headers: Mapping[str, str]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(first, justify="right")
    for header in headers.values():
        table.add_column(header, justify="right")
    return table


def _speeds(columns: Mapping[str, str], result: Mapping[str, Any]) -> Table:
    measured = {name for size in result["sizes"] for name in size["variants"]}
    shown = {name: title for name, title in columns.items() if name in measured}
    table = _table("unit", shown)
    for size in result["sizes"]:
        cells = (size["variants"].get(name) for name in shown)
        table.add_row(format_size(size["size_bytes"]), *(_speed(cell) if cell else "-" for cell in cells))
    return table


def _speed(entry: Mapping[str, Any]) -> str:
    speed = entry["gb_per_s"]
    return f"{_short(speed['median'])} ±{(speed['high'] - speed['low']) / 2 / speed['median']:3.0%}"


def _kernels(result: Mapping[str, Any]) -> Table:
    table = _table("shard", _KERNELS)
    for size in result["kernels"]:
        tasks = size["tasks"]
        table.add_row(format_size(size["size_bytes"]), *(_task(tasks, name) for name in _KERNELS))
    return table


def _task(tasks: Mapping[str, Any], name: str) -> str:
    entry = tasks.get(name) or tasks[name + _TORCH]  # without kernels torch's operators stand for them
    if name == "copy":
        return _speed(entry)
    beside = f"; {entry['of_torch']:.2f}" if entry["of_torch"] is not None else " (torch)"
    return f"{entry['of_copy']:.2f}{beside}"


def _short(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}" if speed >= 10 else f"{speed:.2f}"


def _step_title(step: Mapping[str, Any]) -> str:
    return (
        f"A step on one rank: {step['model_numel'] / 1e6:,.0f} M parameters in {step['param_dtype']}, losses alike "
        f"within {max(step['loss_deviation'].values()):.1g}"
    )


def _step(step: Mapping[str, Any]) -> Table:
    table = _table("", {name: name for name in ("s per step", "tokens/s", "overhead", "quartiles")})
    for name, seconds in step["seconds"].items():
        overhead = step["overhead"].get(name)
        cells = [f"{overhead['median']:+.1%}", f"{overhead['low']:+.1%} to {overhead['high']:+.1%}"] if overhead else []
        table.add_row(CONTENDERS[name], f"{seconds['median']:.4f}", f"{step['tokens_per_s'][name]:,.0f}", *cells)
    return table
