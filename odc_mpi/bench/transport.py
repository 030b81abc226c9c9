"""How fast parameters are fetched and gradients pushed, beside memcpy, MPI's collectives and gloo, in one run.

One size of unit after the other. For each everything is allocated, touched and checked, then measured. There are
several units of a size, which take turns as a model's do, so that none is found in a core's own cache.

    all at once   all ranks do the same at the same time. Each variant in turn, round after round; a sample is some
                  operations in a row, begun together, and the slowest rank's time counts
    one alone     rank 0 fetches and pushes while the others wait for it in MPI (idle), and while they compute and do
                  not enter MPI (busy)

Variants, all of units in fp32:

    memcpy                   a copy of the unit in private memory, by one core per rank
    fetch_zero_copy          a view of the unit where all ranks are on one node: nothing moves
    fetch_copy               the unit into a buffer: the own shard copied, the others got from their owners
    push_NAME                the unit's gradient added into its owners' shards, for each reduction; a sample ends with
                             ordering point A, so that everything has arrived
    mpi_allgather, gloo_all_gather            the unit from all shards, as FSDP fetches
    mpi_reduce_scatter, gloo_reduce_scatter   the unit's gradient into a shard of sums, as FSDP reduces

GB/s are 10^9 bytes of the *whole unit* per rank and second: what a rank gets for its waiting. A rank's own shard, one
`ranks`-th of the unit, stays in its process; `crossing_bytes` is the rest.

`measure` returns, and `--json` prints, one object:

    benchmark        "transport"
    library, ranks, nodes, cores_per_rank, repeats, dtype
    load_average     [before, after], the node's over a minute: above `ranks`, somebody else was computing
    left_out         {variant: reason}
    sizes            a list, as asked for, of
        size_bytes, num_units, crossing_bytes
        all_at_once  {variant: {seconds, gb_per_s, of_memcpy, of_gloo}}: seconds of one operation, and GB/s, as
                     {low, median, high}, the quartiles over the rounds; the speed as a multiple of memcpy's and of
                     gloo's own all-gather or reduce-scatter, the median over rounds. Null where it says nothing
        one_alone    {variant: {idle_s, busy_s, computing_s}}: median seconds of one operation, complete at its targets,
                     and how long the others computed; what waits for busy targets takes that by `num_units`, or
                     longer. Empty on one rank
    goals            a list of {goal, size_bytes, variant, figure, expected, reached}; empty unless several ranks
                     share one node
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from statistics import median
from time import sleep
from typing import Any

import torch

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.bench.fetch_and_push import Units, Variant, check
from odc_mpi.bench.measure import Goal, entries, interleaved, seconds
from odc_mpi.bench.rank_timing import header, slowest
from odc_mpi.comm.collective import CollectiveCommunicator
from odc_mpi.formatting import format_size
from odc_mpi.probe.trial import repeat_for
from odc_mpi.runtime.world import World

#: A sample moves at least this much, so that beginning together and meeting at A (up to 0.4 ms) do not show in it ...
SAMPLE_BYTES = 64 << 20
#: ... but has at most so many operations, and so many where no byte moves.
MAX_OPERATIONS = 256
#: A lone rank fetches or pushes for so long, or each unit four times.
ALONE_S = 0.1
#: It begins so long after the last meeting, when the others are computing.
SETTLE_S = 0.01
#: At every size on one node: the goal, whose figure it is, and where that is in the variant's entry of `all_at_once`.
GOALS: tuple[tuple[Goal, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    (Goal("fetch_of_memcpy", ">=", 0.6), "fetch_copy", itemgetter("of_memcpy")),
    (Goal("fetch_of_gloo", ">=", 10.0), "fetch_copy", itemgetter("of_gloo")),
    (Goal("accumulate_of_memcpy", ">=", 0.4), "push_accumulate", itemgetter("of_memcpy")),
    (Goal("accumulate_of_gloo", ">=", 10.0), "push_accumulate", itemgetter("of_gloo")),
    (Goal("zero_copy_us", "<", 20.0), "fetch_zero_copy", lambda entry: 1e6 * entry["seconds"]["median"]),
)


def measure(
    world: World, sizes: list[int], repeats: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure all variants for units of these sizes. Collective.

    Args:
        world: The ranks.
        sizes: In bytes, multiples of 4.
        repeats: Rounds.
        report: Called with a line on what comes next.

    Returns:
        What the module's docstring describes, the same on every rank.

    Raises:
        UserError: Too little memory for a size, on every rank.
        RuntimeError: Something was fetched or summed wrongly.
    """
    load = os.getloadavg()[0]
    cores = world.cores_per_rank()
    torch.set_num_threads(1)  # memcpy and the fetch's own copies by one core per rank, also where there are more
    collectives = CollectiveCommunicator(world)
    one_node = world.num_nodes == 1
    gloo = Gloo(world) if one_node else None
    results = []
    for num_bytes in sizes:
        report(f"units of {format_size(num_bytes)}")
        results.append(_measure_size(world, num_bytes, repeats, collectives, gloo))
    if gloo is not None:
        gloo.close()
    collectives.free()
    gloo_variants = () if one_node else ("gloo_all_gather", "gloo_reduce_scatter")
    return {
        **header(world, "transport", load, cores_per_rank=cores, repeats=repeats, dtype="float32"),
        "left_out": dict.fromkeys(gloo_variants, "for ranks of one node only"),
        "sizes": results,
        "goals": [goal for result in results for goal in evaluate_goals(result)] if one_node and world.size > 1 else [],
    }


def evaluate_goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the figures of an entry of `sizes` with the goals; return entries of `goals`."""
    return [
        goal.evaluate(found, size_bytes=result["size_bytes"], variant=variant)
        for goal, variant, figure in GOALS
        if (found := figure(result["all_at_once"][variant])) is not None
    ]


def _measure_size(
    world: World, num_bytes: int, repeats: int, collectives: CollectiveCommunicator, gloo: Gloo | None
) -> dict[str, Any]:
    units = Units(world, num_bytes, collectives, gloo)
    check(world, units.variants)
    samples = {name: partial(_sample, collectives, variant, num_bytes) for name, variant in units.variants.items()}
    interleaved(samples, 1)  # the first touch of whatever the check did not use
    times = slowest(world, interleaved(samples, repeats))
    alone = {}
    if world.size > 1:
        alone = {
            name: _measure_lone_rank(world, collectives, variant)
            for name, variant in units.variants.items()
            if variant.one_sided
        }
    check(world, units.variants)
    result = {
        "size_bytes": num_bytes,
        "num_units": units.num_units,
        "crossing_bytes": units.crossing_bytes,
        "all_at_once": _entries(units.variants, num_bytes, times),
        "one_alone": alone,
    }
    units.free()
    return result


def _sample(collectives: CollectiveCommunicator, variant: Variant, num_bytes: int) -> float:
    times = max(1, min(MAX_OPERATIONS, SAMPLE_BYTES // num_bytes)) if variant.moves else MAX_OPERATIONS
    collectives.barrier()
    taken = seconds(variant.operations, times, variant.finish)
    variant.proceed()
    return taken


def _entries(variants: Mapping[str, Variant], num_bytes: int, times: Mapping[str, list[float]]) -> dict[str, Any]:
    found = entries(times, num_bytes, of_memcpy=lambda _: "memcpy", of_gloo=lambda name: variants[name].gloo)
    still = {"gb_per_s": None, "of_memcpy": None, "of_gloo": None}
    return {name: entry if variants[name].moves else entry | still for name, entry in found.items()}


def _measure_lone_rank(world: World, collectives: CollectiveCommunicator, variant: Variant) -> dict[str, float]:
    idle_s = _lone_rank_times(world, collectives, variant, ALONE_S)
    budget_s = max(ALONE_S, 4 * idle_s * len(variant.operations))
    # What begins in the first half of the others' computation cannot end with it unless it waits for it.
    computing_s = SETTLE_S + 2 * budget_s
    busy_s = _lone_rank_times(world, collectives, variant, budget_s, computing_s)
    return {"idle_s": idle_s, "busy_s": busy_s, "computing_s": computing_s}


def _compute() -> None:
    """Compute for about a millisecond without entering MPI."""
    vector = torch.ones(64)
    for _ in range(500):
        torch.add(vector, 1.0)


def _lone_rank_times(
    world: World, collectives: CollectiveCommunicator, variant: Variant, budget_s: float, computing_s: float = 0.0
) -> float:
    """Let rank 0 alone fetch or push for a while; return its median seconds to all. Collective."""
    collectives.barrier()
    times: list[float] = []
    if world.rank == 0:
        sleep(SETTLE_S)
        row = len(variant.operations)
        times = repeat_for(budget_s, lambda: seconds(variant.operations, row, variant.complete))
    elif computing_s:
        repeat_for(computing_s, _compute)
    # Idle ranks wait here for rank 0, in MPI: at point A, where they serve if the reduction needs it, or the barrier.
    variant.finish()
    variant.proceed()
    collectives.barrier()
    return world.gather_objects(median(times) if times else 0.0)[0]
