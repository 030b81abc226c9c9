"""`odc-mpi bench progress`: what progress threads achieve and cost, for people or as one JSON object."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from odc_mpi.bench.measure import speaker
from odc_mpi.bench.progress.benchmark import GOALS, measure
from odc_mpi.report.wording import told_load, told_ranks
from odc_mpi.runtime.world import World
from odc_mpi.wording import format_size


def run(world: World, sizes: list[int], push_sizes: list[int], repeats: int, budget_s: float, as_json: bool) -> None:
    """Measure; rank 0 prints what came of it. Collective.

    Args:
        world: The ranks.
        sizes: See `benchmark.measure`.
        push_sizes: As well.
        repeats: As well.
        budget_s: As well.
        as_json: Print one object.

    Raises:
        AgreedError: As `benchmark.measure` does.
    """
    result = measure(world, sizes, push_sizes, repeats, budget_s, speaker(world.rank))
    if world.rank == 0:
        print(json.dumps(result, allow_nan=False) if as_json else report(result), flush=True)


def report(result: Mapping[str, Any]) -> str:
    """Return the figures as tables with a heading. Local."""
    sections = (_heading, _gets, _politeness, _pushes, _goals)
    return "\n".join("\n".join(section(result)) + "\n" for section in sections)


def _heading(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{told_ranks(result)}, {result['repeats']} rounds"
    yield f"cores that the ranks keep to: {', '.join(map(str, result['cores']))}"
    yield told_load(result)
    where = "another node" if result["other_node"] else "the same node"
    yield f"rank 0 turns to rank {result['target']}, on {where}"


def _gets(result: Mapping[str, Any]) -> Iterator[str]:
    yield "A Get from a rank that is served by its thread: ms, median (longest)"
    yield f"{'':8}" + "".join(f"{_words(kind):>18}" for kind in result["get"][0]["kinds"])
    for size in result["get"]:
        cells = (f"{1e3 * one['median_s']:.3g} ({1e3 * one['longest_s']:.3g})" for one in size["kinds"].values())
        yield f"{format_size(size['size_bytes']):8}" + "".join(f"{cell:>18}" for cell in cells)


def _politeness(result: Mapping[str, Any]) -> Iterator[str]:
    seconds = result["politeness"]["seconds"]
    yield "A thread with nothing to serve: how much longer computing takes, with quartiles"
    own = "with MPICH's own thread" if result["mpich_async_progress"] else "without any thread"
    yield f"{own}, {result['politeness']['steps']} steps took {seconds['without']['median']:.4f} s"
    for name, spread in result["politeness"]["slow_down"].items():
        yield f"{name:12}{spread['median']:8.1%}   {spread['low']:.1%} to {spread['high']:.1%}"


def _pushes(result: Mapping[str, Any]) -> Iterator[str]:
    names = list(result["reduction"][0]["variants"])
    yield "A push to a rank that computes: GB/s ± half the distance of the quartiles"
    yield f"{'':8}" + "".join(f"{name:>18}" for name in names)
    for size in result["reduction"]:
        cells = (_speed(size["variants"].get(name)) for name in names)
        yield f"{format_size(size['size_bytes']):8}" + "".join(f"{cell:>18}" for cell in cells)
    for size in result["reduction"]:
        for name, reason in size["left_out"].items():
            yield f"left out: {name} of {format_size(size['size_bytes'])}: {reason}"


def _speed(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    speed = entry["gb_per_s"]
    return f"{speed['median']:.3g} ±{(speed['high'] - speed['low']) / 2 / speed['median']:4.0%}"


def _goals(result: Mapping[str, Any]) -> Iterator[str]:
    yield "Goals, and whether they are reached"
    for goal in result["goals"]:
        bound = ">=" if GOALS[goal["goal"]][1] else "<="
        size = "" if goal["size_bytes"] is None else format_size(goal["size_bytes"])
        verdict = "yes" if goal["reached"] else "no"
        what = f"{goal['goal']:16}{size:>6} {_words(goal['variant']):17}"
        yield f"{what}{goal['figure']:10.3g}  {bound} {goal['expected']:g}: {verdict}"


def _words(name: str) -> str:
    return name.replace("_", " ")
