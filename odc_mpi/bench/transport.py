"""Benchmark of the speed of fetches and pushes, compared with memcpy, MPI collectives and gloo.

Sizes of units are measured one after another. For each size, memory is allocated, touched and checked first. Several
units of the size are moved one after another, like the units of a model, so that none stays in the cache of a core.

All ranks run the same variant at the same time; the variants alternate, round after round. A sample is a sequence of
operations that all ranks begin together; the time of the slowest rank counts. `odc-mpi doctor` measures what a single
rank can do while the others compute.

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
from typing import Any

import torch

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.bench.fetch_and_push import Units, Variant, check
from odc_mpi.bench.measure import entries, header, interleaved, seconds, slowest
from odc_mpi.comm.collective import CollectiveCommunicator
from odc_mpi.formatting import format_size
from odc_mpi.runtime.world import World

#: Minimum bytes that a sample moves, so that its synchronizations, of up to 0.4 ms, are negligible ...
SAMPLE_BYTES = 64 << 20
#: ... but at most this number of operations. Variants that move no bytes run this number.
MAX_OPERATIONS = 256


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
    check(world, units.variants)
    result = {
        "size_bytes": num_bytes,
        "num_units": units.num_units,
        "crossing_bytes": units.crossing_bytes,
        "all_at_once": _entries(units.variants, num_bytes, times),
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
