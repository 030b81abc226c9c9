"""Benchmark of the speed of fetches and pushes, compared with memcpy, MPI collectives and gloo.

Sizes of units are measured one after another. For each size, memory is allocated, touched and checked first. Several
units of the size are moved one after another, like the units of a model, so that none stays in the cache of a core.

    all at once   all ranks run the same variant at the same time; the variants alternate, round after round. A sample
                  is a sequence of operations that all ranks begin together; the time of the slowest rank counts
    one alone     rank 0 fetches and pushes while the other ranks wait inside MPI (idle), and again while they compute
                  without entering MPI (busy)

Variants, all with units in fp32:

    memcpy                   copy of the unit in private memory, by one core per rank
    fetch_zero_copy          a view of the unit if all ranks are on one node: no bytes move
    fetch_copy               a copy of the unit in a buffer: this rank's shard is copied, the others are fetched
    push_NAME                the unit's gradient, added to the shards of its owners with `comm.reduction` NAME; a sample
                             includes the synchronization after which all gradients are complete
    mpi_allgather, gloo_all_gather            the unit from all shards, as FSDP fetches
    mpi_reduce_scatter, gloo_reduce_scatter   the unit's gradient into a shard of sums, as FSDP reduces

GB/s are 10^9 bytes of the *full unit* per second that a rank waits. A rank's own shard, 1/`ranks` of the unit, stays in
its process; `crossing_bytes` is the rest.

benchmarks/README.md describes the JSON object that `measure` returns.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import sleep
from typing import Any

import torch

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.bench.fetch_and_push import Units, Variant, check
from odc_mpi.bench.measure import entries, header, interleaved, seconds, slowest
from odc_mpi.comm.collective import CollectiveCommunicator
from odc_mpi.formatting import format_size
from odc_mpi.probe.trial import compute, repeat_for
from odc_mpi.runtime.world import World

#: Minimum bytes that a sample moves, so that its synchronizations, of up to 0.4 ms, are negligible ...
SAMPLE_BYTES = 64 << 20
#: ... but at most this number of operations. Variants that move no bytes run this number.
MAX_OPERATIONS = 256
#: Minimum seconds for which a single rank fetches or pushes; longer if needed to move each unit four times.
ALONE_S = 0.1
#: Seconds between the barrier and the first operation of a single rank. By then, the other ranks are computing.
SETTLE_S = 0.01


def measure(
    world: World, sizes: list[int], repeats: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure all variants for units of several sizes in bytes, multiples of 4. Collective.

    The JSON object, which is the same on every rank, is described in benchmarks/README.md.

    Raises:
        UserError: A node has too little memory for a size.
        RuntimeError: Fetched parameters or sums of gradients are wrong.
    """
    load = os.getloadavg()[0]
    cores = world.cores_per_rank()
    torch.set_num_threads(1)  # copies of memcpy and of fetches use one core per rank
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
    }


def _measure_size(
    world: World, num_bytes: int, repeats: int, collectives: CollectiveCommunicator, gloo: Gloo | None
) -> dict[str, Any]:
    units = Units(world, num_bytes, collectives, gloo)
    check(world, units.variants)
    samples = {name: partial(_sample, collectives, variant, num_bytes) for name, variant in units.variants.items()}
    interleaved(samples, 1)  # touches the memory that the check did not use
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
    seconds_per_operation = seconds(variant.operations, times, variant.finish)
    variant.proceed()
    return seconds_per_operation


def _entries(variants: Mapping[str, Variant], num_bytes: int, times: Mapping[str, list[float]]) -> dict[str, Any]:
    measured = entries(times, num_bytes, of_memcpy=lambda _: "memcpy", of_gloo=lambda name: variants[name].gloo)
    no_speed = {"gb_per_s": None, "of_memcpy": None, "of_gloo": None}
    return {name: entry if variants[name].moves else entry | no_speed for name, entry in measured.items()}


def _measure_lone_rank(world: World, collectives: CollectiveCommunicator, variant: Variant) -> dict[str, float]:
    idle_s = _lone_rank_times(world, collectives, variant, ALONE_S)
    budget_s = max(ALONE_S, 4 * idle_s * len(variant.operations))
    # Operations begin in the first half of the others' computation: one that ends with it has waited for it.
    computing_s = SETTLE_S + 2 * budget_s
    busy_s = _lone_rank_times(world, collectives, variant, budget_s, computing_s)
    return {"idle_s": idle_s, "busy_s": busy_s, "computing_s": computing_s}


def _lone_rank_times(
    world: World, collectives: CollectiveCommunicator, variant: Variant, budget_s: float, computing_s: float = 0.0
) -> float:
    """Run a variant on rank 0 only, for at least `budget_s`; return its median seconds per operation. Collective."""
    collectives.barrier()
    times: list[float] = []
    if world.rank == 0:
        sleep(SETTLE_S)
        num_units = len(variant.operations)
        times = repeat_for(budget_s, lambda: seconds(variant.operations, num_units, variant.complete))
    elif computing_s:
        compute(computing_s)
    # Idle ranks wait for rank 0 here, inside MPI: in the synchronization of gradients, where they also add those in
    # their mailbox, or in the barrier.
    variant.finish()
    variant.proceed()
    collectives.barrier()
    return world.gather_objects(median(times) if times else 0.0)[0]
