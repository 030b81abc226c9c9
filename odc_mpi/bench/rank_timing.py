"""Measurements on all ranks: common keys of a result, and times of the slowest rank."""

import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from odc_mpi.runtime.world import World


def header(world: World, benchmark: str, load: float, **fields: Any) -> dict[str, Any]:
    """Return the first keys of a benchmark's JSON object.

    Args:
        load: Load average of the node over one minute, read before the benchmark began.
        fields: Further keys, inserted before `load_average`.
    """
    return {
        "benchmark": benchmark,
        "library": world.mpi_library,
        "ranks": world.size,
        "nodes": world.num_nodes,
        **fields,
        "load_average": [load, os.getloadavg()[0]],
    }


def slowest_s(world: World, what: str, work: Callable[[], object]) -> float:
    """Call `work` on all ranks at the same time, and return the seconds of the slowest rank. Collective.

    `what` names the work in error messages.
    """
    world.wait_collective(world.comm.Ibarrier(), f"beginning {what} together")
    began = perf_counter()
    work()
    seconds = perf_counter() - began
    world.wait_collective(world.comm.Ibarrier(), f"ending {what}")
    return max(world.gather_objects(seconds))


def slowest(world: World, times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the time of the slowest rank for each variant and round. Collective."""
    ranks = world.gather_objects(times)
    return {name: [max(one) for one in zip(*(rank[name] for rank in ranks), strict=True)] for name in times}
