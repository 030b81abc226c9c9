"""What benchmarks on many ranks share: the beginning of their objects, and work that all ranks begin together."""

import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from odc_mpi.runtime.world import World


def header(world: World, benchmark: str, load: float, **fields: Any) -> dict[str, Any]:
    """Return the first keys of a benchmark's object.

    Args:
        world: The ranks.
        benchmark: Its name.
        load: The node's over a minute, before it began.
        fields: Further keys.
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
    """Return the slowest rank's seconds of some work that all begin together; `what` names it. Collective."""
    world.wait_collective(world.comm.Ibarrier(), f"beginning {what} together")
    began = perf_counter()
    work()
    seconds = perf_counter() - began
    world.wait_collective(world.comm.Ibarrier(), f"ending {what}")
    return max(world.gather_objects(seconds))


def slowest(world: World, times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return for each variant and round the slowest rank's time. Collective."""
    ranks = world.gather_objects(times)
    return {name: [max(one) for one in zip(*(rank[name] for rank in ranks), strict=True)] for name in times}
