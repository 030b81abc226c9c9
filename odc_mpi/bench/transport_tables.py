"""The figures of a benchmark as tables for people, for terminals from 80 columns on. Local; for rank 0."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from odc_mpi.bench.transport import GOALS
from odc_mpi.report.wording import told_load, told_ranks
from odc_mpi.wording import format_size

_FETCHES = {
    "memcpy": "memcpy",
    "fetch_copy": "fetch",
    "mpi_allgather": "MPI_Allgather",
    "gloo_all_gather": "gloo",
    "fetch_zero_copy": "zero-copy",
}
_REDUCES = {"mpi_reduce_scatter": "MPI_Reduce_s.", "gloo_reduce_scatter": "gloo"}


def transport_tables(result: Mapping[str, Any]) -> Group:
    """Return the tables for what `bench.transport.measure` returned. Local."""
    names = list(result["sizes"][0]["all_at_once"])
    pushes = {name: name.removeprefix("push_") for name in names if name.startswith("push_")}
    fetches, reduces = ({name: title for name, title in all_.items() if name in names} for all_ in (_FETCHES, _REDUCES))
    sections = {
        "Fetch, all ranks at once: GB/s of the unit ± half the distance of the quartiles": _speeds(fetches, result),
        "Push, all ranks at once: GB/s": _speeds({"memcpy": "memcpy", **pushes, **reduces}, result),
    }
    if result["ranks"] > 1:
        sections["Rank 0 alone: time while the others idle; as a multiple, while they compute"] = _alone(pushes, result)
    if result["goals"]:
        sections["Goals on one node, and whether they are reached"] = _goals(result)
    parts = (part for title, table in sections.items() for part in (Text(title, "bold"), table))
    return Group(*_heading(result), Text(), *parts)


def _heading(result: Mapping[str, Any]) -> list[Text]:
    cores = result["cores_per_rank"]
    lines = [
        f"{told_ranks(result)}, {cores} core{'s'[: cores != 1]} each, {result['repeats']} rounds",
        told_load(result),
        *(f"left out: {name}, {reason}" for name, reason in result["left_out"].items()),
    ]
    return [Text(line) for line in lines]


def _table(headers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("unit", justify="right")
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _speeds(columns: Mapping[str, str], result: Mapping[str, Any]) -> Table:
    table = _table(list(columns.values()))
    for size in result["sizes"]:
        table.add_row(format_size(size["size_bytes"]), *(_speed(size["all_at_once"][name]) for name in columns))
    return table


def _speed(entry: Mapping[str, Any]) -> str:
    speed = entry["gb_per_s"]
    if speed is None:
        return _time(entry["seconds"]["median"])  # nothing moves
    return f"{speed['median']:.2f} ±{(speed['high'] - speed['low']) / 2 / speed['median']:4.0%}"


def _alone(pushes: Mapping[str, str], result: Mapping[str, Any]) -> Table:
    columns = {"fetch_zero_copy": "zero-copy", "fetch_copy": "fetch", **pushes}
    table = _table(list(columns.values()))
    for size in result["sizes"]:
        times = [size["one_alone"][name] for name in columns]
        cells = [f"{_time(one['idle_s'])}; {one['busy_s'] / one['idle_s']:.2f}" for one in times]
        table.add_row(format_size(size["size_bytes"]), *cells)
    return table


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _goals(result: Mapping[str, Any]) -> Table:
    table = _table([goal.title for goal in GOALS])
    for size in result["sizes"]:
        judged = {goal["goal"]: goal for goal in result["goals"] if goal["size_bytes"] == size["size_bytes"]}
        table.add_row(format_size(size["size_bytes"]), *(_verdict(judged.get(goal.name)) for goal in GOALS))
    return table


def _verdict(goal: Mapping[str, Any] | None) -> Text:
    if goal is None:
        return Text("-")
    # Not by colour alone.
    figure = f"{goal['figure']:.3g}"
    return Text(f"{figure} yes", "green") if goal["reached"] else Text(f"{figure} no ", "red")
