"""Probe of the MPI library by trials, since MPI does not report which operations are one-sided (MPI Forum issue 635).

First, the ranks on each node try shared memory. Then, for each kind of peer (same or other node), one pair of ranks
tries the operations one by one (`probe.trial`). All ranks always have the same report.

Run as a program, this module is one rank of the probe, a child of `odc-mpi doctor` (`runtime.start.launch`). Rank 0
sends the report so far to its parent before each trial and at the end.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from odc_mpi.errors import UserError
from odc_mpi.probe import cache
from odc_mpi.probe.gpu import has_gpu
from odc_mpi.probe.operations import COUNTER_BYTES
from odc_mpi.probe.report import OPERATIONS, OnMessage, ProbeReport, SharedMemory
from odc_mpi.probe.trial import LARGE_BYTES, TrialBudget, Trials, allocate, allocate_shared
from odc_mpi.runtime.library import loaded_files, thread_level
from odc_mpi.runtime.memory import free_shm_bytes
from odc_mpi.runtime.start.launch import ChildMessage, child_main
from odc_mpi.runtime.world import World

if TYPE_CHECKING:
    from odc_mpi.comm.device.device import Device

#: Time limits for each trial in `odc-mpi doctor`.
FULL = TrialBudget(idle_s=0.2, busy_s=(0.5, 1.5, 1.5), bandwidth_s=1.5, num_staleness_reads=10_000, staleness_s=3.0)
#: Time limits for each trial at the start of a training run on several nodes.
QUICK = TrialBudget(idle_s=0.01, busy_s=(0.04, 0.12, 0.12), bandwidth_s=0.15, num_staleness_reads=200, staleness_s=0.2)
#: Time limits for each trial at the start of a training run on one node, where MPI usually uses shared memory: only
#: correctness and one-sidedness. All trials take about 0.06 s if all operations are one-sided.
SELF_TEST = TrialBudget(0.01, (0.01, 0.04, 0.12, 0.12), bandwidth_s=0.0, num_staleness_reads=20, staleness_s=0.02)
#: Timeout for waits when this module runs as a program, in seconds. `odc-mpi doctor` usually ends the program earlier.
PROGRAM_S = 150.0


def probe(
    world: World,
    budget: TrialBudget,
    *,
    on_message: OnMessage = lambda report, operation: None,
    device: "Device | None" = None,
) -> ProbeReport:
    """Try shared memory, windows and, if `device` is given on all ranks, windows on devices. Collective.

    Calls `on_message` on every rank. A trial of a window on a device may crash the process. Raises `AllRanksUserError`
    if a node has too little memory for the smallest window that is tried.
    """
    report = replace(environment_report(world), shm_bytes=_free_shared_memory(world))
    on_message(report, "shared_memory")
    report = replace(report, shared_memory=_try_shared_memory(world))
    pairs = find_pairs(world.gather_objects(world.node))
    with world.background_progress_off():
        if pairs:
            report = _try_pairs(world, report, pairs, budget, on_message)
        if device is not None:
            # Imported late: it imports torch, which takes a second.
            from odc_mpi.probe.device_probe import try_device

            report = try_device(world, report, pairs, device, on_message)
    on_message(report, None)
    return report


def environment_report(world: World) -> ProbeReport:
    """Return a report on the library and the layout of the ranks, without trial results."""
    return ProbeReport(
        library=world.mpi_library,
        files=tuple(loaded_files()),
        variables=tuple(f"{name}={value}" for name, value in cache.mpi_settings().items()),
        thread_level=thread_level(),
        memory_model=world.memory_model,
        nodes=world.num_nodes,
        ranks_per_node=tuple(num_ranks for _, num_ranks in world.layout),
    )


def cached_or_new_report(world: World, *, with_speeds: bool = False) -> ProbeReport:
    """Return the report in rank 0's cache, or else that of a quick probe, on one node of a self-test. Collective.

    `with_speeds` is True if a self-test is not enough, because speeds of windows on devices are compared with others.
    """
    key, budget = report_key(world), QUICK if with_speeds or world.num_nodes > 1 else SELF_TEST
    cached = world.gather_objects(cache.load(key) if world.rank == 0 else None)[0]
    has_speeds = cached is not None and all(peer.get.gb_per_s for peer in cached.results().values())
    if cached is not None and (has_speeds or not with_speeds):
        # These two may differ between runs on the same stack.
        return replace(cached, thread_level=thread_level(), shm_bytes=_free_shared_memory(world))
    report = probe(world, budget)
    if world.rank == 0 and not report.problems:
        cache.store(key, report)
    return report


def report_key(world: World) -> dict[str, Any]:
    """Return the cache key of a report, which includes the hosts of all ranks. Collective."""
    ranks = world.gather_objects([world.node, socket.gethostname()])
    return {**cache.stack_key(MPI.Get_library_version()), "ranks": ranks}


def find_pairs(nodes: list[int]) -> dict[str, tuple[int, int]]:
    """Select an origin and a target for each kind of peer in the job. `nodes` contains the node index of each rank."""
    pairs = {}
    for origin, node in enumerate(nodes):
        if node in nodes[origin + 1 :]:
            pairs["same_node"] = (origin, nodes.index(node, origin + 1))
            break
    away = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
    if away:
        pairs["other_node"] = (0, away[0])
    return pairs


def _free_shared_memory(world: World) -> int | None:
    """Return the minimum number of free bytes in /dev/shm over all nodes, or None if no node has it. Collective."""
    return min((free for free in world.gather_objects(free_shm_bytes()) if free is not None), default=None)


def _try_shared_memory(world: World) -> SharedMemory:
    num_bytes = 5000  # not a multiple of a page or a cache line, so that padding would be detected
    node = world.split("node")
    rank, size = node.rank, node.size
    with node.collective("allocating shared memory"):
        win = MPI.Win.Allocate_shared(num_bytes, 1, MPI.INFO_NULL, node.comm)
        win.Lock_all(MPI.MODE_NOCHECK)
        segments = [np.asarray(win.Shared_query(other)[0]) for other in range(size)]
        segments[rank][:] = rank % 251 + 1
        win.Sync()
    node.wait_collective(node.comm.Ibarrier(), "writing shared memory")
    win.Sync()
    readable = all(each.size == num_bytes and (each == other % 251 + 1).all() for other, each in enumerate(segments))
    starts = [segment.ctypes.data for segment in segments]
    contiguous = starts == [starts[0] + i * num_bytes for i in range(size)]
    everywhere = world.gather_objects((readable, contiguous))
    segments.clear()
    with node.collective("freeing shared memory"):
        win.Unlock_all()
        win.Free()
    node.close()
    return SharedMemory(*map(all, zip(*everywhere, strict=True)))


def _try_pairs(
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], budget: TrialBudget, on_message: OnMessage
) -> ProbeReport:
    on_message(report, "window")
    far = {kind: pair for kind, pair in pairs.items() if kind == "other_node"}
    max_bytes = _max_bytes(world, report, len(pairs) + len(far)) if budget.bandwidth_s else LARGE_BYTES[0]
    trials = Trials(world, pairs, budget, max_bytes, allocate)
    # Parameters are in shared memory of each node, so Get from other nodes is tried on such a window.
    far_reads = Trials(world, far, budget, max_bytes, allocate_shared) if far else trials
    # Try each operation with all kinds of peers before the next: if it never returns, most results are known.
    for name in OPERATIONS:
        for kind in pairs:
            on_message(report, f"{kind} {name}")
            result, problem = (far_reads if (kind, name) == ("other_node", "get") else trials).run(name, kind)
            report = replace(report, peers=report.peers.with_result(kind, name, result))
            report = report.with_problem(f"{kind} {name}", problem)
    if far:
        far_reads.close()
    trials.close()
    return report


def _max_bytes(world: World, report: ProbeReport, num_targets: int) -> int:
    """Return the largest of `LARGE_BYTES` for which the windows leave half of /dev/shm free. Collective."""
    world.require_shared_memory(LARGE_BYTES[0] + COUNTER_BYTES, "the window of a probe")
    if report.shm_bytes is None:
        return LARGE_BYTES[-1]
    return max((size for size in LARGE_BYTES if 2 * num_targets * size <= report.shm_bytes), default=LARGE_BYTES[0])


def device_on_all_ranks(world: World) -> "Device | None":
    """Return this rank's device, or None if any rank has no device. Collective."""
    device = None
    if has_gpu():
        from odc_mpi.comm.device.device import find_device

        with suppress(UserError):  # torch cannot use the GPU
            device = find_device("cuda", world.host_rank)
            assert device is not None
            device.empty_for_windows(1)  # imports CuPy and initializes the GPU
    return device if all(world.gather_objects(device is not None)) else None


def main(send: Callable[[ChildMessage], None]) -> None:
    """Probe the MPI stack as a child process (see `runtime.start.launch`). Collective."""
    with World(timeout_s=PROGRAM_S) as world:
        # Before the first message: loading CuPy may take longer than the deadline of an operation.
        device = device_on_all_ranks(world)
        keys = {"host": report_key(world)}
        if device is not None:
            from odc_mpi.probe.device_probe import device_cache_key

            keys["device"] = device_cache_key(world, device)

        def on_message(report: ProbeReport, operation: str | None) -> None:
            send({"report": report.to_dict(), "operation": operation, "keys": keys})

        probe(world, FULL, on_message=on_message, device=device)


if __name__ == "__main__":
    child_main(main)
